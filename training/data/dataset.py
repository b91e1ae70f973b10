"""A prepared dataset as it lies on disk: split files of records, `stats.json` and the manifest.

Owns reading; `prepare` owns writing. Only complete folders are read.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from training.core import files, paths, store
from training.core.errors import IntegrityError, UserError
from training.data import record

KIND = "dataset"
STATS = "stats.json"


@dataclass(frozen=True)
class Dataset:
    """A dataset and what its manifest says of it."""

    folder: Path
    manifest: dict

    @property
    def name(self) -> str:
        return self.manifest["name"]

    @property
    def hash(self) -> str:
        return self.manifest["hash"]

    @property
    def form(self) -> str:
        """The form of every record: `text`, `messages` or `prompt-completion`."""
        return self.manifest["form"]

    @property
    def splits(self) -> list[str]:
        """The splits that hold records."""
        return list(self.manifest["splits"])

    @cached_property
    def stats(self) -> dict:
        """The figures of the preparation, as `stats.json` holds them."""
        return files.read_json(self.folder / STATS)

    @property
    def reference(self) -> str:
        return f"{self.name}@{files.short(self.hash)}"

    def path(self, split: str) -> Path:
        """The file of a split. Raises UserError where the dataset has none of that name."""
        if split not in self.splits:
            raise UserError(
                f"the dataset has no {split} split", where=self.folder, found=", ".join(self.splits), expected=split
            )
        return self.folder / f"{split}.jsonl"

    def iter_records(self, split: str) -> Iterator[dict]:
        """Yield the records of a split in their order. Raises IntegrityError as `iter_lines` does."""
        for line in self.iter_lines(split):
            try:
                yield files.parse_json(line)
            except ValueError:
                raise self._changed(split) from None

    def iter_lines(self, split: str) -> Iterator[bytes]:
        """Yield the records of a split as the lines of its file, hashing as it reads.

        Raises IntegrityError where the file is gone, or turns out at its end to have other bytes.
        """
        path = self.path(split)
        expected = self.manifest["files"][path.name]
        if not path.is_file() or path.stat().st_size != expected["bytes"]:
            files.verify_file(path, expected)
        digest = hashlib.sha256()
        with open(path, "rb") as file:
            for line in file:
                digest.update(line)
                yield line
        if digest.hexdigest() != expected["sha256"]:
            raise self._changed(split)

    def _changed(self, split: str) -> IntegrityError:
        path = self.path(split)
        return IntegrityError(
            "the data set's bytes have changed", where=path, found="other bytes than were prepared",
            expected=f"sha256 {files.short(self.manifest['files'][path.name]['sha256'])}",
            next_command="prepare it again: the same data-prepare command makes the same data set",
        )  # fmt: skip

    def iter_texts(self, split: str) -> Iterator[str]:
        """Yield the texts of a split: one a record of the form `text`, else each message or part."""
        for value in self.iter_records(split):
            yield from record.texts(value)


def load(folder: Path) -> Dataset:
    """Load a complete dataset. Raises IntegrityError where it has no manifest."""
    return Dataset(folder=folder, manifest=files.read_manifest(folder, KIND))


def resolve(reference: str) -> Path:
    """Return the folder of `name@hash`, `name` (its newest) or a folder's path. Raises UserError."""
    return store.resolve(reference, paths.roots().datasets, KIND, "make data-prepare INPUT=my.jsonl")
