"""How quick text becomes records, as ratios of times taken in one run: bare `json.loads` is what no reader can beat.

Where the package `datasets` is installed (nothing here needs it) its way of loading, filtering, parting and writing the
same file is timed too. A machine that is busy shows larger times.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from training.core import process
from training.data.prepare import Preparation
from training.data.settings import Settings
from training.data.source import Jsonl
from training.data.stdlib import StandardLibrary

_REPEATED = 2
_TIMES = 2


@dataclass(frozen=True)
class Ratio:
    """Two times, what they are of, and the bytes that both are for; `peak_bytes` is of the first."""

    name: str
    seconds: float
    base_seconds: float
    num_bytes: int
    peak_bytes: int

    @property
    def value(self) -> float:
        return self.seconds / self.base_seconds

    @property
    def bytes_per_second(self) -> float:
        return self.num_bytes / self.seconds

    def to_json(self) -> dict:
        return {
            "name": self.name, "seconds": self.seconds, "base_seconds": self.base_seconds, "ratio": self.value,
            "bytes_per_second": self.bytes_per_second, "peak_bytes": self.peak_bytes,
        }  # fmt: skip


def run() -> list[Ratio]:
    """Time the standard library's sources, several times over in one file, from JSONL to a dataset."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = _write(folder / "speed.jsonl")
        size, bare = path.stat().st_size, _best(lambda: _bare(path))
        ratios = []
        for what, near in (("text to records over json.loads", 0.0), ("and near-duplicates too", Settings.near)):
            process.reset_peak_rss()
            preparation = _Timed(path, folder / f"data{near}", near)
            ratios.append(Ratio(what, _best(preparation.run), bare, size, preparation.peak_bytes))
        if importlib.util.find_spec("datasets"):
            ours = ratios[0]
            theirs = _best(lambda: _datasets(path, folder))
            ratios.append(Ratio("text to records over datasets", ours.seconds, theirs, size, ours.peak_bytes))
        return ratios


def _write(path: Path) -> Path:
    """The sources as JSONL, a few times over, each time another text."""
    library = StandardLibrary()
    with open(path, "w") as file:
        for turn in range(_REPEATED):
            for source in library.paths:
                text = source.read_text(errors="replace")
                if text.strip():
                    group = f"{turn}-{source.relative_to(library.folder).parts[0]}"
                    file.write(json.dumps({"text": f"# {turn}\n{text}", "group": group}) + "\n")
    return path


class _Timed:
    """Prepares the file anew under a data root of its own."""

    def __init__(self, path: Path, root: Path, near: float):
        self._path, self._root, self._settings, self._turn = path, root, Settings(near=near), 0
        self.peak_bytes = 0

    def run(self) -> None:
        self._turn += 1
        before = os.environ.get("DATA_ROOT")
        os.environ["DATA_ROOT"] = str(self._root / str(self._turn))
        try:
            preparation = Preparation([Jsonl(self._path)], name="speed", settings=self._settings)
            preparation.run()
            self.peak_bytes = max(self.peak_bytes, preparation.peak_memory_bytes)
        finally:
            os.environ.pop("DATA_ROOT")
            if before is not None:
                os.environ["DATA_ROOT"] = before


def _bare(path: Path) -> None:
    with open(path, "rb") as file:
        for line in file:
            json.loads(line)


def _datasets(path: Path, folder: Path) -> None:
    """The same file by `datasets`, with as many processes, in a process of its own."""
    code = (
        "import sys, datasets\n"
        "data = datasets.load_dataset('json', data_files=sys.argv[1], split='train', cache_dir=sys.argv[2])\n"
        "data = data.filter(lambda row: bool(row['text'].strip()), num_proc=2)\n"
        "parts = data.train_test_split(0.2, seed=7)\n"
        "[parts[name].to_json(f'{sys.argv[2]}/{name}.jsonl') for name in parts]\n"
    )
    cache = tempfile.mkdtemp(dir=folder)
    environment = os.environ | {"HF_DATASETS_OFFLINE": "1"}
    subprocess.run([sys.executable, "-c", code, str(path), cache], check=True, capture_output=True, env=environment)


def _best(work: Callable[[], object]) -> float:
    """Seconds of the quickest of a few calls."""

    def once() -> float:
        started = time.perf_counter()
        work()
        return time.perf_counter() - started

    return min(once() for _ in range(_TIMES))
