"""`data-verify`: is a dataset, with all its tokens and what teachers said of them, still what was written?"""

import argparse
from collections.abc import Sequence

from training.core.report import Report
from training.core.units import format_bytes, format_number

SUMMARY = "hash every file of a data set, its tokens and its teachers' recordings"
EXAMPLE = "make data-verify DATASET=stdlib"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dataset", metavar="DATASET", help="name@hash, a name (its newest) or a folder")


def run(args: argparse.Namespace, report: Report) -> dict:
    from training.data import dataset
    from training.objectives import teaching

    folder = dataset.resolve(args.dataset)
    report.add("folder", folder)
    verified = dataset.verify(folder)
    report.add("dataset", verified.data.reference)
    report.add("files", f"{verified.num_files}, {format_bytes(verified.num_bytes)}, each as it was written")
    report.add("tokens", _named("set", verified.tokens))
    said = {teaching.reference(*one): _size(one[1]) for one in verified.teachers.items()}
    report.add("teachers", _named("recording", [f"{name} ({size})" for name, size in said.items()]))
    return {
        "dataset": verified.data.reference, "files": verified.num_files, "bytes": verified.num_bytes,
        "tokens": list(verified.tokens), "teachers": list(said),
    }  # fmt: skip


def _size(manifest: dict) -> str:
    return f"{format_number(manifest['train']['rows'], 'label')}, top {manifest['top_k']} of each"


def _named(noun: str, names: Sequence[str]) -> str:
    return f"{format_number(len(names), noun)}: {', '.join(names)}" if names else "none"
