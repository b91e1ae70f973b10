"""The champions' history, `$DATA_ROOT/serving/champions.jsonl`: a file that only grows, each line chained to the last.

A line holds the sha256 of the line before it, so that no line can be changed, left out or put in without notice. The
last line is the champion; `number` counts from 1.
"""

import json
import os
from pathlib import Path

from training.core import files, paths
from training.core.errors import IntegrityError

FIRST, PROMOTE, ROLLBACK = "first", "promote", "rollback"
_START = "0" * 64


def path() -> Path:
    return paths.roots().serving / "champions.jsonl"


def read() -> list[dict]:
    """Every entry in order. Raises IntegrityError naming the first line that is not what the chain says.

    A last line that a crash cut short is none: the promotion's journal brings it back.
    """
    if not path().exists():
        return []
    data, entries, before = path().read_bytes(), [], _START
    for number, line in enumerate(data[: data.rfind(b"\n") + 1].splitlines(), 1):
        try:
            entry = files.parse_json(line)
        except ValueError as error:
            raise _broken(number, str(error)) from error
        if not isinstance(entry, dict) or entry.get("number") != number or entry.get("before") != before:
            raise _broken(number, "another number, or another line before it")
        if not files.is_sealed(entry):
            raise _broken(number, "another hash than its own")
        entries.append(entry)
        before = entry["sha256"]
    return entries


def _broken(number: int, found: str) -> IntegrityError:
    return IntegrityError(
        "the champions' history has been changed", where=f"{path()} line {number}", found=found,
        expected="each line with the hash of the one before it, as a copy of the file may have them",
    )  # fmt: skip


def before(entries: list[dict]) -> dict | None:
    """The entry that the champion of now took over from, rollbacks followed to where they led."""
    if not entries:
        return None
    place = entries[-1]
    while place["kind"] == ROLLBACK:
        place = entries[place["to"] - 1]
    return entries[place["number"] - 2] if place["number"] > 1 else None


def following(entries: list[dict], body: dict) -> dict:
    """The entry that would come next."""
    return files.sealed({"number": len(entries) + 1, "before": entries[-1]["sha256"] if entries else _START, **body})


def append(entry: dict) -> None:
    """Write an entry behind the last one; where it stands there already nothing happens."""
    entries = read()
    if entries and entries[-1]["sha256"] == entry["sha256"]:
        return
    if entry["number"] != len(entries) + 1:
        raise _broken(len(entries) + 1, f"entry {entry['number']} was to follow")
    with files.disk_errors(path()):
        path().parent.mkdir(parents=True, exist_ok=True)
        with open(path(), "r+b" if path().exists() else "w+b") as file:
            whole = file.read()
            file.seek(whole.rfind(b"\n") + 1)
            file.truncate()
            file.write(json.dumps(entry, ensure_ascii=False, allow_nan=False).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        files.fsync_path(path().parent)
