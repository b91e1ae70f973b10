"""What a teacher says of every label of a token set's train split: one row a label, in the order of the tokens.

Owns `<tokens>/teachers/<hash>/`: `train.labels.bin` (the label itself), `train.top.bin` (K tokens, the likeliest
first; both of the tokens' `dtype`), `train.logprobs.bin` (float32, K log-probabilities in nats at temperature 1, then
that of all other tokens together), manifest last. Row i is about label i: what the teacher, given all tokens before
it, says at that place. The label stands in the row, so that rows of other tokens, or shifted ones, are refused (B82).
While it is recorded it lies in `.<hash>.recording/`, whose journal says how far all files are whole: who begins again
goes on from there. Keyed by tokens (so by data, tokenizer, template), teacher, precision and K.
"""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from training.core import files, store, version
from training.core.errors import IntegrityError, RunError, UserError
from training.data.dataset import TEACHERS, TEACHING
from training.data.tokens import TokenSplit

if TYPE_CHECKING:
    import numpy as np

KIND = TEACHING
SPLIT = "train"
_FORMAT_VERSION = 1
_JOURNAL = "journal.json"
_JOURNAL_SECONDS = 10.0


@dataclass(frozen=True)
class Identity:
    """Who teaches: the hash of its weights, their form (`huggingface`, `gguf`) and the type it computes in."""

    name: str
    sha256: str
    form: str
    precision: str

    def key(self, split: TokenSplit, top_k: int) -> str:
        """The hash of everything that decides a record's rows."""
        who = {name: value for name, value in asdict(self).items() if name != "name"}
        return files.sha256_json(
            {"format": _FORMAT_VERSION, "tokens": split.manifest["hash"], "teacher": who, "top_k": top_k}
        )


@dataclass(frozen=True)
class Said:
    """What a teacher says of the labels of one document.

    Args:
        top_NK: the likeliest tokens, the best first.
        logprobs_NC: their log-probabilities, then that of all others together.
        label_N: the log-probability of each label, or the most that it can be.
    """

    top_NK: np.ndarray
    logprobs_NC: np.ndarray
    label_N: np.ndarray


def folder_of(split: TokenSplit, teacher: Identity, top_k: int) -> Path:
    """Where a teacher's record lies, or would lie."""
    return split.folder / TEACHERS / files.short(teacher.key(split, top_k))


def _row_bytes(split: TokenSplit, top_k: int) -> dict[str, int]:
    """Bytes of one row in each part's file."""
    import numpy as np

    id_bytes = np.dtype(split.manifest["dtype"]).itemsize
    return {"labels": id_bytes, "top": id_bytes * top_k, "logprobs": 4 * (top_k + 1)}


def labels_of(split: TokenSplit, document: int) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of a document, and the places of its labels in it."""
    import numpy as np

    start, end = int(split.offsets[document]), int(split.offsets[document + 1])
    return np.asarray(split.tokens[start:end]), np.flatnonzero(split.trained[start:end])


# ---- while it is recorded


class Recording:
    """A record that grows document by document; made by `record`."""

    def __init__(self, folder: Path, split: TokenSplit, top_k: int):
        import numpy as np

        self._folder, self._split = folder, split
        self._dtype = np.dtype(split.manifest["dtype"])
        self._row_bytes = _row_bytes(split, top_k)
        self._done = {"documents": 0, "rows": 0, "nats": 0.0, "first": 0, "among": 0}
        self._last_journal = time.monotonic()

    @property
    def num_documents(self) -> int:
        """Documents that are recorded."""
        return self._done["documents"]

    def __enter__(self) -> Recording:
        self._folder.mkdir(parents=True, exist_ok=True)
        if (self._folder / _JOURNAL).is_file():
            self._done = files.read_json(self._folder / _JOURNAL)
        self._files = {part: open(self._path(part), "ab") for part in self._row_bytes}  # noqa: SIM115 (open for the block)
        for part, file in self._files.items():
            file.truncate(self._done["rows"] * self._row_bytes[part])
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # a full disk has been told by then
            self._write_journal()
        for file in self._files.values():
            with contextlib.suppress(OSError):
                file.close()

    def write(self, said: Sequence[Said]) -> None:
        """Append what was said of the next documents."""
        import numpy as np

        for one in said:
            tokens, places = labels_of(self._split, self.num_documents)
            labels_N, done = tokens[places].astype(self._dtype), self._done
            self._files["labels"].write(labels_N.tobytes())
            self._files["top"].write(one.top_NK.astype(self._dtype).tobytes())
            self._files["logprobs"].write(one.logprobs_NC.astype("<f4").tobytes())
            done["documents"], done["rows"] = done["documents"] + 1, done["rows"] + len(places)
            done["nats"] -= float(np.sum(one.label_N, dtype=np.float64))
            done["first"] += int((one.top_NK[:, 0] == labels_N).sum())
            done["among"] += int((one.top_NK == labels_N[:, None]).sum())
        if time.monotonic() - self._last_journal > _JOURNAL_SECONDS:
            self._write_journal()

    def _write_journal(self) -> None:
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        files.write_json(self._folder / _JOURNAL, self._done)
        self._last_journal = time.monotonic()

    def figures(self) -> dict:
        """What the manifest says: the teacher's loss, at least; how often a label is its first choice, or among K."""
        done, rows = self._done, max(1, self._done["rows"])
        return {
            "rows": done["rows"], "documents": done["documents"], "loss_nats": done["nats"] / rows,
            "label_is_first": done["first"] / rows, "label_is_among": done["among"] / rows,
        }  # fmt: skip

    def _path(self, part: str) -> Path:
        return self._folder / f"{SPLIT}.{part}.bin"


@contextlib.contextmanager
def record(split: TokenSplit, teacher: Identity, top_k: int, vocab_size: int) -> Iterator[Recording | None]:
    """Begin a record, or go on with one; it is complete when the block ends well. None where there is one.

    Raises MachineError where the disk has no room for it, RunError where the teacher knows nothing of the data.
    """
    folder = folder_of(split, teacher, top_k)
    work = folder.with_name(f".{folder.name}.recording")
    folder.parent.mkdir(exist_ok=True)
    with store.exclusive(folder.parent, KIND):
        if store.reusable(folder, KIND):
            yield None
            return
        needed = split.num_trained_tokens * sum(_row_bytes(split, top_k).values())
        there = sum(path.stat().st_size for path in work.glob("*.bin"))
        files.require_space(folder, max(0, needed - there) + (1 << 16), "what the teacher says")
        with Recording(work, split, top_k) as recording:
            yield recording
        _require_knowledge(recording.figures(), vocab_size, teacher)
        (work / _JOURNAL).unlink()
        body = {
            "hash": teacher.key(split, top_k), "tokens": split.manifest["hash"], "teacher": asdict(teacher),
            "top_k": top_k, "dtype": split.manifest["dtype"], SPLIT: recording.figures(), "tool": version.tool(),
        }  # fmt: skip
        files.write_manifest(work, KIND, body)
        os.rename(work, folder)
        files.fsync_path(folder.parent)


def _require_knowledge(figures: dict, vocab_size: int, teacher: Identity) -> None:
    """Raise RunError where the labels are no likelier to the teacher than to one that guesses (B82)."""
    if not figures["loss_nats"] < math.log(vocab_size):
        raise RunError(
            "the teacher knows no more of the labels than one that guesses", where=teacher.name,
            found=f"{figures['loss_nats']:.3f} nats a label",
            expected=f"under ln {vocab_size}: a teacher that was trained on such data",
        )  # fmt: skip


# ---- once it is there


def find(split_folder: Path, wanted: str | None, top_k: int, make_command: str | None = None) -> Path:
    """The record of a teacher for the tokens of a folder. Raises UserError where it is not there, or several are.

    Args:
        wanted: a name, name@hash, or None for the only one.
    """
    name, _, digits = (wanted or "").partition("@")
    there = store.complete_folders(split_folder / TEACHERS)
    records = [(folder, files.read_manifest(folder, KIND)) for folder in there]
    found = [
        folder for folder, manifest in records
        if manifest["top_k"] == top_k and name in ("", manifest["teacher"]["name"]) and folder.name.startswith(digits)
    ]  # fmt: skip
    if len(found) == 1:
        return found[0]
    shown = ", ".join(f"{reference(folder, one)} (top_k {one['top_k']})" for folder, one in records) or "none"
    raise UserError(
        "several teachers have been recorded" if found else "no such teacher has been recorded for this data",
        where="distill.teacher", found=f"{wanted}, top_k {top_k}; there are: {shown}",
        expected="one of them by name@hash" if found else "a record made with this recipe",
        next_command=make_command,
    )  # fmt: skip


def reference(folder: Path, manifest: dict) -> str:
    """`name@hash12` of a record."""
    return f"{manifest['teacher']['name']}@{folder.name}"


class Record:
    """A complete record, held against the tokens that it is about. Raises IntegrityError where it is not theirs."""

    def __init__(self, folder: Path, split: TokenSplit):
        import numpy as np

        self.folder, self._split = folder, split
        self.manifest = files.verify_manifest(folder, KIND)
        dtype, top_k = self.manifest["dtype"], self.manifest["top_k"]
        labels_N = self._map("labels", dtype, (-1,))
        self._top_NK = self._map("top", dtype, (-1, top_k))
        self._logprobs_NC = self._map("logprobs", "<f4", (-1, top_k + 1))
        trained_N = np.asarray(split.tokens)[np.asarray(split.trained) == 1]
        if not np.array_equal(labels_N, trained_N) or len(self._top_NK) != len(trained_N):
            raise IntegrityError(
                "what the teacher said is not about these tokens", where=folder, found=f"{len(labels_N)} rows",
                expected=f"one row for each of {len(trained_N)} labels, holding that label",
                next_command=f"rm -r {shlex.quote(str(folder))}",
            )  # fmt: skip

    def _map(self, part: str, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
        import numpy as np

        return np.memmap(self.folder / f"{SPLIT}.{part}.bin", dtype=dtype, mode="r").reshape(shape)

    @cached_property
    def _first_row(self) -> np.ndarray:
        """The row at which each document begins, and the end of the last."""
        import numpy as np

        starts = np.asarray(self._split.offsets[:-1]).astype(np.int64)
        each = np.add.reduceat(np.asarray(self._split.trained), starts, dtype=np.int64)
        return np.concatenate([[0], np.cumsum(each)])

    def of_document(self, document: int) -> tuple[np.ndarray, np.ndarray]:
        """The likeliest tokens and log-probabilities for a document's labels: shapes (N, K) and (N, K + 1)."""
        rows = slice(self._first_row[document], self._first_row[document + 1])
        return self._top_NK[rows], self._logprobs_NC[rows]
