"""A folder of text and code as a source: which files are records, and which are left out, by what they are.

A file whose extension is listed is text and must be UTF-8. Any other is text where all of it is UTF-8 without a zero
byte, as a LICENSE, a Makefile or a log is; packed ones (gzip, zstd) are told and read unpacked. Left out, and counted
by extension: files that are no text, files of records (a source of their own), and what is hidden.
"""

import codecs
import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from training.core.errors import UserError
from training.core.units import format_number
from training.data import blocks
from training.data.intake import Batch
from training.data.source import EXAMPLE, RECORD_SUFFIXES, Source, argument, changed

_LISTED = (
    ".txt .text .md .rst .tex .org .adoc .html .htm .xml .csv .py .pyi .ipynb .c .h .cc .cpp .cxx .hpp .hh .cu .rs .go "
    ".java .kt .kts .scala .js .mjs .jsx .ts .tsx .rb .php .pl .pm .lua .sh .bash .zsh .fish .ps1 .sql .r .jl .m .cs "
    ".swift .fs .vb .hs .ml .mli .ex .exs .erl .clj .lisp .el .vim .zig .nim .dart .asm .s .f90 .f .yaml .yml .toml "
    ".ini .cfg .cmake .gradle .proto .graphql .css .scss .vue .svelte .tf .nix"
)
TEXT_SUFFIXES = frozenset(_LISTED.split())
PACKED_SUFFIXES = (".gz", ".zst")
HIDDEN, LINKED, NO_FILE, NO_EXTENSION = "hidden", "linked folder", "no plain file", "no extension"
_READ_BYTES, _FILES_AT_ONCE_BYTES = 1 << 20, 1 << 20
_MOST_SHOWN = 6


class Folder(Source):
    """A folder of text and code: a record a file, by its path.

    The first step of a file's path is its group, so that what belongs together stays together.
    """

    kind = "folder"
    grouped_by = "the first step of a file's path"

    def __init__(self, folder: Path, weight: float = 1.0):
        self.folder = folder
        self.paths, left_out = self._find()
        size = sum(path.stat().st_size for path in self.paths)
        super().__init__(folder.resolve().name, argument(folder, weight), size, "text", weight)
        self.left_out = left_out
        self.is_packed = any(path.suffix.lower() in PACKED_SUFFIXES for path in self.paths)

    def _find(self) -> tuple[list[Path], Counter[str]]:
        """The files of text in the order of their paths, and how many there are of each kind that is none."""
        found, left_out = [], Counter()
        for parent, folders, names in os.walk(self.folder):
            here = Path(parent)
            left_out[HIDDEN] += sum(_is_hidden(name) for name in (*folders, *names))
            left_out[LINKED] += sum((here / name).is_symlink() and not _is_hidden(name) for name in folders)
            folders[:] = sorted(name for name in folders if self._enters(here, name))
            for name in (name for name in names if not _is_hidden(name)):
                if (here / name).is_file() and self._takes(here, name):
                    found.append(here / name)
                else:
                    left_out[_kind(here / name)] += 1
        if not found:
            raise UserError(
                "the folder holds no text", where=self.folder, found=in_words(left_out) or "no file",
                expected="files of text, or JSONL or Parquet alone", next_command=EXAMPLE,
            )  # fmt: skip
        return sorted(found, key=self._name), left_out

    def _enters(self, parent: Path, name: str) -> bool:
        return not _is_hidden(name)

    def _takes(self, parent: Path, name: str) -> bool:
        path = parent / name
        if name.lower().endswith(RECORD_SUFFIXES):
            return False
        bare = path.with_suffix("") if path.suffix.lower() in PACKED_SUFFIXES else path
        return bare.suffix.lower() in TEXT_SUFFIXES or _is_text(path)

    def _name(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix()

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for path in self.paths:
            self._read(digest, path, 0)
        return digest.hexdigest()

    def _read(self, digest, path: Path, most_bytes: int) -> tuple[bytes, int]:
        """Hash a file with its name; return its bytes, none of one that has more than the most, and their number."""
        name, parts, num_bytes = os.fsencode(self._name(path)), [], 0
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(b"%d %d\n%s" % (len(name), size, name))
            while piece := file.read(_READ_BYTES):
                digest.update(piece)
                num_bytes += len(piece)
                if size <= most_bytes:
                    parts.append(piece)
        if num_bytes != size:
            raise changed(path)
        return b"".join(parts), num_bytes

    def batches(self, number: int, name: str | None, max_line_bytes: int, on_bytes: Callable) -> Iterator[Batch]:
        self.sha256, self.counts = None, Counter()
        digest, waiting, num_waiting = hashlib.sha256(), [], 0
        for path in self.paths:
            data, num_bytes = self._read(digest, path, max_line_bytes)
            on_bytes(num_bytes)
            is_held = len(data) == num_bytes
            if is_held and not data.strip() and not self.always_drops:  # an __init__.py, say: nobody's mistake
                self.counts["empty_files"] += 1
                continue
            waiting.append((os.fsencode(self._name(path)).decode(errors="backslashreplace"), data, num_bytes))
            num_waiting += len(data)
            if num_waiting >= _FILES_AT_ONCE_BYTES:
                yield Batch(number, str(self.folder), 1, waiting, self.form, name)
                waiting, num_waiting = [], 0
        if waiting:
            yield Batch(number, str(self.folder), 1, waiting, self.form, name)
        self.sha256 = digest.hexdigest()


def in_words(left_out: Counter[str]) -> str:
    """`7 left out: 4 .png, 2 hidden, 1 .gz`; nothing where nothing is."""
    kinds = sorted((+left_out).items(), key=lambda item: (-item[1], item[0]))
    if not kinds:
        return ""
    shown = ", ".join(f"{count} {kind}" for kind, count in kinds[:_MOST_SHOWN])
    more = f" and {format_number(len(kinds) - _MOST_SHOWN, 'other kind')}" if len(kinds) > _MOST_SHOWN else ""
    return f"{left_out.total()} left out: {shown}{more}"


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name == "__pycache__"


def _kind(path: Path) -> str:
    """What a file that is left out is counted as: its extension, of a packed one both."""
    if not path.is_file():
        return NO_FILE
    suffixes = path.suffixes[-2:] if path.suffix.lower() in PACKED_SUFFIXES else path.suffixes[-1:]
    return "".join(suffixes).lower() or NO_EXTENSION


def _is_text(path: Path) -> bool:
    """Whether a file, unpacked where it is packed, is UTF-8 without a zero byte from its beginning to its end."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for piece in blocks.unpacked(path, lambda _: None):
            decoder.decode(piece)
            if b"\0" in piece:
                return False
        decoder.decode(b"", final=True)
        return True
    except (UnicodeDecodeError, UserError, OSError):
        return False
