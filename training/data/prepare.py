"""Prepare a dataset: read sources, keep one record of each content, split by group, draw, and write the artifact.

Owns the order of work and the key; reading is `reading`'s, sides are `split`'s. Invariants: a split that was asked for
is never empty; the key is over the sources' bytes, the settings and the format's version, so what is unchanged is
recognised wherever it lies. Sources are read once, and hashed on the way; they are hashed beforehand only where a
dataset of the name has as many bytes and may be the same.
"""

import json
import logging
import os
import shlex
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import fields
from functools import cached_property
from pathlib import Path

import numpy as np

from training.core import files, paths, process, store, version
from training.core.errors import UserError
from training.core.progress import Progress
from training.core.units import format_number
from training.data import contamination, figures, near, sampling, source, split
from training.data.dataset import KIND, STATS
from training.data.ledger import Components, Ledger
from training.data.reading import CONTAMINATED, REJECTED, SPOOL, Read, Reading
from training.data.record import own_texts
from training.data.settings import SPLITS, Settings
from training.data.source import Source
from training.data.split import Assignment

_logger = logging.getLogger(__name__)
FORMAT_VERSION = 4
_SPLIT_SIZES = ("records", "text_bytes")
_WEIGHT_SEED = 7


class Preparation:
    """Sources under one name and one set of settings.

    Args:
        decontaminate: evaluation files; records that share a run of words with them are dropped.
        workers: processes beside this one; by the input's size and the machine where it is None. Changes no byte.

    `peak_memory_bytes` is what `run` took: this process's growth, and all of its workers.
    """

    def __init__(
        self, sources: Sequence[Source], *, name: str, settings: Settings, decontaminate: Sequence[Path] = (),
        workers: int | None = None,
    ):  # fmt: skip
        self.sources, self.settings, self.workers = list(sources), settings, workers
        self.name, self.decontaminate = store.check_name(name, KIND), list(decontaminate)
        self.peak_memory_bytes = 0
        self.need = None
        if settings.draws and any(one.weight != 1 for one in self.sources):
            raise UserError("a draw and weights are two ways to share out", found="both", expected="one of them")

    # ---- the key

    @cached_property
    def _evaluation_hashes(self) -> list[str]:
        return [files.sha256_file(path) for path in self.decontaminate]

    def key(self, sha256_of: Sequence[str]) -> str:
        """The dataset's hash, given the sources' hashes in their order."""
        several = len(self.sources) > 1
        inputs = [
            {"kind": one.kind, "sha256": sha256, "form": one.declared_form, "weight": one.weight}
            | ({"name": one.label} if several else {})
            for one, sha256 in zip(self.sources, sha256_of, strict=True)
        ]
        settings = self.settings.key(decontaminates=bool(self.decontaminate))
        return files.sha256_json(
            {"format": FORMAT_VERSION, "inputs": inputs, "settings": settings, "evaluations": self._evaluation_hashes}
        )

    def _parent(self) -> Path:
        return paths.roots().datasets / self.name

    def _unchanged(self) -> Path | None:
        """The dataset that these sources and settings have given before; None where there is none."""
        sizes = [one.size_bytes for one in self.sources]
        for folder in store.complete_folders(self._parent()):
            inputs = files.read_json(folder / files.MANIFEST).get("inputs", [])
            if [one["bytes"] for one in inputs] == sizes:
                found = self._parent() / files.short(self.key([one.fingerprint() for one in self.sources]))
                return found if store.reusable(found, KIND) else None
        return None

    # ---- the work

    def run(self) -> tuple[Path, bool]:
        """Write the dataset, or find it unchanged. Return its folder, and whether it was found."""
        growth = process.Growth()
        with store.exclusive(self._parent(), KIND):
            if found := self._unchanged():
                return found, True
            with files.scratch_folder(self._parent()) as work:
                folder = self._write(work)
        self.peak_memory_bytes += growth.peak_bytes()
        return folder, False

    def _write(self, work: Path) -> Path:
        read = self._read(work)
        if not len(read.ledger):
            raise UserError(
                "the input holds no record", where=", ".join(one.label for one in self.sources),
                found=format_number(read.num_rejected, "bad record") if read.num_rejected else "blank lines alone",
                next_command=source.EXAMPLE,
            )  # fmt: skip
        finder = _NearFinder(work / SPOOL, read.ledger, self.settings.near) if self.settings.near else None
        grouping = split.grouping(read.ledger, self.settings, finder)
        assignment = Assignment(grouping, self.settings)
        self._refuse_empty_splits(assignment, read.ledger, finder)
        shares = self._draw(assignment, read)
        copies = self._copies(assignment, read.ledger)
        key = self.key([one.sha256 for one in self.sources])
        with files.atomic_folder(self._parent() / files.short(key)) as folder:
            _distribute(work / SPOOL, folder, assignment, copies)
            self._move_lists(work, folder, read)
            stats = figures.Figures(self.sources, read, grouping, assignment, copies).stats() | {"draw": shares}
            if assignment.num_straddling:
                parted = format_number(assignment.num_straddling, "group")
                _logger.warning("in more than one split, as their records ask: %s", parted)
            files.write_json(folder / STATS, stats)
            files.write_manifest(folder, KIND, self._manifest(stats, key))
        self.peak_memory_bytes = read.peak_memory_bytes
        return self._parent() / files.short(key)

    def _read(self, work: Path) -> Read:
        evaluations = contamination.read(self.decontaminate, self.settings.ngram) if self.decontaminate else None
        read = Reading(self.sources, self.settings, evaluations, work, self.command, self.workers).run()
        self.need = read.need
        return read

    def inspect(self) -> int:
        """Read everything and write nothing but the list of bad records; return how many records there are.

        Raises UserError where one is bad, naming the list.
        """
        target = self._parent().with_name(f"{self.name}.problems.jsonl")
        with store.exclusive(self._parent(), KIND), files.scratch_folder(self._parent()) as work:
            read = self._read(work)
            if not read.num_rejected:
                target.unlink(missing_ok=True)
                return len(read.ledger)
            with files.atomic_path(target) as temporary:
                os.replace(work / REJECTED, temporary)
        counts = read.rejected_by_rule.most_common()
        raise UserError(
            f"{read.num_rejected} of {len(read.ledger) + read.num_rejected} records are bad; no data set was written",
            where=target, found=", ".join(f"{count} {rule}" for rule, count in counts), expected="none",
            next_command=f"head {shlex.quote(str(target))}",
        )  # fmt: skip

    def _refuse_empty_splits(self, assignment: Assignment, ledger: Ledger, finder) -> None:
        if not assignment.empty:
            return
        counts = {name: count for name, count in assignment.counts.items() if count or name in assignment.empty}
        found = ", ".join(f"{name} {count}" for name, count in counts.items())
        joined = assignment.num_linked_groups
        groups = format_number(assignment.num_groups - joined, "group")
        if joined:
            groups += f" after {joined} were joined with another by a shared record or near-duplicates"
        latest = max((int(block.max(initial=0)) for _, block in ledger.blocks("day")), default=0)
        day = f"{latest:08d}"
        dated = (
            f"; latest date: {f'{day[:4]}-{day[4:6]}-{day[6:]}' if latest else 'none'}" if self.settings.cutoff else ""
        )
        nearest = split.way_out(ledger, self.settings, finder)
        raise UserError(
            f"no record in {' and '.join(assignment.empty)}; nothing was written",
            where=", ".join(one.label for one in self.sources),
            found=f"{found} ({groups}; the largest has {assignment.largest_share:.0%} of the records{dated})",
            expected=f"a record or more in each; a group ({self._grouped_by()}) lies in one split as a whole; "
            + self._promise(nearest, ledger, finder),
            next_command=self.command(nearest) if nearest else None,
        )  # fmt: skip

    def _grouped_by(self) -> str:
        if self.settings.group_by == "record":
            return "the record itself"
        return " or ".join(dict.fromkeys(one.grouped_by for one in self.sources))

    def _promise(self, nearest: Settings | None, ledger: Ledger, finder) -> str:
        """What the settings that are named next come to."""
        if nearest is None:
            return "no setting gives that, but more records to train on would"
        counts = Assignment(split.grouping(ledger, nearest, finder if nearest.near else None), nearest).counts
        told = ", ".join(f"{name} {count}" for name, count in counts.items() if count)
        alone = ", which parts what is in one group" if nearest.group_by != self.settings.group_by else ""
        return f"the next command gives {told}{alone}"

    def command(self, settings: Settings, *options: str) -> str:
        """The make command that prepares these sources under these settings."""
        given = [f"--name {self.name}"]
        first, *others = self.sources
        variable = "" if first.argument.startswith("--") else f"INPUT={first.argument} "
        given += [first.argument] * (not variable) + [f"--source {one.argument}" for one in others]
        forms = {one.declared_form for one in self.sources if isinstance(one, source.Jsonl)} - {None}
        given += [f"--form {form}" for form in forms]
        given += ["--decontaminate", *(shlex.quote(str(path)) for path in self.decontaminate)] * bool(
            self.decontaminate
        )
        named = {option.split()[0] for option in options}
        for item in fields(Settings):
            value, name = getattr(settings, item.name), f"--{item.name.replace('_', '-')}"
            is_default = value == item.default
            if name == "--max-record-bytes":
                value, name = f"{value}B", "--max-record"
            if is_default or name in named:
                continue
            given.append(name if value is True else f"{name} {shlex.quote(str(value))}")
        return f'make data-prepare {variable}ARGS="{" ".join([*given, *options])}"'

    # ---- what is taken

    def _draw(self, assignment: Assignment, read: Read) -> dict[str, dict]:
        """Draw for the budgets, leaving out the others; return what each split's draw was shared out by."""
        settings, figures_of = self.settings, {}
        budgets = {"train": (settings.draw, settings.draw_seed)}
        budgets |= dict.fromkeys(("validation", "test"), (settings.draw_eval, settings.eval_seed))
        for name, (budget, seed) in budgets.items():
            rows = np.flatnonzero(assignment.of(name))
            if budget is None or not len(rows):
                continue
            if budget > len(rows):
                raise UserError(
                    f"there are fewer records in {name} than are to be drawn; nothing was written",
                    where="--draw" if name == "train" else "--draw-eval", found=f"{len(rows)} records",
                    expected=f"at least {budget}",
                )  # fmt: skip
            labels = read.ledger.pick("label", rows)
            rule = (
                sampling.Rule(settings.floor, settings.cap, seed) if settings.draw_by else sampling.Rule(0, 1.0, seed)
            )
            taken = sampling.draw(labels, read.ledger.pick("tier", rows), read.ledger.pick("order", rows), budget, rule)
            figures_of[name] = figures.of_draw(labels, taken, read.labels, budget, rule)
            for words in figures_of[name]["not_kept"]:
                _logger.warning("the draw of %s by %s: %s", name, settings.draw_by, words)
            left = np.ones(len(rows), bool)
            left[taken] = False
            assignment.leave_out(rows[left])
        return figures_of

    def _copies(self, assignment: Assignment, ledger: Ledger) -> np.ndarray | None:
        """How often each record of train is written, by its source's weight; None where all weights are 1."""
        if all(one.weight == 1 for one in self.sources):
            return None
        weights = np.array([one.weight for one in self.sources])[ledger.column("source")]
        uniform = sampling.uniform(ledger.column("order"), _WEIGHT_SEED)
        copies = np.where(assignment.of("train"), np.floor(weights + uniform), 1).astype(np.uint8)
        num_train = assignment.counts["train"]
        assignment.leave_out(np.flatnonzero(assignment.of("train") & (copies == 0)))
        if not assignment.counts["train"]:
            raise UserError(
                "the weights leave no record in train; nothing was written", where="--source",
                found=", ".join(one.argument for one in self.sources),
                expected=f"larger weights, which leave some of {format_number(num_train, 'record')}",
            )  # fmt: skip
        return copies

    def _move_lists(self, work: Path, folder: Path, read: Read) -> None:
        if read.num_rejected:
            os.replace(work / REJECTED, folder / REJECTED)
        if self.decontaminate:
            os.replace(work / CONTAMINATED, folder / CONTAMINATED)

    def _manifest(self, stats: dict, key: str) -> dict:
        bands = near.Bands(self.settings.near) if self.settings.near else None
        return {
            "name": self.name,
            "hash": key,
            "format": FORMAT_VERSION,
            "form": stats["form"],
            "inputs": [
                {"kind": one.kind, "label": one.label, "bytes": one.size_bytes, "sha256": one.sha256,
                 "form": one.declared_form, "weight": one.weight}
                for one in self.sources
            ],
            "settings": self.settings.key(decontaminates=bool(self.decontaminate)),
            "near": {"shingle_bytes": near.SHINGLE_BYTES, "bands": bands.num, "rows": bands.rows} if bands else None,
            "evaluations": [
                {"label": path.name, "sha256": sha256}
                for path, sha256 in zip(self.decontaminate, self._evaluation_hashes, strict=True)
            ],
            "splits": {name: {key: one[key] for key in _SPLIT_SIZES} for name, one in stats["splits"].items()},
            "tool": version.tool(),
        }  # fmt: skip


class _NearFinder:
    """Finds near-duplicates once, whatever settings ask for them again."""

    def __init__(self, spool: Path, ledger: Ledger, threshold: float):
        self._spool, self._ledger, self._threshold = spool, ledger, threshold
        self._found: Components | None = None

    def __call__(self, keep: np.ndarray, together: Components) -> Components:
        if self._found is None:
            starts = np.zeros(len(self._ledger) + 1, np.int64)
            np.cumsum(self._ledger.column("line_bytes"), out=starts[1:])
            with open(self._spool, "rb") as file, Progress("near-duplicates", self._ledger.num_bands, "band") as bar:
                texts = near.Texts(file, starts, _normal_text)
                clusters = near.Clusters(self._ledger, self._threshold, texts, keep)
                self._found = clusters.run(lambda: bar.advance(1, f"{clusters.num_compared} pairs compared"))
            self._found.join(together)
        return self._found.copy()


def _normal_text(line: bytes) -> bytes:
    return near.normal(own_texts(json.loads(line)))


def _distribute(spool: Path, folder: Path, assignment: Assignment, copies: np.ndarray | None) -> None:
    """Write each line of the working copy to the file of its split; what is written again comes behind all the rest."""
    with ExitStack() as stack:
        names = [name for name, count in assignment.counts.items() if count]
        outputs = {SPLITS.index(name): stack.enter_context(open(folder / f"{name}.jsonl", "wb")) for name in names}
        for turn in range(1 if copies is None else int(copies.max(initial=1))):
            lines = stack.enter_context(open(spool, "rb"))
            sides = assignment.sides if not turn else np.where(copies > turn, assignment.sides, np.uint8(255))
            for line, side in zip(lines, sides.tobytes(), strict=True):
                if (output := outputs.get(side)) is not None:
                    output.write(line)
