"""`data-peek`: look at a data set, and at what training reads of it."""

import argparse
from pathlib import Path

from training.core.errors import UserError
from training.core.log import say
from training.core.report import Report
from training.core.units import format_number

SUMMARY = "look at records: what is trained, lengths, sources"
EXAMPLE = 'make data-peek DATASET=stdlib ARGS="--tokenizer stdlib --records 2"'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from training.data.settings import SPLITS
    from training.data.supervision import LOSS_ON, ON_ERROR, OVERLONG, Settings
    from training.tokenizer.artifact import CALLED

    add = parser.add_argument
    add("dataset", metavar="DATASET", help="a data set: name, name@hash or a folder")
    add("--split", choices=SPLITS, default="train", help="which of its files (default %(default)s)")
    add("--tokenizer", metavar="TOKENIZER", help=f"show it in tokens of this tokenizer: {CALLED}")
    add("--loss-on", choices=LOSS_ON, default=Settings.loss_on, help="what is trained of records with answers")
    add("--seq-len", type=int, default=Settings.seq_len, help="the most tokens of such a record (default %(default)s)")
    add(
        "--overlong",
        choices=OVERLONG,
        default=Settings.overlong,
        help="what becomes of a longer one (default %(default)s)",
    )
    add(
        "--on-error",
        choices=ON_ERROR,
        default=Settings.on_error,
        help="and of one that cannot be used (default %(default)s)",
    )
    add("--template-date", metavar="YYYY-MM-DD", help="the day that a chat template which reads the clock is told")
    add("--config", metavar="FILE", help="take the tokenizer and all of these from a recipe instead")
    add("overrides", nargs="*", metavar="KEY=VALUE", help="values that replace the recipe's")
    add("--records", type=int, default=3, help="how many examples are drawn (default %(default)s)")
    add("--at", action="append", type=int, metavar="LINE", help="show the record of this line instead; repeatable")
    add("--longest", action="store_true", help="show the longest records instead")
    add("--seed", type=int, default=7, help="decides the draw (default %(default)s)")
    add("--ids", action="store_true", help="a line a token: id, text, whether it is trained")
    add("--plot", metavar="FILE", help="draw the lengths, as PNG or SVG")


def run(args: argparse.Namespace, report: Report) -> dict:
    from training.core import figure
    from training.data import dataset, peek_view
    from training.data.peek import Peek

    if args.records < 0:
        raise UserError("not a number of records", where="--records", found=args.records, next_command=EXAMPLE)
    if args.plot:
        figure.require_kind(Path(args.plot))
    data = dataset.load(dataset.resolve(args.dataset))
    data.path(args.split)
    tokenizer, tokens, figures = _tokens(args, data)
    look = Peek(data, args.split, tokens, tokenizer)
    examples = _examples(args, look)
    for line in (*peek_view.source_lines(look), "", *peek_view.length_lines(look), ""):
        say(line)
    colour = peek_view.has_colour()
    for example in examples:
        for line in peek_view.example_lines(example, tokenizer, colour=colour, with_ids=args.ids):
            say(line)
    if args.plot:
        peek_view.draw_lengths(look, Path(args.plot))
        report.add("picture", args.plot)
    _report(report, look, figures)
    return _document(look, examples, figures)


def _tokens(args: argparse.Namespace, data) -> tuple:
    """The tokenizer, the split's tokens and what their manifest says of it; nothing where neither option asks."""
    from training.data import tokens as shards

    tokenizer, settings = _settings(args)
    if tokenizer is None:
        return None, None, {}
    found = shards.open_split(shards.tokenize(data, tokenizer, settings), args.split)
    return tokenizer, found, found.manifest["splits"][args.split]


def _settings(args: argparse.Namespace) -> tuple:
    """The tokenizer, where one is meant, and what decides the labels: the recipe's, where one is named."""
    from training.data.supervision import Settings
    from training.recipe.load import load
    from training.tokenizer import artifact

    own = artifact.find(args.tokenizer) if args.tokenizer else None
    if args.config:
        recipe = load(Path(args.config), args.overrides).recipe
        has_one = recipe.tokenizer.path is not None or recipe.model.base is not None
        return own or (artifact.of_recipe(recipe) if has_one else None), Settings.of(recipe.data)
    if args.overrides:
        raise UserError("values without a recipe", found=" ".join(args.overrides), next_command=EXAMPLE)
    return own, Settings(args.loss_on, args.seq_len, args.overlong, args.on_error, args.template_date)


def _examples(args: argparse.Namespace, look) -> list:
    if args.longest and not args.at:
        return look.longest_examples(args.records)
    return look.examples([line - 1 for line in args.at] if args.at else look.draw(args.records, args.seed))


def _report(report: Report, look, figures: dict) -> None:
    from training.data import peek_view

    report.add("dataset", f"{look.data.reference}, {look.split}")
    report.add("records", look.num_records)
    if look.tokens is not None:
        trained = int(look.trained.sum())
        share = trained / max(1, look.tokens.num_tokens)
        report.add("tokens", f"{look.tokens.num_tokens:,} of {look.tokenizer.name}, {share:.1%} of them trained")
        report.add("folder", look.tokens.folder)
    for reason, count in (figures.get("left_out", {}) | figures.get("noted", {})).items():
        if count:
            report.add(reason.replace("_", " "), format_number(count, "record"))
    spread = "  ".join(f"{name} {value}" for name, value in peek_view.percentiles(look).items())
    report.add("length", f"{spread} {look.unit}")


def _document(look, examples: list, figures: dict) -> dict:
    from dataclasses import asdict

    from training.data import peek, peek_view

    found = peek.histogram(look.lengths)
    return {
        "schema": 1, "dataset": look.data.reference, "split": look.split, "unit": look.unit, "figures": figures,
        "sources": [asdict(row) for row in look.sources()],
        "lengths": {**peek_view.percentiles(look), "edges": found.edges, "counts": found.counts},
        "longest": look.longest(10),
        "examples": [asdict(example) for example in examples],
    }  # fmt: skip
