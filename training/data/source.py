"""Where records come from: JSONL (plain, gzip or zstd), Parquet, or a folder of text and code.

Owns what a source is made of, its hash, and the form of its records: the first one tells it, all others must have it.
A folder with nothing but JSONL or Parquet files in it is one source, read in the order of their names. What the bytes
mean is `intake`'s.
"""

import hashlib
import os
import shlex
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from training.core import files, store
from training.core.errors import UserError
from training.data import blocks, jsonl, parquet, record
from training.data.intake import Batch

EXAMPLE = "make data-prepare INPUT=my.jsonl"
_RECORD_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".ndjson", ".parquet")
_TEXT_SUFFIXES = (
    ".txt .text .md .rst .tex .org .adoc .html .htm .xml .csv .py .pyi .ipynb .c .h .cc .cpp .cxx .hpp .hh .cu .rs .go "
    ".java .kt .kts .scala .js .mjs .jsx .ts .tsx .rb .php .pl .pm .lua .sh .bash .zsh .fish .ps1 .sql .r .jl .m .cs "
    ".swift .fs .vb .hs .ml .mli .ex .exs .erl .clj .lisp .el .vim .zig .nim .dart .asm .s .f90 .f .yaml .yml .toml "
    ".ini .cfg .cmake .gradle .proto .graphql .css .scss .vue .svelte .tf .nix "
)
_FILES_AT_ONCE_BYTES = 1 << 20


class Source:
    """Where records come from, read anew at each `batches()`.

    `form` is what the records have; `counts` what was skipped and is no record; `sha256` is known when all is read.
    `argument` is how the make command names it, `label` what the manifest calls it.
    """

    kind: str
    is_packed = False
    """Whether its records take more room than its files."""
    always_drops = False
    """Bad records of it are counted and left out, whatever the settings: nobody can correct them."""

    def __init__(self, label: str, argument: str, size_bytes: int, form: str | None, weight: float):
        self.label, self.argument, self.size_bytes = label, argument, size_bytes
        self.declared_form = self.form = form
        self.weight = weight
        self.counts: Counter[str] = Counter()
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
        super().__init__(path.name, _argument(path, weight), size, form, weight)
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
                raise UserError(
                    "the input changed while it was read",
                    where=path,
                    next_command="sync   # then the same again",
                )
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


class Folder(Source):
    """A folder of text and code: a record a file, by its path; hidden files and those of other kinds are passed over.

    The first step of a file's path is its group, so that what belongs together stays together.
    """

    kind = "folder"

    def __init__(self, folder: Path, weight: float = 1.0):
        self.folder = folder
        self.paths = self._find()
        size = sum(path.stat().st_size for path in self.paths)
        super().__init__(folder.resolve().name, _argument(folder, weight), size, "text", weight)

    def _find(self) -> list[Path]:
        """The files of text in the order of their paths."""
        found, others = [], 0
        for parent, folders, names in os.walk(self.folder):
            folders[:] = sorted(name for name in folders if self._enters(Path(parent), name))
            for name in names:
                path = Path(parent, name)
                if self._takes(Path(parent), name) and path.is_file():
                    found.append(path)
                else:
                    others += 1
        if not found:
            raise UserError(
                "the folder holds no text", where=self.folder, found=f"{others} files of other kinds",
                expected="files such as .txt, .md or .py, or JSONL", next_command=EXAMPLE,
            )  # fmt: skip
        return sorted(found, key=self._name)

    def _enters(self, parent: Path, name: str) -> bool:
        return not name.startswith(".") and name != "__pycache__"

    def _takes(self, parent: Path, name: str) -> bool:
        suffix = Path(name).suffix.lower()
        return not name.startswith(".") and suffix != "" and f"{suffix} " in _TEXT_SUFFIXES

    def _name(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix()

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for path in self.paths:
            self._update(digest, path, path.read_bytes())
        return digest.hexdigest()

    def _update(self, digest, path: Path, data: bytes) -> None:
        name = os.fsencode(self._name(path))
        digest.update(b"%d %d\n%s%s" % (len(name), len(data), name, data))

    def batches(self, number: int, name: str | None, max_line_bytes: int, on_bytes: Callable) -> Iterator[Batch]:
        self.sha256, self.counts = None, Counter()
        digest, waiting, num_waiting = hashlib.sha256(), [], 0
        for path in self.paths:
            data = path.read_bytes()
            self._update(digest, path, data)
            on_bytes(len(data))
            if not data.strip() and not self.always_drops:  # an __init__.py, say: no record, and nobody's mistake
                self.counts["empty_files"] += 1
                continue
            waiting.append((os.fsencode(self._name(path)).decode(errors="backslashreplace"), data))
            num_waiting += len(data)
            if num_waiting >= _FILES_AT_ONCE_BYTES:
                yield Batch(number, str(self.folder), 1, waiting, self.form, name)
                waiting, num_waiting = [], 0
        if waiting:
            yield Batch(number, str(self.folder), 1, waiting, self.form, name)
        self.sha256 = digest.hexdigest()


def of(text: str, form: str | None = None) -> Source:
    """The source that `PATH` or `PATH=WEIGHT` names. Raises UserError."""
    path, weight = Path(text), 1.0
    if not path.exists() and "=" in text:
        name, _, number = text.rpartition("=")
        path, weight = Path(name), _weight(text, number)
    if not path.is_dir():
        return Jsonl(path, form, weight)
    inside = sorted(child for child in path.iterdir() if child.is_file() and not child.name.startswith("."))
    if inside and all(child.name.lower().endswith(_RECORD_SUFFIXES) for child in inside):
        return Jsonl(path, form, weight, inside)
    if form not in (None, "text"):
        raise UserError("a folder of text has records of the form 'text'", where=path, found=form, next_command=EXAMPLE)
    return Folder(path, weight)


def name_of(one: Source) -> str:
    """The name that a dataset gets from its first source."""
    suffix = next((suffix for suffix in _RECORD_SUFFIXES if one.label.lower().endswith(suffix)), "")
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


def _argument(path: Path, weight: float) -> str:
    return shlex.quote(str(path) if weight == 1 else f"{path}={weight:g}")


def _of_files(digests: list[str]) -> str:
    """The hash of one file; of several, in their order, one over theirs."""
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()


def _json_array(path: Path, line: int) -> UserError:
    script = "import json,sys; [print(json.dumps(r)) for r in json.load(sys.stdin)]"
    return UserError(
        "the file is a JSON array; nothing was written",
        where=f"{path} line {line}",
        found="a list",
        expected="JSONL: one object per line, without brackets around or commas between them",
        next_command=f'python -c "{script}" < {shlex.quote(str(path))} > {shlex.quote(path.stem + ".converted.jsonl")}',
    )
