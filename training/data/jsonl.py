"""One line of JSON, read strictly: its value, and every reason why it is none that may be kept.

Owns lines and JSON; what a record may hold is `rules`'. Rules: UTF-8; one object a line; no key twice, no NaN, no half
of a surrogate pair, at most 64 levels. A byte order mark at the start of a line (files from Windows, joined or not) is
taken off, CR LF counts as a line end, a blank line is skipped, and each of the three is counted.
"""

import json
from collections import Counter
from collections.abc import Iterator

from training.data import record, rules
from training.data.record import Record
from training.data.rules import Reason

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_UNREAD = object()


def bodies(data: bytes, counts: Counter[str]) -> Iterator[tuple[int, bytes]]:
    """Yield each line that is not blank, numbered from 0, without its end and its byte order mark, both counted."""
    for number, line in enumerate(data.split(b"\n")[: -1 if data.endswith(b"\n") else None]):
        if line.endswith(b"\r"):
            line = line.rstrip(b"\r")
            counts["crlf_lines"] += 1
        if line.startswith(BYTE_ORDER_MARK):
            line = line[len(BYTE_ORDER_MARK) :]
            counts["byte_order_marks"] += 1
        if line.strip():
            yield number, line
        else:
            counts["blank_lines"] += 1


class Parser:
    """Reads lines of one source."""

    def __init__(self) -> None:
        self._reasons: list[Reason] = []
        self._decoder = json.JSONDecoder(object_pairs_hook=self._unique, parse_constant=self._constant)

    def record(self, body: bytes, form: str | None, source: str | None) -> tuple[Record | None, object, list[Reason]]:
        """The record of a line and its value; None with every reason where it is none of the form."""
        value, reasons = self.value(body)
        if value is not _UNREAD:
            reasons = reasons + rules.reasons(value, form)
        if not reasons:
            try:
                return record.build(value, form, source), value, []
            except UnicodeEncodeError:
                pass  # named below, with whatever else is wrong
            except ValueError as error:
                reasons = [Reason("bad_number", f"a number that JSON cannot hold ({error})")]
        return None, value, reasons + _surrogates(value)

    def value(self, body: bytes) -> tuple[object, list[Reason]]:
        """What the line holds, and what is wrong with it as JSON."""
        self._reasons = []
        try:
            text = body.decode()
        except UnicodeDecodeError as error:
            place = f"byte {body[error.start]:#04x} at position {error.start + 1} of the line"
            return _UNREAD, [Reason("not_utf8", f"not UTF-8: {place}")]
        value = _UNREAD
        try:
            value, end = self._decoder.raw_decode(text, len(text) - len(text.lstrip()))
            self._check_rest(text, end)
        except json.JSONDecodeError as error:
            self._reasons.append(Reason("not_json", f"not JSON: {_without_place(error.msg)} at column {error.colno}"))
        except RecursionError:
            value = _UNREAD
            self._reasons = [_too_deep()]
        except ValueError as error:
            self._reasons.append(Reason("bad_number", f"not JSON that can be read: {error}"))
        if value is not _UNREAD and body.count(b"[") + body.count(b"{") > rules.MAX_DEPTH and _is_deep(value):
            return _UNREAD, [_too_deep()]
        return value, self._reasons

    def _check_rest(self, text: str, end: int) -> None:
        rest = text[end:].lstrip()
        column = len(text) - len(rest) + 1
        if rest.startswith(("{", "[")):
            found = f"several objects on one line (the second begins at column {column})"
            self._reasons.append(Reason("several_objects", found))
        elif rest:
            self._reasons.append(Reason("not_json", f"text after the object at column {column}"))

    def _unique(self, pairs: list[tuple[str, object]]) -> dict:
        value = dict(pairs)
        if len(value) != len(pairs):
            counts = Counter(key for key, _ in pairs)
            twice = (key for key, count in counts.items() if count > 1)
            self._reasons += [Reason("duplicate_key", f"duplicate key {record.shown(key)}") for key in twice]
        return value

    def _constant(self, name: str) -> float:
        self._reasons.append(Reason("bad_number", f"{name} is not JSON"))
        return float(name)


def identity(value: object) -> str | None:
    """The id of whatever a line holds, if it has one."""
    found = record.as_id(value.get("id")) if isinstance(value, dict) else None
    return found if isinstance(found, str) else None


def _without_place(message: str) -> str:
    """The decoder's message without the words that it ends in before a place."""
    return message.removesuffix(":").removesuffix(" at")


def _too_deep() -> Reason:
    return Reason("nested_too_deep", f"lists and objects within each other, more than {rules.MAX_DEPTH} deep")


def _is_deep(value: object) -> bool:
    """Whether a value is nested deeper than is allowed, without recursion."""
    level = [value]
    for _ in range(rules.MAX_DEPTH):
        level = [child for item in level if isinstance(item, dict | list) for child in _children(item)]
        if not level:
            return False
    return any(isinstance(item, dict | list) for item in level)


def _children(item: dict | list) -> list:
    return list(item.values()) if isinstance(item, dict) else item


def _surrogates(value: object) -> list[Reason]:
    if value is _UNREAD:
        return []
    try:
        json.dumps(value, ensure_ascii=False).encode()
        return []
    except UnicodeEncodeError as error:
        near = error.object[max(0, error.start - 20) : error.start]
        found = f"half a surrogate pair, \\u{ord(error.object[error.start]):04x}, after {near!r}"
        return [Reason("half_surrogate", found)]
