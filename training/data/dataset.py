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
TOKENS = "tokens"
FROM_PYTHON = ("stdlib", "docstrings")
"""Data sets that every machine can make, of the Python that runs this; `data-prepare` has an option of each name."""


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
        """The form of every record, one of `record.FORMS`."""
        return self.manifest["form"]

    @property
    def splits(self) -> list[str]:
        """The splits that hold records."""
        return list(self.manifest["splits"])

    @property
    def text_bytes(self) -> int:
        """UTF-8 bytes of the texts of all splits."""
        return sum(split["text_bytes"] for split in self.manifest["splits"].values())

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
    source = "ARGS=--" + reference if reference in FROM_PYTHON else "INPUT=my.jsonl"
    return store.resolve(reference, paths.roots().datasets, KIND, f"make data-prepare {source}")


# ---- verifying


@dataclass(frozen=True)
class Verified:
    """What was held against its hashes and found whole."""

    data: Dataset
    num_files: int
    num_bytes: int
    tokens: tuple[str, ...]


def verify(folder: Path) -> Verified:
    """Hash every file of a dataset and of each set of its tokens, and hold the manifests against each other.

    Raises IntegrityError with everything that is wrong.
    """
    data, wrong = load(folder), []
    shards = sorted(path for path in (folder / TOKENS).glob("[!.]*") if path.is_dir())
    whole = {}
    for place, kind in ((folder, KIND), *((shard, TOKENS) for shard in shards)):
        try:
            whole[place] = files.read_manifest(place, kind)
        except IntegrityError as error:
            wrong.append(error)
            continue
        wrong += _wrong_files(place, whole[place])
        wrong += _wrong_chain(place, whole[place], data)
    if wrong:
        raise IntegrityError(
            f"the data set is not what was written ({len(wrong)})", where=folder,
            found="; ".join(f"{Path(error.where).relative_to(folder)}: {error.what}, {error.found}" for error in wrong),
            expected="the bytes of the manifests",
            next_command="prepare it again: the same data-prepare command makes the same data set",
        )  # fmt: skip
    num_files = sum(len(manifest["files"]) for manifest in whole.values())
    num_bytes = sum(one["bytes"] for manifest in whole.values() for one in manifest["files"].values())
    return Verified(data, num_files, num_bytes, tuple(shard.name for shard in shards))


def _wrong_files(folder: Path, manifest: dict) -> Iterator[IntegrityError]:
    """Files that are not as the manifest says, and files that it does not know."""
    for name, expected in manifest["files"].items():
        try:
            files.verify_file(folder / name, expected)
        except IntegrityError as error:
            yield error
    known = {*manifest["files"], files.MANIFEST}
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.name not in known and not path.name.startswith("."):  # a lock is no content
            yield IntegrityError("a file that no manifest names", where=path, found=f"{path.stat().st_size} bytes")


def _wrong_chain(folder: Path, manifest: dict, data: Dataset) -> Iterator[IntegrityError]:
    """What a manifest says that its folder's name, or the dataset, does not."""
    if not manifest["hash"].startswith(folder.name):
        yield IntegrityError("the folder's name is another hash", where=folder, found=files.short(manifest["hash"]))
    if manifest["kind"] == TOKENS and manifest["dataset"]["hash"] != data.hash:
        found = files.short(manifest["dataset"]["hash"])
        yield IntegrityError("the tokens are those of another data set", where=folder, found=found)
