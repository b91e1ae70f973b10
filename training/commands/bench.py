"""`bench`: how quick the calculator is, as ratios of times of one run."""

import argparse
from pathlib import Path

from training.core.report import Report

SUMMARY = "time memfit, its replay and its solving against each other"
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
    return {"schema": 1, "ratios": [ratio.to_json() for ratio in ratios]}
