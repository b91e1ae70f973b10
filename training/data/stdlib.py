"""The running Python's own standard library as a source of records: real text that is on every machine.

One record a `.py` file: `id` is its path under the library's folder, `group` its top-level package or module. Left
out, by name at the top level: the test suite, installed packages, and the files that building Python generated (they
hold the paths of one machine). Counted and left out: files that are not UTF-8, and files that hold nothing. No path
outside the library enters a record, so the same Python anywhere gives the same hash.
"""

import platform
import sysconfig
from pathlib import Path

from training.core.errors import MachineError, UserError
from training.data.folder import Folder

_LEFT_OUT = {"test", "site-packages", "dist-packages", "sitecustomize.py", "usercustomize.py"}
_GENERATED_PREFIXES = ("_sysconfigdata", "config-")


class StandardLibrary(Folder):
    """The standard library's sources, read in sorted order."""

    kind = "stdlib"
    always_drops = True

    def __init__(self, folder: Path | None = None, weight: float = 1.0):
        place = folder or Path(sysconfig.get_path("stdlib"))
        try:
            super().__init__(place, weight)
        except UserError:
            raise MachineError(
                "this Python has no standard library in source", where=place, expected=".py files"
            ) from None
        self.left_out.clear()  # nobody put them there to be read
        self.label, self.argument = f"python-{platform.python_version()}", "--stdlib"

    def _enters(self, parent: Path, name: str) -> bool:
        return parent != self.folder or _belongs(name)

    def _takes(self, parent: Path, name: str) -> bool:
        return name.endswith(".py") and self._enters(parent, name)


def _belongs(name: str) -> bool:
    return name not in _LEFT_OUT and not name.startswith(_GENERATED_PREFIXES)
