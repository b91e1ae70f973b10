"""A prepared dataset as it lies on disk: split files of records, `stats.json` and the manifest.

Owns reading; `prepare` owns writing. Only complete folders are read.
"""

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from training.core import files, paths, store
from training.core.errors import IntegrityError, UserError
from training.data import record

KIND = "dataset"
STATS = "stats.json"
TOKENS = "tokens"
TEACHERS, TEACHING = "teachers", "teaching"
"""Where a token set's recordings of teachers lie, and their kind; `objectives.teaching` makes them."""
FROM_PYTHON = ("stdlib", "docstrings")
"""Data sets that every machine can make, of the Python that runs this; `data-prepare` has an option of each name."""


@dataclass(frozen=True)
class Dataset:
    """A dataset and what its manifest says of it."""

    folder: Path
    manifest: dict
    stamps: dict[str, int] = field(default_factory=dict, compare=False)
    """When the files were last written, in nanoseconds, once they have been hashed and found whole: by name."""

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
        return store.reference_to(self.manifest)

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
        """Yield the records of a split as the lines of its file, hashing as it reads what `verified` has not hashed.

        Raises IntegrityError where the file is gone, or turns out at its end to have other bytes.
        """
        path = self.path(split)
        expected, stamp = self.manifest["files"][path.name], self.stamps.get(path.name)
        if not path.is_file() or path.stat().st_size != expected["bytes"]:
            files.verify_file(path, expected)
        digest = hashlib.sha256()
        with open(path, "rb") as file:
            for line in file:
                if stamp is None:
                    digest.update(line)
                yield line
            is_whole = _stamp(file.fileno()) == stamp if stamp else digest.hexdigest() == expected["sha256"]
        if not is_whole:
            raise self._changed(split)

    def verified(self) -> "Dataset":
        """The same, every file hashed once and from then on held to the time of its last change.

        Raises IntegrityError naming the first that is not as the manifest says.
        """
        stamps = {name: _stamp(self.folder / name) for name in self.manifest["files"] if (self.folder / name).exists()}
        files.verify_manifest(self.folder, KIND)
        return replace(self, stamps=stamps)

    def _changed(self, split: str) -> IntegrityError:
        path = self.path(split)
        return IntegrityError(
            "the data set's bytes have changed", where=path, found="other bytes than were prepared",
            expected=f"sha256 {files.short(self.manifest['files'][path.name]['sha256'])}",
            next_command=f"make data-verify DATASET={self.reference}",
        )  # fmt: skip

    def iter_texts(self, split: str) -> Iterator[str]:
        """Yield the texts of a split: one a record of the form `text`, else each message or part."""
        for value in self.iter_records(split):
            yield from record.texts(value)


def _stamp(place: Path | int) -> int:
    return os.stat(place).st_mtime_ns


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
    """What was held against its hashes and found whole.

    Args:
        tokens: the names of the token sets' folders.
        teachers: each recording's folder and manifest.
    """

    data: Dataset
    num_files: int
    num_bytes: int
    tokens: tuple[str, ...]
    teachers: dict[Path, dict]


def verify(folder: Path) -> Verified:
    """Hash every file of a dataset, of each set of its tokens and of what teachers said of them, and hold the
    manifests against each other.

    Raises IntegrityError with everything that is wrong.
    """
    data, wrong = load(folder), []
    shards = _folders(folder / TOKENS)
    teachers = [recorded for shard in shards for recorded in _folders(shard / TEACHERS)]
    whole: dict[Path, dict] = {}
    kinds = {folder: KIND} | dict.fromkeys(shards, TOKENS) | dict.fromkeys(teachers, TEACHING)
    for place, kind in kinds.items():
        try:
            whole[place] = files.read_manifest(place, kind)
        except IntegrityError as error:
            wrong.append(error)
            continue
        wrong += _wrong_files(place, whole[place])
        wrong += _wrong_chain(place, whole[place], data, whole)
    if wrong:
        raise IntegrityError(
            f"the data set is not what was written ({len(wrong)})", where=folder,
            found="; ".join(f"{Path(error.where).relative_to(folder)}: {error.what}, {error.found}" for error in wrong),
            expected="the bytes of the manifests; the data-prepare command that made the data set makes it again",
        )  # fmt: skip
    num_files = sum(len(manifest["files"]) for manifest in whole.values())
    num_bytes = sum(one["bytes"] for manifest in whole.values() for one in manifest["files"].values())
    names = tuple(shard.name for shard in shards)
    return Verified(data, num_files, num_bytes, names, {recorded: whole[recorded] for recorded in teachers})


def _folders(parent: Path) -> list[Path]:
    """The folders of a folder, but for hidden ones, in which something is still made."""
    return sorted(path for path in parent.glob("[!.]*") if path.is_dir())


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


def _wrong_chain(folder: Path, manifest: dict, data: Dataset, above: dict[Path, dict]) -> Iterator[IntegrityError]:
    """What a manifest says that its folder's name, the dataset, or the tokens that it lies in, do not."""
    if not manifest["hash"].startswith(folder.name):
        yield IntegrityError("the folder's name is another hash", where=folder, found=files.short(manifest["hash"]))
    if manifest["kind"] == TOKENS and manifest["dataset"]["hash"] != data.hash:
        found = files.short(manifest["dataset"]["hash"])
        yield IntegrityError("the tokens are those of another data set", where=folder, found=found)
    tokens = above.get(folder.parent.parent)
    if manifest["kind"] == TEACHING and tokens and manifest["tokens"] != tokens["hash"]:
        found = files.short(manifest["tokens"])
        yield IntegrityError("what a teacher said is of other tokens", where=folder, found=found)
