"""`data-prepare`: from records to a dataset that training can read."""

import argparse
from pathlib import Path

from training.core.errors import UserError
from training.core.report import Report
from training.core.units import format_bytes, parse_bytes

SUMMARY = "read records strictly, drop exact duplicates, split by group"
EXAMPLE = 'make data-prepare INPUT=my.jsonl ARGS="--name mine"'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from training.data.settings import GROUP_BY, Settings

    add = parser.add_argument
    add("input", nargs="?", type=Path, metavar="INPUT.jsonl", help="a JSONL file, one object a line")
    add("--stdlib", action="store_true", help="take the sources of this Python's standard library instead")
    add("--name", help="the dataset's name (default: the file's)")
    add("--train-ratio", type=float, default=Settings.train_ratio, help="share of train (default %(default)s)")
    add("--val-ratio", type=float, default=Settings.val_ratio, help="share of validation (default %(default)s)")
    add("--seed", type=int, default=Settings.seed, help="decides which group goes where (default %(default)s)")
    add("--cutoff", metavar="YYYY-MM-DD", help="records dated after that day go to test_postcutoff alone")
    add("--max-record", metavar="SIZE", help="the longest line that is read (default 16MiB)")
    add(
        "--group-by",
        choices=GROUP_BY,
        default=Settings.group_by,
        help="what stays together: the field group, else source, else the record; or each record alone",
    )


def run(args: argparse.Namespace, report: Report) -> dict:
    from training.data import dataset
    from training.data.prepare import Preparation
    from training.data.split import Settings

    source, name = _source(args)
    settings = Settings(args.train_ratio, args.val_ratio, args.seed, args.cutoff, args.group_by)
    folder, reused = Preparation(source, name=args.name or name, settings=settings).run()
    data = dataset.load(folder)
    _report(report, data, reused)
    return {
        "dataset": data.reference, "hash": data.hash, "folder": str(folder), "reused": reused,
        "input": data.manifest["input"], "settings": data.manifest["settings"], "stats": data.stats,
    }  # fmt: skip


def _source(args: argparse.Namespace):
    from training.core import store
    from training.data.jsonl import MAX_RECORD_BYTES, Jsonl
    from training.data.stdlib import StandardLibrary

    if args.stdlib == (args.input is not None):
        raise UserError(
            "one input, please",
            found="both a file and --stdlib" if args.stdlib else "neither a file nor --stdlib",
            expected="a JSONL file, or --stdlib",
            next_command=EXAMPLE,
        )
    if args.stdlib:
        return StandardLibrary(), "stdlib"
    source = Jsonl(args.input, parse_bytes(args.max_record) if args.max_record else MAX_RECORD_BYTES)
    return source, store.name_from(args.input.stem)


def _report(report: Report, data, reused: bool) -> None:
    counts = data.stats["records"]
    report.add("dataset", data.reference + (" (unchanged, reused)" if reused else ""))
    report.add("input", f"{data.manifest['input']['label']}, {format_bytes(data.manifest['input']['bytes'])}")
    report.add("records", "{input} = {kept} kept + {duplicates} duplicates + {rejected} rejected".format(**counts))
    for reason, count in (data.stats["rejected"] | data.stats["lines"]).items():
        if count:
            report.add(reason.replace("_", " "), count)
    kept = counts["kept"]
    for name, split in data.stats["splits"].items():
        share = f"{100 * split['records'] / kept:.1f} %"
        size = format_bytes(split["text_bytes"])
        report.add(name, f"{split['records']} records ({share}), {split['groups']} groups, {size} of text")
    report.add("folder", data.folder)
    report.add("next", f"make tokenizer-train DATASET={data.reference}")
