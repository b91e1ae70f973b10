"""What a calibration is: figures of a short real loop beside the estimate's, and a GPU's record, which estimates read.

A record holds for the GPU's name and the torch version that it was measured with, and lies in the machine's cache under
both. It imports no torch: the version is that of the installed package.
"""

from __future__ import annotations

import functools
import importlib.metadata
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from training.calculator.devices import is_same
from training.core import files, paths
from training.core.errors import IntegrityError

KIND = "gpu-calibration"
_SCHEMA = 1
_SIZES = ("context_bytes", "workspace_bytes")
_MOST_BYTES = 1 << 36


@dataclass(frozen=True)
class Comparison:
    """A measured figure beside its estimate, and how far that may lie under or over it, as shares of the measured."""

    name: str
    measured_bytes: int
    estimated_bytes: int
    under: float
    over: float | None  # None: as far as it likes

    @property
    def difference(self) -> float:
        if self.measured_bytes == 0:
            return 0.0 if self.estimated_bytes == 0 else 1.0
        return self.estimated_bytes / self.measured_bytes - 1

    @property
    def passes(self) -> bool:
        return -self.under <= self.difference and (self.over is None or self.difference <= self.over)

    def to_json(self) -> dict:
        return {
            "name": self.name, "measured_bytes": self.measured_bytes, "estimated_bytes": self.estimated_bytes,
            "difference": round(self.difference, 6), "passes": self.passes,
        }  # fmt: skip


@dataclass(frozen=True)
class Calibration:
    """What was measured of a kind of GPU beside the tensors.

    Args:
        context_bytes: the most that the process used of the device beside PyTorch's segments.
        workspace_bytes: cuBLAS's scratch memory of one thread.
    """

    gpu: str
    torch: str
    driver: str
    context_bytes: int
    workspace_bytes: int


def torch_version() -> str:
    """The installed torch's version, without importing it."""
    return importlib.metadata.version("torch")


def place(gpu: str) -> Path:
    """Where the record of a GPU's name and the installed torch lies."""
    name = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
    return paths.roots().cache / "calibration" / f"{name}-{torch_version()}.json"


def find(gpu: str | None) -> Calibration | None:
    """The record for a GPU by its name, however it is spelled; None where this machine has none.

    Raises IntegrityError where there is one that is damaged, or of another GPU or torch than its name says.
    """
    folder = paths.roots().cache / "calibration"
    if gpu is None or not folder.is_dir():
        return None
    for path in sorted(folder.glob(f"*-{torch_version()}.json")):
        found = _read_once(path, path.stat().st_mtime_ns)
        if is_same(found.gpu, gpu):
            return found
    return None


@functools.cache
def _read_once(path: Path, _mtime_ns: int) -> Calibration:
    return read(path)


def read(path: Path) -> Calibration:
    """Read a record strictly. Raises IntegrityError with what is wrong and how to make it anew."""
    try:
        record = files.read_json(path)
        wrong = _wrong(record) or _foreign(record, path)
    except IntegrityError as error:
        wrong = error.found
    if wrong:
        raise IntegrityError(
            "not a calibration of this machine", where=path, found=wrong,
            expected="what make train-calibrate writes, once this file is gone",
            next_command=f"rm {shlex.quote(str(path))}",
        )  # fmt: skip
    return Calibration(record["gpu"]["name"], record["torch"], record["driver"], *(record[key] for key in _SIZES))


def _wrong(record: dict) -> str | None:
    """The first thing in a record that is not as it is written."""
    gpu = record.get("gpu")
    if (record.get("kind"), record.get("schema")) != (KIND, _SCHEMA):
        return f"kind {record.get('kind')!r}, schema {record.get('schema')!r}; expected {KIND!r}, {_SCHEMA}"
    if not isinstance(gpu, dict) or not isinstance(gpu.get("name"), str) or not gpu["name"]:
        return "no name of a GPU"
    if missing := [key for key in ("torch", "driver") if not isinstance(record.get(key), str)]:
        return f"{missing[0]} is not told"
    for key in _SIZES:
        if type(record.get(key)) is not int or not 0 <= record[key] <= _MOST_BYTES:
            return f"{key} is {record.get(key)!r}, which is no size"
    return None


def _foreign(record: dict, path: Path) -> str | None:
    if record["torch"] == torch_version() and place(record["gpu"]["name"]).name == path.name:
        return None
    return f"the record of {record['gpu']['name']} with torch {record['torch']}"


def write(record: dict) -> Path:
    """Put a GPU's record in its place."""
    path = place(record["gpu"]["name"])
    files.write_json(path, record)
    return path
