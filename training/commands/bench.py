"""`bench`: how quick the rooms are beside what else does their work, as ratios of times of one run."""

import argparse
import itertools
from pathlib import Path

from training.core.report import Report
from training.core.timing import Ratio
from training.core.units import format_bytes

SUMMARY = "time memfit, text to records, the tokenizer, the loop and export, beside what else does it"
EXAMPLE = "make bench"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config",
        metavar="FILE",
        default="recipes/demo.yaml",
        help="the recipe that memfit reads (default %(default)s)",
    )


def run(args: argparse.Namespace, report: Report) -> dict:
    from training.calculator import speed as of_memfit
    from training.data import speed as of_data
    from training.engine import loop_speed as of_the_loop
    from training.export import speed as of_export
    from training.tokenizer import speed as of_tokenizer

    of_rooms = (of_data.run(), of_tokenizer.run(), of_the_loop.run(), of_export.run())
    ratios = (*of_memfit.run(Path(args.config)), *itertools.chain(*of_rooms))
    for ratio in ratios:
        report.add(ratio.name, f"{ratio.value:.2f} ({_figures(ratio)})")
    return {"schema": 1, "ratios": [ratio.to_json() for ratio in ratios]}


def _figures(ratio: Ratio) -> str:
    figures = [f"{ratio.seconds * 1e3:.0f} ms over {ratio.base_seconds * 1e3:.0f}"]
    if ratio.num_bytes is not None:
        figures.append(f"{format_bytes(round(ratio.num_bytes / ratio.seconds))} a second")
    if ratio.peak_bytes is not None:
        figures.append(f"peak memory {format_bytes(ratio.peak_bytes)}")
    return ", ".join(figures)
