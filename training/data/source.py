"""Where records come from: JSONL (plain, gzip or zstd), Parquet, or a folder of text and code.

Owns what a source is made of, its hash, and the form of its records: the first one tells it, all others must have it.
A folder with nothing but JSONL or Parquet files in it is one source, read in the order of their names. What the bytes
mean is `intake`'s.
"""

import hashlib
import logging
import shlex
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from training.core import files, store
from training.core.errors import UserError
from training.core.report import again
from training.data import blocks, jsonl, parquet, record
from training.data.intake import Batch

_logger = logging.getLogger(__name__)
EXAMPLE = "make data-prepare INPUT=my.jsonl"
RECORD_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".ndjson", ".parquet")


class Source:
    """Where records come from, read anew at each `batches()`.

    `form` is what the records have; `counts` what was skipped and is no record; `left_out` the files that are none of
    it, by their kind; `sha256` is known when all is read.
    `argument` is how the make command names it, `label` what the manifest calls it.
    """

    kind: str
    is_packed = False
    """Whether its records take more room than its files."""
    grouped_by = "the field group, else source, else the record itself"
    """What its records' groups are."""
    always_drops = False
    """Bad records of it are counted and left out, whatever the settings: nobody can correct them. Those over the limit
    are not: the settings can, which would otherwise decide bytes that the key does not name."""

    def __init__(self, label: str, argument: str, size_bytes: int, form: str | None, weight: float):
        self.label, self.argument, self.size_bytes = label, argument, size_bytes
        self.declared_form = self.form = form
        self.weight = weight
        self.counts: Counter[str] = Counter()
        self.left_out: Counter[str] = Counter()
        self.sha256: str | None = None

    def fingerprint(self) -> str:
        """Hash the source's bytes."""
        raise NotImplementedError

    def batches(self, number: int, name: str | None, max_line_bytes: int, on_bytes: Callable) -> Iterator[Batch]:
        """Yield all there is, as source `number`; `on_bytes(n)` is called for a progress bar."""
        raise NotImplementedError


class Jsonl(Source):
    """A file of records, JSONL or Parquet, or several of them in a row."""

    kind = "jsonl"

    def __init__(self, path: Path, form: str | None = None, weight: float = 1.0, paths: list[Path] | None = None):
        self.path, self.paths = path, paths or [path]
        size = sum(blocks.size_bytes(one, EXAMPLE) for one in self.paths)
        super().__init__(path.name, argument(path, weight), size, form, weight)
        packings = {blocks.packing(one) for one in self.paths}
        self.is_packed = packings != {"plain"}
        if "parquet" in packings:
            parquet.require()

    def fingerprint(self) -> str:
        return _of_files([files.sha256_file(path) for path in self.paths])

    def batches(self, number: int, name: str | None, max_line_bytes: int, on_bytes: Callable) -> Iterator[Batch]:
        self.form, self.sha256, self.counts = self.declared_form, None, Counter()
        digests = []
        for path in self.paths:
            digest = hashlib.sha256()

            def on_raw(piece: bytes, digest=digest) -> None:
                digest.update(piece)
                on_bytes(len(piece))

            is_parquet, before = blocks.packing(path) == "parquet", path.stat()
            read = parquet.read(path, on_raw) if is_parquet else blocks.read(path, max_line_bytes, on_raw)
            for block in read:
                if self.form is None:
                    self.form = self._recognised(block.data, path)
                yield Batch(number, str(path), block.first, block.data, self.form, name, block.overlong_bytes)
            if is_parquet and path.stat().st_mtime_ns != before.st_mtime_ns:  # hashed first and read after that
                raise changed(path)
            digests.append(digest.hexdigest())
        self.sha256 = _of_files(digests)

    def _recognised(self, data: bytes, path: Path) -> str | None:
        """The form of the first record that has one. Raises UserError for a JSON array, whose lines are no records.

        Lists on lines of their own are no array, but so many bad records.
        """
        parser, lines = jsonl.Parser(), list(jsonl.bodies(data, Counter()))
        for number, body in lines:
            if body.lstrip().startswith(b"[") and (len(lines) == 1 or parser.value(body)[1]):
                raise _json_array(path, number + 1)
            if form := record.form_of(parser.value(body)[0]):
                return form
        return None


def of(text: str, form: str | None = None) -> Source:
    """The source that `PATH` or `PATH=WEIGHT` names. Raises UserError."""
    path, weight = Path(text), 1.0
    if not path.exists() and "=" in text:
        name, _, number = text.rpartition("=")
        path, weight = Path(name), _weight(text, number)
    from training.data.folder import TEXT_SUFFIXES, Folder  # which is made of a source itself

    if not path.is_dir():
        if path.suffix.lower() in TEXT_SUFFIXES and path.is_file():
            raise _text(path)
        return Jsonl(path, form, weight)
    children = sorted(path.iterdir())
    inside = [child for child in children if child.is_file() and not child.name.startswith(".")]
    if inside and all(child.name.lower().endswith(RECORD_SUFFIXES) for child in inside):
        shards = Jsonl(path, form, weight, inside)
        shards.left_out["folder or hidden"] = len(children) - len(inside)
        return shards
    if form not in (None, "text"):
        raise UserError("a folder of text has records of the form 'text'", where=path, found=form, next_command=EXAMPLE)
    if any(child.name.lower().endswith(RECORD_SUFFIXES) for child in inside):
        _logger.warning("%s: files of records beside text are left out; each can be a --source of its own", path)
    return Folder(path, weight)


def name_of(one: Source) -> str:
    """The name that a dataset gets from its first source."""
    suffix = next((suffix for suffix in RECORD_SUFFIXES if one.label.lower().endswith(suffix)), "")
    return store.name_from(one.label[: len(one.label) - len(suffix)])


def _weight(text: str, number: str) -> float:
    try:
        weight = float(number)
        if 0 < weight <= 100:
            return weight
    except ValueError:
        pass
    raise UserError(
        "not a source", where="--source", found=text, expected="PATH, or PATH=WEIGHT, a weight above 0 and at most 100",
        next_command=EXAMPLE,
    )  # fmt: skip


def argument(path: Path, weight: float) -> str:
    """A source as the make command names it."""
    return shlex.quote(str(path) if weight == 1 else f"{path}={weight:g}")


def _of_files(digests: list[str]) -> str:
    """The hash of one file; of several, in their order, one over theirs."""
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()


def changed(path: Path) -> UserError:
    """The error of a file whose hash would not be of the bytes that were read."""
    return UserError("the input changed while it was read", where=path, next_command=again())


def _text(path: Path) -> UserError:
    return UserError(
        "a file of text is no file of records", where=path, found=path.suffix,
        expected="JSONL or Parquet; text by its folder, of which each file is a record",
        next_command=f"make data-prepare INPUT={shlex.quote(str(path.parent))}",
    )  # fmt: skip


def _json_array(path: Path, line: int) -> UserError:
    script = "import json,sys; [print(json.dumps(r)) for r in json.load(sys.stdin)]"
    return UserError(
        "the file is a JSON array; nothing was written",
        where=f"{path} line {line}",
        found="a list",
        expected="JSONL: one object per line, without brackets around or commas between them",
        next_command=f'python -c "{script}" < {shlex.quote(str(path))} > {shlex.quote(path.stem + ".converted.jsonl")}',
    )
