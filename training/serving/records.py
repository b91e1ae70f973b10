"""The one reader of what was written down of a service: records and journals, each part of its kind or refused.

A file that was cut short, edited or written by another version is damaged: it is told as one, with the way out.
"""

from collections.abc import Mapping
from pathlib import Path
from types import NoneType

from training.core import files
from training.core.errors import IntegrityError

JOURNAL_SCHEMA = 2
Kinds = Mapping[str, object]
"""What each part must be: a type, a union of types, a range of numbers, or the kinds of an object's own parts."""
_RECORD: Kinds = {
    "service": str, "runtime": str, "port": range(65_536), "model": str, "served_as": str, "sha256": str | None,
    "file": dict | None, "memory_bytes": int, "device": str, "arguments": dict, "log": str, "since": str,
}  # fmt: skip
_PREVIOUS: Kinds = {"running": bool, "healthy": bool, "record": dict | None, "loaded": dict | None}
_JOURNAL: Kinds = {"runtime": str, "previous": _PREVIOUS, "new": list, "back": dict | None}
_LOADED: Kinds = {"path": str, "parameters": int, "size_bytes": int, "vocab_size": int}


def read_record(path: Path, own: Kinds) -> dict:
    """A runtime's record; `own` are the parts that it has beyond everyone's. Raises IntegrityError."""
    record = files.read_json(path)
    _require(record, {**_RECORD, **own}, path)
    return record


def read_journal(path: Path, own: Kinds) -> dict:
    """A swap's journal with the records of a runtime in it (see `read_record`). Raises IntegrityError."""
    journal = files.read_json(path)
    if journal.get("schema") != JOURNAL_SCHEMA:
        raise IntegrityError(
            "the journal is of another version", where=path, found=journal.get("schema"), expected=JOURNAL_SCHEMA
        )
    _require(journal, _JOURNAL, path)
    previous = journal["previous"]
    must = [(f"new.{number}", record) for number, record in enumerate(journal["new"])]
    for name, record, needed in (("previous.record", previous["record"], previous["running"]),
                                 ("back", journal["back"], previous["running"])):  # fmt: skip
        must += [(name, record)] if needed or record is not None else []
    for name, record in must:
        _require(record, {**_RECORD, **own}, path, f"{name}.")
    if previous["healthy"]:
        _require(previous["loaded"], _LOADED, path, "previous.loaded.")
    return journal


def _require(found: object, kinds: Kinds, where: Path, place: str = "") -> None:
    if not isinstance(found, dict):
        raise _damaged(where, place.rstrip("."), found, "an object")
    for name, kind in kinds.items():
        if name not in found:
            raise _damaged(where, place + name, None, "it to be there")
        value = found[name]
        if isinstance(kind, Mapping):
            _require(value, kind, where, f"{place}{name}.")
        elif not _is_of(kind, value):
            raise _damaged(where, place + name, value, _named(kind))


def _is_of(kind: object, value: object) -> bool:
    if isinstance(value, bool):
        return kind is bool
    if isinstance(kind, range):
        return isinstance(value, int) and value in kind
    return isinstance(value, kind)


def _named(kind: object) -> str:
    if isinstance(kind, range):
        return f"a number from {kind.start} to {kind.stop - 1}"
    members = getattr(kind, "__args__", (kind,))
    return " or ".join("null" if each is NoneType else each.__name__ for each in members)


def _damaged(where: Path, name: str, found: object, expected: str) -> IntegrityError:
    return IntegrityError(
        "what was written down of the service is not whole",
        where=where,
        found=f"{name}: {'missing' if found is None else repr(found)[:80]}",
        expected=expected,
    )
