"""`bench`: how quick the calculator and the data's reading are, as ratios of times of one run."""

import argparse
from pathlib import Path

from training.core.report import Report
from training.core.units import format_bytes

SUMMARY = "time memfit, its replay and its solving, and text to records"
EXAMPLE = "make bench"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", default="recipes/reference/qlora-8b.yaml", metavar="FILE", help="the recipe that is estimated"
    )


def run(args: argparse.Namespace, report: Report) -> dict:
    from training.calculator import speed

    ratios = speed.run(Path(args.config))
    for ratio in ratios:
        times = f"{ratio.seconds * 1e3:.0f} ms over {ratio.base_seconds * 1e3:.0f}"
        report.add(ratio.name, f"{ratio.value:.1f} ({times})")
    data = _data(report)
    return {"schema": 1, "ratios": [ratio.to_json() for ratio in (*ratios, *data)]}


def _data(report: Report) -> list:
    from training.data import speed

    ratios = speed.run()
    for ratio in ratios:
        rate, peak = format_bytes(ratio.bytes_per_second), format_bytes(ratio.peak_bytes)
        report.add(ratio.name, f"{ratio.value:.1f} ({rate} a second, peak memory {peak})")
    return ratios
