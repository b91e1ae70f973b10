"""Sources into a working copy and the ledger, in one pass, and what becomes of bad records.

Owns the pass: batches out to workers, their results back in order, faults by policy, and the need of memory and disk,
which is predicted from the first batch and refused where the machine has less. The working copy holds each good
record's line in canonical spelling, in the order of the input.
"""

import json
import logging
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from training.core import files, process
from training.core.errors import MachineError, UserError
from training.core.log import say
from training.core.progress import Progress
from training.core.units import format_bytes
from training.data import blocks, pool, rules
from training.data.contamination import Evaluations
from training.data.intake import Batch, Fault, Taken, taker
from training.data.ledger import COLUMNS, Ledger
from training.data.near import NUM_VALUES, Bands
from training.data.record import shown
from training.data.settings import Settings
from training.data.source import Source

_logger = logging.getLogger(__name__)
SPOOL, REJECTED, CONTAMINATED = "spool", "rejected.jsonl", "contaminated.jsonl"
_PROCESS_BYTES = 160 << 20
_RECORD_BYTES, _DRAWN_RECORD_BYTES = 40, 96
_PACKED_RATIO = 4
_ALONE_BELOW_BYTES = 4 << 20


@dataclass(frozen=True)
class Need:
    """What a preparation is predicted to need, for so many records of so many bytes in all."""

    num_records: int
    text_bytes: int
    workers: int
    num_bands: int
    is_drawn: bool
    """Whether a draw or weights decide which records are taken, and how often."""

    @property
    def memory_bytes(self) -> int:
        """Of the workers, and of what this process grows by."""
        of_records = self.num_records * (_DRAWN_RECORD_BYTES if self.is_drawn else _RECORD_BYTES)
        return (1 + self.workers) * _PROCESS_BYTES + of_records

    @property
    def disk_bytes(self) -> int:
        """Of the dataset and its working copy."""
        columns = sum(int(dtype[-1]) for dtype in COLUMNS.values()) + (8 * self.num_bands + NUM_VALUES) * bool(
            self.num_bands
        )
        return int(2.05 * self.text_bytes) + self.num_records * columns

    def require(self, folder: Path) -> None:
        """Raise MachineError where the machine has less."""
        files.require_space(folder, self.disk_bytes, "the dataset and its working copy")
        if self.memory_bytes > (free := psutil.virtual_memory().available):
            raise MachineError(
                "not enough memory for so many records",
                found=f"{format_bytes(free)} free", expected=f"{format_bytes(self.memory_bytes)}, for about "
                f"{self.num_records:,} records; or several files, each prepared for itself",
            )  # fmt: skip


@dataclass
class Read:
    """What the pass has found; counts are by source where they are lists."""

    ledger: Ledger
    num_good: list[int]
    rejected: list[Counter[str]]
    lines: Counter[str] = field(default_factory=Counter)
    labels: dict[int, str] = field(default_factory=dict)
    fields: Counter[str] = field(default_factory=Counter)
    num_preferred: int = 0
    num_contaminated: int = 0
    need: Need | None = None
    peak_memory_bytes: int = 0

    @property
    def num_rejected(self) -> int:
        return self.rejected_by_rule.total()

    @property
    def rejected_by_rule(self) -> Counter[str]:
        """Of all sources together."""
        return sum(self.rejected, Counter())


class Reading:
    """One pass over all sources.

    Args:
        folder: takes the working copy, the columns and the lists.
        command: gives the make command of this preparation with more options.
    """

    def __init__(
        self, sources: Sequence[Source], settings: Settings, evaluations: Evaluations | None, folder: Path, command,
        workers: int | None = None,
    ):  # fmt: skip
        self._sources, self._settings, self._evaluations = sources, settings, evaluations
        self._folder, self._command = folder, command
        self._size_bytes = sum(source.size_bytes for source in sources)
        self._workers = _count_for(self._size_bytes) if workers is None else workers
        self._num_bands = Bands(settings.near).num if settings.near else 0

    def run(self) -> Read:
        """Read everything. Raises UserError at the first bad record, unless the settings say otherwise."""
        workers: dict[int, int] = {}
        with ExitStack() as stack:
            ledger = stack.enter_context(Ledger(self._folder, self._num_bands))
            self._read = Read(ledger, [0] * len(self._sources), [Counter() for _ in self._sources])
            spool = stack.enter_context(open(self._folder / SPOOL, "wb"))
            self._rejected = stack.enter_context(open(self._folder / REJECTED, "wb"))
            self._contaminated = stack.enter_context(open(self._folder / CONTAMINATED, "wb"))
            self._progress = stack.enter_context(Progress("records", self._size_bytes, "B"))
            alone = self._command(self._settings, "--workers 0")
            start = pool.started(self._workers, taker, self._settings, self._evaluations, way_out=alone)
            for taken in stack.enter_context(start)(self._batches()):
                self._keep(taken, spool)
                workers[taken.worker[0]] = max(taken.worker[1], workers.get(taken.worker[0], 0))
        for source in self._sources:
            self._read.lines += source.counts
        self._require_fields()
        own = process.identity()["pid"]
        self._read.peak_memory_bytes = sum(peak for pid, peak in workers.items() if pid != own)
        return self._read

    def _batches(self) -> Iterator[Batch]:
        several = len(self._sources) > 1
        for number, source in enumerate(self._sources):
            name = source.label if several else None
            for batch in source.batches(number, name, self._settings.max_record_bytes, self._progress.advance):
                self._require_one_form(source)
                yield batch

    def _require_one_form(self, source: Source) -> None:
        first = next((one for one in self._sources if one.form), source)
        if source.form not in (None, first.form):
            raise UserError(
                "a dataset's records have one form; nothing was written", where=source.label, found=source.form,
                expected=f"{first.form}, as the source {first.label} has; or two data sets",
            )  # fmt: skip

    def _keep(self, taken: Taken, spool) -> None:
        read, source = self._read, self._sources[taken.source]
        for fault in taken.faults:
            is_left_out = source.always_drops and fault.reasons[0].rule != "too_long"
            if self._settings.on_error == "stop" and not is_left_out:
                raise self._refusal(fault)
            read.rejected[taken.source][fault.reasons[0].rule] += 1
            self._rejected.write(_json_line(fault.to_json(Path(fault.where).name)))
        for shared in taken.shared:
            place = {"file": Path(taken.where).name, "line": shared.line, "id": shared.id}
            self._contaminated.write(_json_line(place | {"words": shared.words, "also_in": shared.place}))
        if read.need is None and taken.lines:
            self._predict(taken)
        read.num_contaminated += len(taken.shared)
        read.lines += taken.counts
        read.labels |= taken.labels
        read.fields += taken.fields
        read.num_preferred += taken.num_preferred
        read.num_good[taken.source] += len(taken.columns["digest"])
        sketches = (taken.sketches.bands_NB, taken.sketches.values_NV) if taken.sketches else ()
        read.ledger.append(taken.columns, *sketches)
        spool.write(taken.lines)

    def _require_fields(self) -> None:
        """Refuse a draw by a field that no record has: it would take all of them for one value."""
        settings, read = self._settings, self._read
        if not settings.draws or not len(read.ledger):
            return
        for option, name in {"--draw-by": settings.draw_by, "--prefer": settings.preferred[0]}.items():
            if name and not read.fields[name]:
                known = sorted(read.fields)
                raise UserError(
                    "no record has the field that the draw goes by; nothing was written", where=option, found=name,
                    expected=f"one of {', '.join(map(shown, known))}: a field of the record, or of its metadata by its "
                    "own name" if known else "records with fields besides what is said in them",
                )  # fmt: skip
        if settings.prefer and not read.num_preferred:
            _logger.warning("--prefer %s: no record has one of these values", settings.prefer)

    def _predict(self, taken: Taken) -> None:
        """Predict the need from the first good batch, and refuse it before anything large is done."""
        text_bytes = sum(source.size_bytes * (_PACKED_RATIO if source.is_packed else 1) for source in self._sources)
        num_records = int(text_bytes * len(taken.columns["digest"]) / max(1, len(taken.lines)))
        is_drawn = self._settings.draws or any(source.weight != 1 for source in self._sources)
        self._read.need = Need(num_records, text_bytes, self._workers, self._num_bands, is_drawn)
        self._read.need.require(self._folder)
        if self._workers:
            need = self._read.need
            say(f"about {num_records:,} records; {format_bytes(need.memory_bytes)} of memory and "
                f"{format_bytes(need.disk_bytes)} of disk at most are predicted")  # fmt: skip

    def _refusal(self, fault: Fault) -> UserError:
        named = f", id {shown(fault.id)}" if fault.id else ""
        place, path = fault.where, Path(fault.where)
        if fault.line:
            place += f" {'row' if path.is_file() and blocks.packing(path) == 'parquet' else 'line'} {fault.line}"
        if fault.reasons[0].rule == "too_long":
            num_bytes = fault.reasons[0].text.removesuffix(" bytes")
            return UserError(
                "a record is too long; nothing was written", where=place + named, found=fault.reasons[0].text,
                expected=f"at most {format_bytes(self._settings.max_record_bytes)} a record",
                next_command=self._command(self._settings, f"--max-record {num_bytes}B"),
            )  # fmt: skip
        return UserError(
            "a record is refused; nothing was written", where=place + named,
            found="; ".join(reason.text for reason in fault.reasons), expected=_expected(fault),
            next_command=self._look(fault),
        )  # fmt: skip

    def _look(self, fault: Fault) -> str:
        """A command that shows the bad record, or that goes on without it."""
        path = Path(fault.where)
        shown_by = blocks.SHOWN_BY.get(blocks.packing(path)) if path.is_file() else None
        if shown_by is None:
            return self._command(self._settings, "--on-error drop")
        look = shown_by.format(line=fault.line, path=shlex.quote(str(path)))
        return f"{look}   # correct it, then run the same again, or ARGS='--on-error report' lists all"


def _count_for(num_bytes: int) -> int:
    """Processes for an input of a size: one a core, but no more than half of the free memory holds."""
    most = psutil.virtual_memory().available // (2 * _PROCESS_BYTES)
    return min(most, pool.count_for(num_bytes, _ALONE_BELOW_BYTES))


def _expected(fault: Fault) -> str:
    """What should have stood there: of JSON that is sound, a record that keeps the rule that was broken first."""
    if fault.line is None:
        return "a file of UTF-8 text"
    rule = fault.reasons[0].rule
    if rule in rules.OF_LINES:
        return "one valid JSON object a line"
    if rule == "no_object":
        return 'an object, such as {"text": "..."} or {"messages": [...]}'
    return f"a record that keeps all rules of docs/data.md; this one breaks {rule}: {rules.RULES[rule]}"


def _json_line(value: dict) -> bytes:
    return json.dumps(value, ensure_ascii=True).encode() + b"\n"
