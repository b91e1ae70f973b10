"""`data-verify`: is a dataset, with all its tokens, still what was written?"""

import argparse

from training.core.report import Report
from training.core.units import format_bytes

SUMMARY = "hash every file of a data set and of its tokens"
EXAMPLE = "make data-verify DATASET=stdlib"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dataset", metavar="DATASET", help="name@hash, a name (its newest) or a folder")


def run(args: argparse.Namespace, report: Report) -> dict:
    from training.data import dataset

    folder = dataset.resolve(args.dataset)
    report.add("folder", folder)
    verified = dataset.verify(folder)
    report.add("dataset", verified.data.reference)
    report.add("files", f"{verified.num_files}, {format_bytes(verified.num_bytes)}, each as it was written")
    report.add("tokens", f"{len(verified.tokens)} sets: {', '.join(verified.tokens)}" if verified.tokens else "none")
    return {
        "dataset": verified.data.reference, "files": verified.num_files, "bytes": verified.num_bytes,
        "tokens": list(verified.tokens),
    }  # fmt: skip
