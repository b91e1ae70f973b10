"""`bench`: how quick memfit and the tokenizer are, as ratios of times of one run."""

import argparse
from pathlib import Path

from training.core.report import Report

SUMMARY = "time memfit, its replay and its solving, and the tokenizer beside the library"
EXAMPLE = "make bench"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", default="recipes/reference/qlora-8b.yaml", metavar="FILE", help="the recipe that is estimated"
    )


def run(args: argparse.Namespace, report: Report) -> dict:
    from training.calculator import speed as of_memfit
    from training.tokenizer import speed as of_tokenizer

    ratios = (*of_memfit.run(Path(args.config)), *of_tokenizer.run())
    for ratio in ratios:
        times = f"{ratio.seconds * 1e3:.0f} ms over {ratio.base_seconds * 1e3:.0f}"
        report.add(ratio.name, f"{ratio.value:.2f} ({times})")
    return {"schema": 1, "ratios": [ratio.to_json() for ratio in ratios]}
