"""The running Python's own standard library as a source of records: real text that is on every machine.

One record a `.py` file: `id` is its path under the library's folder, `group` its top-level package or module. Left
out, by name at the top level: the test suite, installed packages, and the files that building Python generated (they
hold the paths of one machine). Counted and left out: files that are not UTF-8, and files that hold nothing. No path
outside the library enters a record, so the same Python anywhere gives the same hash.
"""

import hashlib
import os
import platform
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from training.core.errors import MachineError
from training.data import record
from training.data.record import Record

_LEFT_OUT = {"test", "site-packages", "dist-packages", "sitecustomize.py", "usercustomize.py"}
_GENERATED_PREFIXES = ("_sysconfigdata", "config-")


class StandardLibrary:
    """The standard library's sources, read in sorted order; the counts of the latest reading lie in `rejected`."""

    kind, argument = "stdlib", "INPUT=--stdlib"
    form = "text"
    label = f"python-{platform.python_version()}"

    def __init__(self, folder: Path | None = None):
        self.folder = folder or Path(sysconfig.get_path("stdlib"))
        self.counts: Counter[str] = Counter()
        self.rejected: Counter[str] = Counter()
        self.paths = sorted(_sources(self.folder), key=lambda path: path.relative_to(self.folder).as_posix())
        if not self.paths:
            raise MachineError("this Python has no standard library in source", where=self.folder, expected=".py files")
        self.size_bytes = sum(path.stat().st_size for path in self.paths)
        self.sha256: str | None = None

    def fingerprint(self) -> str:
        """Hash the relative paths and the bytes of all files, in order."""
        digest = hashlib.sha256()
        for path in self.paths:
            self._update(digest, path, path.read_bytes())
        return digest.hexdigest()

    def read(self) -> Iterator[Record]:
        """Yield one record a file; sets `rejected` and `sha256`."""
        self.rejected = Counter(not_utf8=0, empty=0)
        digest = hashlib.sha256()
        for path in self.paths:
            data = path.read_bytes()
            self._update(digest, path, data)
            try:
                text = data.decode()
            except UnicodeDecodeError:
                self.rejected["not_utf8"] += 1
                continue
            if text.strip():
                yield self._record(path, text)
            else:
                self.rejected["empty"] += 1
        self.sha256 = digest.hexdigest()

    def _update(self, digest, path: Path, data: bytes) -> None:
        name = path.relative_to(self.folder).as_posix().encode()
        digest.update(b"%d %d\n%s%s" % (len(name), len(data), name, data))

    def _record(self, path: Path, text: str) -> Record:
        relative = path.relative_to(self.folder)
        group = relative.parts[0].removesuffix(".py")
        return record.build({"id": relative.as_posix(), "group": group, "text": text}, self.form)


def _sources(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        if Path(parent) == folder:
            folders[:] = [name for name in folders if _belongs(name)]
            names = [name for name in names if _belongs(name)]
        yield from (Path(parent, name) for name in names if name.endswith(".py"))


def _belongs(name: str) -> bool:
    return name not in _LEFT_OUT and not name.startswith(_GENERATED_PREFIXES)
