"""`data-prepare`: from records to a dataset that training can read."""

import argparse
from pathlib import Path

from training.core.errors import UserError
from training.core.report import Report
from training.core.units import format_bytes, format_number, parse_bytes

SUMMARY = "read records strictly, drop duplicates, split by group, draw"
EXAMPLE = 'make data-prepare INPUT=my.jsonl ARGS="--name mine"'
_SHOWN_VALUES = 5
_FAR_OFF = 0.15
"""How far a split's share may be from the one that was asked for before it is told."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from training.data.record import FORMS
    from training.data.settings import GROUP_BY, ON_ERROR, Settings

    add = parser.add_argument
    add("input", nargs="?", metavar="INPUT", help="JSONL (plain, gzip, zstd), Parquet, or a folder of such or of text")
    add("--source", action="append", default=[], metavar="PATH[=WEIGHT]", help="one more input, and how often each of "
        "its training records is seen: 2 is twice, 0.5 every other; repeatable")  # fmt: skip
    add("--stdlib", action="store_true", help="take the sources of this Python's standard library")
    add("--docstrings", action="store_true", help="take its functions' docstrings, to be answered with their names")
    add("--form", choices=tuple(FORMS), help="the records' form (default: what the first record has)")
    add("--name", help="the dataset's name (default: the first input's)")
    add("--on-error", choices=ON_ERROR, default=Settings.on_error, help="at a bad record: stop there, report all bad "
        "ones and write nothing, or drop and count them (default %(default)s)")  # fmt: skip
    add("--max-record", metavar="SIZE", help="the longest record that is read (default 16MiB)")
    add("--workers", type=int, metavar="N", help="processes that read (default: by cores and memory); changes no byte")
    _add_split(parser.add_argument_group("what is kept, and where it goes"), Settings, GROUP_BY)
    _add_draw(parser.add_argument_group("a draw for a budget"), Settings)


def _add_split(group, settings, group_by: tuple[str, ...]) -> None:
    add = group.add_argument
    add("--train-ratio", type=float, default=settings.train_ratio, help="share of train (default %(default)s)")
    add("--val-ratio", type=float, default=settings.val_ratio, help="share of validation (default %(default)s)")
    add("--seed", type=int, default=settings.seed, help="decides which group goes where (default %(default)s)")
    add("--cutoff", metavar="YYYY-MM-DD", help="records dated after it go to test_postcutoff if they name no split")
    add(
        "--group-by",
        choices=group_by,
        default=settings.group_by,
        help="what stays together: the field group, else source, else the record; or each record alone",
    )
    add("--near", type=float, default=settings.near, metavar="SHARE", help="records that overlap as much are "
        "near-duplicates and stay together, 0.5 to 1; 0 looks for none (default %(default)s)")  # fmt: skip
    add("--drop-near", action="store_true", help="keep one of each cluster of near-duplicates")
    add("--decontaminate", nargs="+", type=Path, default=[], metavar="FILE", help="drop records that share a run of "
        "words with these evaluation files")  # fmt: skip
    add("--ngram", type=int, default=settings.ngram, metavar="WORDS", help="the run's length (default %(default)s)")


def _add_draw(group, settings) -> None:
    add = group.add_argument
    add("--draw", type=int, metavar="N", help="keep exactly N records of train")
    add("--draw-by", metavar="FIELD", help="share the draw out by a field of the record or of its metadata")
    add("--floor", type=int, default=settings.floor, help="the least of each value (default %(default)s)")
    add("--cap", type=_share, default=settings.cap, help="the largest share of a value, 15%% or 0.15 (the default)")
    add("--prefer", metavar="FIELD=VALUE,...", help="take records with these values first, the best value first")
    add("--draw-seed", type=int, default=settings.draw_seed, help="decides which are drawn (default %(default)s)")
    add("--draw-eval", type=int, metavar="N", help="keep exactly N records of validation, and of test")
    add("--eval-seed", type=int, default=settings.eval_seed, help="decides which of those (default %(default)s)")


def _share(text: str) -> float:
    return float(text.removesuffix("%")) / 100 if text.endswith("%") else float(text)


def run(args: argparse.Namespace, report: Report) -> dict:
    from training.data import dataset
    from training.data.folder import in_words
    from training.data.prepare import Preparation

    sources, name = _sources(args)
    for one in sources:
        if words := in_words(one.left_out):  # also where the command fails: what is missing may be the reason
            report.add("files" if len(sources) == 1 else f"files of {one.label}", words)
    preparation = Preparation(
        sources, name=args.name or name, settings=_settings(args), decontaminate=args.decontaminate,
        workers=args.workers,
    )  # fmt: skip
    if args.on_error == "report":
        num_records = preparation.inspect()
        report.add("records", f"{num_records}, all of them good; no data set was written")
        return {"records": num_records, "bad": 0}
    folder, reused = preparation.run()
    data = dataset.load(folder)
    _report(report, data, reused)
    if not reused:
        predicted = format_bytes(preparation.need.memory_bytes)
        report.add("memory", f"peak {format_bytes(preparation.peak_memory_bytes)}, predicted at most {predicted}")
    report.add("folder", data.folder)
    report.add("next", _next(data))
    return {
        "dataset": data.reference, "hash": data.hash, "folder": str(folder), "reused": reused,
        "inputs": data.manifest["inputs"], "settings": data.manifest["settings"], "stats": data.stats,
        "peak_memory_bytes": preparation.peak_memory_bytes,
    }  # fmt: skip


def _settings(args: argparse.Namespace):
    from dataclasses import fields

    from training.data.settings import MAX_RECORD_BYTES, Settings

    given = {item.name: getattr(args, item.name) for item in fields(Settings) if hasattr(args, item.name)}
    return Settings(
        **given, max_record_bytes=parse_bytes(args.max_record, "--max-record") if args.max_record else MAX_RECORD_BYTES
    )


def _sources(args: argparse.Namespace) -> tuple[list, str]:
    from training.data import source
    from training.data.stdlib import StandardLibrary

    named = [text for text in (args.input, *args.source) if text is not None]
    if not (named or args.stdlib or args.docstrings):
        raise UserError(
            "an input, please", found="no file, no --source, --stdlib or --docstrings", expected="one of them",
            next_command=EXAMPLE,
        )  # fmt: skip
    if args.workers is not None and not 0 <= args.workers <= 256:
        raise UserError("not a number of processes", where="--workers", found=args.workers, expected="0 to 256")
    sources = [StandardLibrary()] if args.stdlib else []
    if args.docstrings:
        from training.data.docstrings import Docstrings

        sources.append(Docstrings())
    sources += [source.of(text, args.form) for text in named]
    return sources, "stdlib" if args.stdlib else "docstrings" if args.docstrings else source.name_of(sources[0])


def _report(report: Report, data, reused: bool) -> None:
    stats = data.stats
    counts, inputs = stats["records"], data.manifest["inputs"]
    report.add("dataset", data.reference + (" (unchanged, reused)" if reused else ""))
    report.add("input", ", ".join(f"{one['label']}, {format_bytes(one['bytes'])}" for one in inputs))
    report.add("records", "{input} = {kept} kept + {dropped} dropped + {rejected} rejected".format(**counts))
    for what in ("dropped", "rejected", "lines"):
        found = [f"{count} {reason.replace('_', ' ')}" for reason, count in stats[what].items() if count]
        if found:
            report.add(what, ", ".join(found))
    if stats["near"]["clusters"]:
        near = stats["near"]
        clusters = format_number(near["clusters"], "cluster")
        report.add("near", f"{near['records']} records in {clusters}, {near['largest']} in the largest")
    if stats["groups"]["linked"]:
        report.add("groups", _groups(stats["groups"]))
    for name, one in stats["draw"].items():
        report.add(f"draw {name}", _draw(one))
    written = sum(split["records"] for split in stats["splits"].values())
    for name, split in stats["splits"].items():
        share = f"{100 * split['records'] / written:.1f} %"
        size = format_bytes(split["text_bytes"])
        records, groups = format_number(split["records"], "record"), format_number(split["groups"], "group")
        report.add(name, f"{records} ({share}), {groups}, {size} of text")
    if told := _far_off(data.manifest["settings"], stats, written):
        report.add("shares", told)


def _far_off(settings: dict, stats: dict, written: int) -> str | None:
    """What is said where whole groups come nowhere near the shares that were asked for; nothing of a draw."""
    train, validation = settings["train_ratio"], settings["val_ratio"]
    asked = {"train": train, "validation": validation, "test": 1 - train - validation}
    found = {name: stats["splits"].get(name, {"records": 0})["records"] / max(1, written) for name in asked}
    if stats["draw"] or all(abs(found[name] - share) <= _FAR_OFF for name, share in asked.items()):
        return None
    wanted = ", ".join(f"{share:.0%}" for share in asked.values())
    return (
        f"{wanted} were asked for; {format_number(stats['groups']['all'], 'group')}, each in one split as a whole, "
        f"the largest with {stats['groups']['largest_share']:.0%} of the records; another --seed deals them otherwise"
        + (", --group-by record parts them" if settings["group_by"] == "group" else "")
    )


def _draw(draw: dict) -> str:
    """What a draw took of the values that there are the most records of, and which bound was not kept."""
    from training.data.record import shown

    most = list(draw["by_label"].items())[:_SHOWN_VALUES]
    taken = ", ".join(f"{shown(label)} {one['drawn']} of {one['available']}" for label, one in most)
    more = ", ..." if len(draw["by_label"]) > len(most) else ""
    return "\n".join([f"{format_number(draw['records'], 'record')}: {taken}{more}", *draw.get("not_kept", ())])


def _groups(groups: dict) -> str:
    """What became of the groups that records name, where some could not be parted."""
    named, joined = format_number(groups["all"], "group"), groups["linked"]
    return (
        f"{named} are named, {joined} of them joined with another, since they share a record or near-duplicates; "
        f"{groups['all'] - joined} could be split, the largest with {groups['largest_share']:.0%} of the records"
    )


def _next(data) -> str:
    if data.form == "text":
        return f"make tokenizer-train DATASET={data.reference}"
    return f"make data-peek DATASET={data.reference}"
