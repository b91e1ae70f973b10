"""Prepare a dataset: read a source, keep one record of each content, split by group, and write the artifact.

Owns the order of work, the key and the figures; reading is the source's, sides are `split`'s. Invariants: input =
kept + duplicates + rejected, in `stats.json`; a split that was asked for is never empty; the key is over the input's
bytes, the settings and the format's version, so what is unchanged is recognised wherever it lies. The bytes are
hashed first, for the key, and parsed once after that; a source that changes in between is refused.
"""

import logging
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, fields
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np

from training.core import files, paths, store, version
from training.core.errors import UserError
from training.core.progress import Progress
from training.data import jsonl
from training.data.dataset import KIND, STATS
from training.data.record import Record
from training.data.settings import SPLITS, Settings
from training.data.split import Assignment, Ledger

_logger = logging.getLogger(__name__)
_FORMAT_VERSION = 1
_SPOOL = "spool"
_PERCENTILES = (50, 90, 99)
_SPLIT_SIZES = ("records", "text_bytes")


class Source(Protocol):
    """Where records come from; `form`, `counts`, `rejected` and `sha256` are those of the latest `read()`.

    `argument` is how the make command names it, `label` what the manifest calls it.
    """

    kind: str
    label: str
    argument: str
    size_bytes: int
    form: str | None
    counts: dict[str, int]
    rejected: dict[str, int]
    sha256: str | None

    def fingerprint(self) -> str: ...

    def read(self) -> Iterator[Record]: ...


def prepare(
    source: Source,
    *,
    name: str,
    ratios: tuple[float, float] = (Settings.train_ratio, Settings.val_ratio),
    seed: int = Settings.seed,
    cutoff: str | None = None,
    group_by: str = Settings.group_by,
) -> Path:
    """Prepare a source under a name and return the dataset's folder; `ratios` are train's and validation's."""
    return Preparation(source, name=name, settings=Settings(*ratios, seed, cutoff, group_by)).run()[0]


class Preparation:
    """One source under one name and one set of settings."""

    def __init__(self, source: Source, *, name: str, settings: Settings):
        self.source, self.settings = source, settings
        self.name = store.check_name(name, KIND)

    @cached_property
    def _fingerprint(self) -> str:
        return self.source.fingerprint()

    @cached_property
    def hash(self) -> str:
        """The dataset's hash; computing it reads the source's bytes once."""
        body = {"format": _FORMAT_VERSION, "kind": self.source.kind, "input": self._fingerprint}
        return files.sha256_json(body | {"settings": asdict(self.settings)})

    @cached_property
    def folder(self) -> Path:
        return paths.roots().datasets / self.name / files.short(self.hash)

    def run(self) -> tuple[Path, bool]:
        """Write the dataset, or find it unchanged. Return its folder, and whether it was found."""
        with store.exclusive(self.folder, KIND):
            if store.reusable(self.folder, KIND):
                return self.folder, True
            files.require_space(self.folder, int(2.1 * self.source.size_bytes), "the dataset and its working copy")
            with files.atomic_folder(self.folder) as folder:
                self._write(folder)
        return self.folder, False

    def _write(self, folder: Path) -> None:
        ledger = self._spool(folder / _SPOOL)
        assignment = ledger.assign(self.settings)
        self._refuse_empty_splits(assignment, ledger)
        _distribute(folder / _SPOOL, assignment)
        (folder / _SPOOL).unlink()
        stats = self._stats(assignment, ledger)
        if assignment.num_straddling:
            _logger.warning("%d groups lie in more than one split, as their records ask", assignment.num_straddling)
        files.write_json(folder / STATS, stats)
        files.write_manifest(folder, KIND, self._manifest(stats))

    def _spool(self, path: Path) -> Ledger:
        """Read the source, into a working copy in canonical spelling and the ledger of its records."""
        ledger = Ledger()
        with open(path, "wb") as spool, Progress("records", self.source.size_bytes, "B") as progress:
            try:
                for record in self.source.read():
                    ledger.add(record)
                    spool.write(record.line + b"\n")
                    progress.advance(len(record.line) + 1)
            except jsonl.RecordTooLong as error:
                error.next_command = self.command(self.settings, f"--max-record {error.length_bytes}B")
                raise
        if not len(ledger):
            raise UserError("the input holds no record", where=self.source.label, next_command=jsonl.EXAMPLE)
        if self.source.sha256 != self._fingerprint:
            again = self.command(self.settings)
            raise UserError("the input changed while it was read", where=self.source.label, next_command=again)
        return ledger

    def _refuse_empty_splits(self, assignment: Assignment, ledger: Ledger) -> None:
        if not assignment.empty:
            return
        counts = {name: count for name, count in assignment.counts.items() if count or name in assignment.empty}
        found = ", ".join(f"{name} {count}" for name, count in counts.items())
        groups = assignment.num_groups - assignment.num_linked_groups
        way_out = ledger.way_out(self.settings)
        raise UserError(
            f"no record in {' and '.join(assignment.empty)}; nothing was written",
            where=self.source.label,
            found=f"{found} ({groups} groups; latest date: {ledger.latest_day or 'none'})",
            expected="a record or more in each; a group lies in one split as a whole",
            next_command=self.command(way_out) if way_out else "add records to train on, then run the same again",
        )

    def command(self, settings: Settings, *options: str) -> str:
        """The make command that prepares this source under these settings."""
        given = [f"--name {self.name}", *options]
        for item in fields(Settings):
            value = getattr(settings, item.name)
            if value != item.default:
                given.append(f"--{item.name.replace('_', '-')} {value}")
        return f'make data-prepare {self.source.argument} ARGS="{" ".join(given)}"'

    def _stats(self, assignment: Assignment, ledger: Ledger) -> dict:
        kept, rejected = sum(assignment.counts.values()), sum(self.source.rejected.values())
        return {
            "schema": 1,
            "form": self.source.form,
            "records": {
                "input": len(ledger) + rejected,
                "kept": kept,
                "duplicates": len(ledger) - kept,
                "rejected": rejected,
            },
            "rejected": dict(self.source.rejected),
            "lines": dict(self.source.counts),
            "groups": {
                "all": assignment.num_groups,
                "linked": assignment.num_linked_groups,
                "straddling": assignment.num_straddling,
            },
            "splits": {
                name: {"records": count, "groups": assignment.num_groups_in(name)}
                | _lengths(name, ledger.text_bytes[assignment.of(name)])
                for name, count in assignment.counts.items()
                if count
            },
        }

    def _manifest(self, stats: dict) -> dict:
        source = self.source
        return {
            "name": self.name,
            "hash": self.hash,
            "form": source.form,
            "input": {"kind": source.kind, "label": source.label, "bytes": source.size_bytes, "sha256": source.sha256},
            "settings": asdict(self.settings),
            "splits": {name: {key: split[key] for key in _SPLIT_SIZES} for name, split in stats["splits"].items()},
            "tool": version.tool(),
        }


def _distribute(spool: Path, assignment: Assignment) -> None:
    """Write each line of the working copy to the file of its split, beside it; duplicates to none."""
    with ExitStack() as stack, open(spool, "rb") as lines:
        names = [name for name, count in assignment.counts.items() if count]
        outputs = {
            SPLITS.index(name): stack.enter_context(open(spool.parent / f"{name}.jsonl", "wb")) for name in names
        }
        for line, side in zip(lines, assignment.sides.tolist(), strict=True):
            if side in outputs:
                outputs[side].write(line)


def _lengths(split: str, text_bytes: np.ndarray) -> dict:
    """Total and spread of the records' lengths, and the place of the longest, which the memory plan reads."""
    points = np.percentile(text_bytes, _PERCENTILES, method="higher")
    spread = {f"p{point}": int(value) for point, value in zip(_PERCENTILES, points, strict=True)}
    longest = int(text_bytes.argmax())
    spread |= {"max": int(text_bytes[longest]), "longest": f"{split}.jsonl:{longest + 1}"}
    return {"text_bytes": int(text_bytes.sum()), "text_bytes_per_record": spread}
