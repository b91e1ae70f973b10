"""A JSONL file as a source of records, read strictly: the first bad record stops it, with every reason.

Owns lines and JSON; what a record may hold is `record`'s. Rules: UTF-8; one object a line, at most `max_record_bytes`
long; a byte order mark at the start of a line (files from Windows, joined or not) is taken off, CR LF counts as a line
end, a blank line is skipped, and each of the three is counted. Nothing is dropped silently.
"""

import hashlib
import json
import os
import shlex
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from training.core import files
from training.core.errors import MachineError, UserError
from training.core.units import format_bytes
from training.data import record
from training.data.record import Record

MAX_RECORD_BYTES = 16 << 20
_CHUNK_BYTES = 1 << 20
_UNREAD = object()
_EXPECTED = "one valid JSON object a line"
EXAMPLE = "make data-prepare INPUT=my.jsonl"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class RecordTooLong(UserError):
    """A line is longer than the stated limit."""

    length_bytes: int


class Jsonl:
    """A JSONL file, read anew at each `read()`; the counts of the latest reading lie in `counts`."""

    kind = "jsonl"

    def __init__(self, path: Path, max_record_bytes: int = MAX_RECORD_BYTES):
        self.path, self.max_record_bytes = path, max_record_bytes
        self.form: str | None = None
        self.counts: Counter[str] = Counter()
        self.rejected: Counter[str] = Counter()
        self.label, self.argument = path.name, f"INPUT={shlex.quote(str(path))}"
        self.size_bytes = _size_bytes(path)
        self.sha256: str | None = None
        self._parser = _Parser()

    def fingerprint(self) -> str:
        """Hash the file's bytes."""
        return files.sha256_file(self.path)

    def read(self) -> Iterator[Record]:
        """Yield the records in order. Raises UserError at the first bad one; sets `form`, `counts` and `sha256`."""
        self.form, self.sha256 = None, None
        self.counts = Counter(blank_lines=0, byte_order_marks=0, crlf_lines=0)
        digest = hashlib.sha256()
        with open(self.path, "rb") as file:
            number = 0
            while line := file.readline(self.max_record_bytes + len(_BYTE_ORDER_MARK) + len(b"\r\n")):
                number += 1
                digest.update(line)
                body = self._body(line)
                if self.form is None and body.lstrip().startswith(b"["):
                    raise self._json_array(number)
                if len(body) > self.max_record_bytes:
                    self._refuse_overlong(file, line, number)
                if body.strip():
                    yield self._record(body, number)
                else:
                    self.counts["blank_lines"] += 1
        self.sha256 = digest.hexdigest()

    def _body(self, line: bytes) -> bytes:
        """A line without its end and its byte order mark, both counted."""
        if line.endswith(b"\r\n"):
            self.counts["crlf_lines"] += 1
        if line.startswith(_BYTE_ORDER_MARK):
            self.counts["byte_order_marks"] += 1
            line = line[len(_BYTE_ORDER_MARK) :]
        return line.rstrip(b"\r\n")

    def _record(self, body: bytes, number: int) -> Record:
        value, reasons = self._parser.parse(body)
        if value is not _UNREAD:
            reasons += self._form_problems(value) or record.problems(value, self.form)
        if not reasons:
            try:
                return record.build(value, self.form)
            except UnicodeEncodeError:
                pass  # named below, with whatever else is wrong
            except ValueError as error:
                reasons.append(f"a number that JSON cannot hold ({error})")
        raise self._refusal(number, reasons + _surrogate_problems(value), value)

    def _form_problems(self, value: object) -> list[str]:
        if self.form is None:
            self.form = record.form_of(value)
        if self.form:
            return []
        forms = " or ".join("{" + ", ".join(f'"{key}"' for key in keys) + "}" for keys in record.FORMS.values())
        keys = ", ".join(map(record.shown, value)) if isinstance(value, dict) else "no object"
        return [f"the record has none of the forms {forms}: its keys are {keys or 'none'}"]

    def _refusal(self, number: int, reasons: list[str], value: object = None) -> UserError:
        identity = value.get("id") if isinstance(value, dict) else None
        named = f", id {record.shown(identity)}" if isinstance(identity, str) else ""
        return UserError(
            "a record is refused; nothing was written",
            where=f"{self.path} line {number}{named}",
            found="; ".join(reasons),
            expected=_EXPECTED,
            next_command=f"sed -n {number}p {shlex.quote(str(self.path))}   # correct it, then run the same again",
        )

    def _json_array(self, number: int) -> UserError:
        path = shlex.quote(str(self.path))
        script = "import json,sys; [print(json.dumps(r)) for r in json.load(sys.stdin)]"
        return UserError(
            "the file is a JSON array; nothing was written",
            where=f"{self.path} line {number}",
            found="a list",
            expected="JSONL: one object per line, without brackets around or commas between them",
            next_command=f'python -c "{script}" < {path} > {shlex.quote(self.path.stem + ".converted.jsonl")}',
        )

    def _refuse_overlong(self, file, start: bytes, number: int) -> None:
        length = len(start)
        while not start.endswith(b"\n") and (start := file.readline(_CHUNK_BYTES)):
            length += len(start)
        error = RecordTooLong(
            "a record is too long; nothing was written",
            where=f"{self.path} line {number}",
            found=f"{length} bytes",
            expected=f"at most {format_bytes(self.max_record_bytes)} a line",
        )
        error.length_bytes = length
        raise error


def _size_bytes(path: Path) -> int:
    """The size of a readable file. Raises UserError where there is none or an empty one, MachineError if unreadable."""
    if not path.is_file():
        found = "no file" if path.exists() else "nothing"
        raise UserError("there is no such input", where=path, found=found, expected="JSONL", next_command=EXAMPLE)
    if not os.access(path, os.R_OK):
        raise MachineError("the input cannot be read", where=path, found="no permission", expected="a readable file")
    size = path.stat().st_size
    if size == 0:
        raise UserError("the input is empty", where=path, found="0 bytes", expected=_EXPECTED, next_command=EXAMPLE)
    return size


# ---- JSON, with every reason


class _Parser:
    """Reads one line at a time into its value, `_UNREAD` where it cannot be read, and everything wrong with it."""

    def __init__(self) -> None:
        self._reasons: list[str] = []
        self._decoder = json.JSONDecoder(object_pairs_hook=self._unique, parse_constant=self._constant)

    def parse(self, body: bytes) -> tuple[object, list[str]]:
        self._reasons = []
        try:
            text = body.decode()
        except UnicodeDecodeError as error:
            return _UNREAD, [f"not UTF-8: byte {body[error.start]:#04x} at position {error.start + 1} of the line"]
        value = _UNREAD
        try:
            value, end = self._decoder.raw_decode(text, len(text) - len(text.lstrip()))
            self._check_rest(text, end)
        except json.JSONDecodeError as error:
            self._reasons.append(f"not JSON: {error.msg} at column {error.colno}")
        except (ValueError, RecursionError) as error:
            self._reasons.append(f"not JSON that can be read: {error}")
        return value, self._reasons

    def _check_rest(self, text: str, end: int) -> None:
        rest = text[end:].lstrip()
        column = len(text) - len(rest) + 1
        if rest.startswith(("{", "[")):
            self._reasons.append(f"several objects on one line (the second begins at column {column})")
        elif rest:
            self._reasons.append(f"text after the object at column {column}")

    def _unique(self, pairs: list[tuple[str, object]]) -> dict:
        value = dict(pairs)
        if len(value) != len(pairs):
            counts = Counter(key for key, _ in pairs)
            self._reasons += [f"duplicate key {record.shown(key)}" for key, count in counts.items() if count > 1]
        return value

    def _constant(self, name: str) -> float:
        self._reasons.append(f"{name} is not JSON")
        return float(name)


def _surrogate_problems(value: object) -> list[str]:
    if value is _UNREAD:
        return []
    try:
        json.dumps(value, ensure_ascii=False).encode()
        return []
    except UnicodeEncodeError as error:
        near = error.object[max(0, error.start - 20) : error.start]
        return [f"half a surrogate pair, \\u{ord(error.object[error.start]):04x}, after {near!r}"]
