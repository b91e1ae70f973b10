"""`bench`: how quick the rooms are beside what else does their work, as ratios of times of one run."""

import argparse
import importlib

from training.core.report import Report
from training.core.timing import Ratio
from training.core.units import format_bytes

SUMMARY = "time memfit, the data, the tokenizer, the trainer and export, beside what else does it"
EXAMPLE = "make bench"


ROOMS = {
    "memfit": "training.calculator.speed", "data": "training.data.speed", "tokenizer": "training.tokenizer.speed",
    "loop": "training.engine.loop_speed", "trainer": "training.engine.speed", "export": "training.export.speed",
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--room", choices=ROOMS, action="append", help="time this alone; may be given again (all of it takes minutes)"
    )


def run(args: argparse.Namespace, report: Report) -> dict:
    ratios = [ratio for room in args.room or ROOMS for ratio in importlib.import_module(ROOMS[room]).run()]
    for ratio in ratios:
        report.add(ratio.name, f"{ratio.value:.2f} ({_figures(ratio)})")
    return {"schema": 1, "ratios": [ratio.to_json() for ratio in ratios]}


def _figures(ratio: Ratio) -> str:
    figures = [f"{ratio.seconds * 1e3:.0f} ms over {ratio.base_seconds * 1e3:.0f}"]
    if ratio.num_bytes is not None:
        figures.append(f"{format_bytes(round(ratio.num_bytes / ratio.seconds))} a second")
    if ratio.peak_bytes is not None:
        over = f" over {format_bytes(ratio.base_peak_bytes)}" if ratio.base_peak_bytes is not None else ""
        figures.append(f"peak memory {format_bytes(ratio.peak_bytes)}{over}")
    return ", ".join(figures)
