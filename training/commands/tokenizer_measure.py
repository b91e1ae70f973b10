"""`tokenizer-measure`: tokenizers side by side on a data set, and which size of vocabulary to train."""

import argparse
from pathlib import Path

from training.core.errors import UserError
from training.core.log import say
from training.core.report import Report, make_command
from training.core.units import format_bytes, format_count

SUMMARY = "compare tokenizers on a data set, or sizes of vocabulary with their cost"
EXAMPLE = 'make tokenizer-measure DATASET=stdlib ARGS="stdlib /app/models/other.gguf --plot compare.png"'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from training.tokenizer.artifact import CALLED
    from training.tokenizer.pretokenizers import CONFIGURATIONS, DEFAULT

    known, add = ", ".join(CONFIGURATIONS), parser.add_argument
    add("tokenizers", nargs="*", metavar="TOKENIZER", help=CALLED)
    add("--dataset", required=True, metavar="REF", help="name@hash, a name (its newest) or a folder")
    add("--sweep", metavar="SIZE,SIZE", help="train vocabularies of these sizes and price them for --config")
    add("--pre-tokenizer", default=DEFAULT, metavar="NAME", help=f"of the sweep: one of {known} (default %(default)s)")
    add(
        "--config", default="recipes/demo/pretrain-stdlib.yaml", metavar="FILE", help="the recipe (default %(default)s)"
    )
    add("--plot", metavar="FILE", help="draw it, as PNG or SVG")


def run(args: argparse.Namespace, report: Report) -> dict:
    from training.core import figure, process
    from training.data import dataset

    if args.plot:
        figure.require_kind(Path(args.plot))
    if bool(args.sweep) == bool(args.tokenizers):
        raise UserError(
            "name tokenizers to compare, or sizes to sweep", found="both" if args.sweep else "neither",
            expected="TOKENIZER ... or --sweep SIZE,SIZE",
            next_command=make_command(
                "tokenizer-measure", DATASET=args.dataset, ARGS=f"--sweep {args.sweep or '1024,2048,4096'}"
            ),
        )  # fmt: skip
    data = dataset.load(dataset.resolve(args.dataset))
    document = _sweep(args, data, report) if args.sweep else _compare(args, data, report)
    if args.plot:
        report.add("picture", args.plot)
    report.add("peak memory", format_bytes(process.peak_rss_bytes()))
    return {"schema": 1, "dataset": data.reference, **document}


def _compare(args: argparse.Namespace, data, report: Report) -> dict:
    from training.data import corpus
    from training.tokenizer import artifact, measure, measure_view

    opened = [artifact.find(text) for text in args.tokenizers]
    measured = [measure.measure(tokenizer, corpus.named_texts(data)) for tokenizer in opened]
    for line in (*measure_view.comparison_lines(measured), ""):
        say(line)
    if args.plot:
        measure_view.draw_comparison(measured, Path(args.plot))
    report.add("measured on", f"{data.reference}, {format_bytes(measured[0].all.text_bytes)} of text")
    for one in sorted(measured, key=lambda one: -one.all.bytes_per_token)[:6]:
        report.add(one.tokenizer.name[:24], f"{one.all.bytes_per_token:.3f} bytes per token")
    return {"tokenizers": [one.to_json() for one in measured]}


def _sweep(args: argparse.Namespace, data, report: Report) -> dict:
    from training.data import corpus
    from training.tokenizer import measure_view, sweep
    from training.tokenizer.train import Settings

    settings, sizes = Settings(pre_tokenizer=args.pre_tokenizer), _sizes(args.sweep)
    points = sweep.sweep(corpus.of(data), settings, sizes, list(corpus.named_texts(data)), Path(args.config))
    best, further = sweep.recommended(points), sweep.further(points, sizes)
    for line in (*measure_view.sweep_lines(points, best), ""):
        say(line)
    if args.plot:
        measure_view.draw_sweep(points, best, Path(args.plot))
    report.add("priced for", f"{args.config}, on {data.reference}")
    for point in points[:8]:
        cost = f"{format_count(point.parameters)} parameters, {format_bytes(point.memory_bytes)}"
        report.add(f"{point.vocab_size} entries", f"{point.measured.all.bytes_per_token:.3f} bytes per token, {cost}")
    end = "; it is at the end of the sizes tried, and a size beyond may need fewer" if further else ""
    report.add("recommended", f"{best.vocab_size} entries: the fewest multiplications for a byte of text{end}")
    report.add("next", _next(args, data.reference, best.vocab_size, further))
    return {"points": [point.to_json() for point in points], "recommended": best.vocab_size, "further": further}


def _next(args: argparse.Namespace, reference: str, best: int, further: list[int]) -> str:
    """Train the best size, or try those beyond it first; the sweep's own options stay."""
    if not further:
        return make_command(
            "tokenizer-train", "--vocab-size", str(best), "--pre-tokenizer", args.pre_tokenizer, DATASET=reference
        )
    sizes = ",".join(map(str, further))
    options = ("--sweep", sizes, "--pre-tokenizer", args.pre_tokenizer, "--config", args.config)
    return make_command("tokenizer-measure", *options, DATASET=reference)


def _sizes(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdigit() for part in parts):
        raise UserError("the sizes are not numbers", where="--sweep", found=text, expected="such as 2048,4096,8192")
    return [int(part) for part in parts]
