"""A batch of input as records: what a worker process does, and what it hands back.

Owns the way from bytes to lines in canonical spelling, columns of the ledger, and faults. A pure function of the batch
and the rules in force, so that neither the number of workers nor their speed decides anything.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from training.core import process
from training.core.errors import UserError
from training.data import blocks, jsonl, record, split
from training.data.contamination import Evaluations
from training.data.ledger import COLUMNS
from training.data.near import Bands, Sketches
from training.data.record import Record
from training.data.rules import Reason
from training.data.settings import SPLITS, Settings


@dataclass(frozen=True)
class Batch:
    """Some whole lines of a file, or some whole files of a folder.

    Args:
        source: the number of the source; `name` is written into its records where they name none.
        where: what is read, as messages show it.
        first: the number of the first line, from 1.
        data: the lines; or (path under the folder, bytes, their number) of files: no bytes of one over the limit.
        form: the source's form; None where no record has told it yet.
        overlong_bytes: nothing but one line that was too long to be kept; `data` is empty.
    """

    source: int
    where: str
    first: int
    data: bytes | list[tuple[str, bytes, int]]
    form: str | None
    name: str | None = None
    overlong_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Fault:
    """A record that is refused, and why."""

    where: str
    line: int | None
    id: str | None
    reasons: tuple[Reason, ...]

    def to_json(self, name: str) -> dict:
        reasons = [{"rule": reason.rule, "found": reason.text} for reason in self.reasons]
        return {"file": name, "line": self.line, "id": self.id, "reasons": reasons}


@dataclass(frozen=True, slots=True)
class Shared:
    """A record that shares a run of words with an evaluation file."""

    line: int | None
    id: str | None
    words: str
    place: str


@dataclass
class Taken:
    """What a batch gives: lines with their ends, columns, and what was wrong."""

    source: int
    where: str
    lines: bytes = b""
    columns: dict[str, np.ndarray] = field(default_factory=dict)
    sketches: Sketches | None = None
    faults: list[Fault] = field(default_factory=list)
    shared: list[Shared] = field(default_factory=list)
    labels: dict[int, str] = field(default_factory=dict)
    fields: Counter[str] = field(default_factory=Counter)
    num_preferred: int = 0
    """Of a draw: how many records have each field, and how many a value that is preferred."""
    counts: Counter[str] = field(default_factory=Counter)
    worker: tuple[int, int] = (0, 0)
    """The process that read it: its id and its highest memory in bytes."""


class Intake:
    """Takes batches under one set of settings."""

    def __init__(self, settings: Settings, evaluations: Evaluations | None = None):
        self._settings, self._evaluations = settings, evaluations
        self._bands = Bands(settings.near) if settings.near else None
        self._parser = jsonl.Parser()

    def take(self, batch: Batch) -> Taken:
        """Read a batch."""
        taken = Taken(batch.source, batch.where)
        rows: list[tuple] = []
        texts, lines = [], []
        for number, identity, found in self._read(batch, taken):
            if not isinstance(found, tuple):
                taken.faults.append(Fault(batch.where, number, identity, tuple(found)))
                continue
            one, value = found
            own = record.own_texts(value)
            contaminated = self._contaminated(own, taken, number, identity)
            rows.append(self._row(one, value, batch, contaminated, taken))
            lines.append(one.line)
            if self._bands:
                texts.append(own)
        taken.lines = b"".join(line + b"\n" for line in lines)
        columns = zip(*rows, strict=True) if rows else [()] * len(COLUMNS)
        taken.columns = {
            name: np.array(values, dtype) for (name, dtype), values in zip(COLUMNS.items(), columns, strict=True)
        }
        taken.sketches = self._bands.of(texts) if texts else None
        taken.worker = (process.identity()["pid"], process.peak_rss_bytes())
        return taken

    def _read(self, batch: Batch, taken: Taken):
        """Yield number, id, and either (record, value) or the reasons against it."""
        limit = self._settings.max_record_bytes
        if batch.overlong_bytes:
            yield batch.first, None, [_too_long(batch.overlong_bytes)]
        elif isinstance(batch.data, bytes):
            for number, body in jsonl.bodies(batch.data, taken.counts):
                if len(body) > limit:
                    yield batch.first + number, None, [_too_long(len(body))]
                    continue
                one, value, reasons = self._parser.record(body, batch.form, batch.name)
                yield batch.first + number, jsonl.identity(value), (one, value) if one else reasons
        else:
            for path, data, num_bytes in batch.data:
                is_held = len(data) == num_bytes
                yield None, path, self._file(batch, path, data, taken) if is_held else [_too_long(num_bytes)]

    def _file(self, batch: Batch, path: str, data: bytes, taken: Taken) -> tuple[Record, dict] | list[Reason]:
        """A file of text as a record: its path is the id, the first step of it the group."""
        try:
            data, num_bytes = blocks.content(path, data, self._settings.max_record_bytes)
        except UserError as error:
            return [Reason("damaged", f"{error.what}: {error.found}")]
        if num_bytes > self._settings.max_record_bytes:
            return [_too_long(num_bytes)]
        if data.startswith(jsonl.BYTE_ORDER_MARK):
            data = data[len(jsonl.BYTE_ORDER_MARK) :]
            taken.counts["byte_order_marks"] += 1
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            return [Reason("not_utf8", f"not UTF-8: byte {data[error.start]:#04x} at position {error.start + 1}")]
        if not text.strip():
            return [Reason("empty", "the file holds no text")]
        first = path.split("/")[0]
        value = {"id": path, "group": first.rsplit(".", 1)[0] or first, "text": text}
        return record.build(value, "text", batch.name), value

    def _contaminated(self, own: list[str], taken: Taken, number: int | None, identity: str | None) -> bool:
        found = self._evaluations.find(own) if self._evaluations else None
        if found:
            taken.shared.append(Shared(number, identity, found.words, found.place))
        return found is not None

    def _row(self, one: Record, value: dict, batch: Batch, contaminated: bool, taken: Taken) -> tuple:
        """One record's values, in the order of COLUMNS."""
        digest, digest2 = (int.from_bytes(one.content_digest[at : at + 8], "little") for at in (0, 8))
        label, tier = self._draw(value, batch.name, taken) if self._settings.draws else (0, 0)
        return (
            digest, digest2, split.hash64(one.line), digest if one.group is None else split.hash64(one.group.encode()),
            SPLITS.index(one.split) if one.split else split.BY_GROUP, split.day_number(one.day), one.text_bytes,
            len(one.line) + 1, batch.source, contaminated, label, tier,
        )  # fmt: skip

    def _draw(self, value: dict, source: str | None, taken: Taken) -> tuple[int, int]:
        settings = self._settings
        if source:
            value = {"source": source, **value}  # as the record's line has it
        taken.fields.update(record.field_names(value))
        name = record.field(value, settings.draw_by) if settings.draw_by else None
        label = split.hash64((name or "").encode())
        taken.labels.setdefault(label, name or "(none)")
        preferred, values = settings.preferred
        found = record.field(value, preferred) if preferred else None
        if found not in values:
            return label, len(values)
        taken.num_preferred += 1
        return label, values.index(found)


def _too_long(num_bytes: int) -> Reason:
    return Reason("too_long", f"{num_bytes} bytes")


def taker(settings: Settings, evaluations: Evaluations | None) -> Callable[[Batch], Taken]:
    """What takes batches, as a worker makes it."""
    return Intake(settings, evaluations).take
