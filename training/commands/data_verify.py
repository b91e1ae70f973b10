"""`data-verify`: is a dataset, with all its tokens and what teachers said of them, still what was written?"""

import argparse

from training.core.report import Report
from training.core.units import format_bytes, format_number

SUMMARY = "hash every file of a data set, its tokens and its teachers' records"
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
    report.add("tokens", _named("set", verified.tokens))
    report.add("teachers", _named("record", verified.teachers))
    return {
        "dataset": verified.data.reference, "files": verified.num_files, "bytes": verified.num_bytes,
        "tokens": list(verified.tokens), "teachers": list(verified.teachers),
    }  # fmt: skip


def _named(noun: str, names: tuple[str, ...]) -> str:
    return f"{format_number(len(names), noun)}: {', '.join(names)}" if names else "none"
