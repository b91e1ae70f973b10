"""How quick text becomes records, beside bare `json.loads`, which no reader can beat.

Where the package `datasets` is installed (nothing here needs it) its way of loading, filtering, parting and writing the
same file is timed too.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from training.core import process
from training.core.timing import Ratio, best
from training.data.prepare import Preparation
from training.data.settings import Settings
from training.data.source import Jsonl
from training.data.stdlib import StandardLibrary

_TEXT_BYTES = 80 << 20


def run() -> list[Ratio]:
    """Time the standard library's sources, in one file, from JSONL to a dataset."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = _write(folder / "speed.jsonl")
        size, bare = path.stat().st_size, best(lambda: _bare(path))
        ratios = []
        for what, near in (("text to records over json.loads", 0.0), ("and near-duplicates too", Settings.near)):
            process.reset_peak_rss()
            preparation = _Timed(path, folder / f"data{near}", near)
            ratios.append(Ratio(what, best(preparation.run), bare, size, preparation.peak_bytes))
        if importlib.util.find_spec("datasets"):
            ours = ratios[0]
            theirs = best(lambda: _datasets(path, folder))
            ratios.append(Ratio("text to records over datasets", ours.seconds, theirs, size, ours.peak_bytes))
        return ratios


def _write(path: Path) -> Path:
    """The sources as JSONL up to `_TEXT_BYTES`, over again with another first line where they are fewer."""
    library = StandardLibrary()
    texts = [(text, source) for source in library.paths if (text := source.read_text(errors="replace")).strip()]
    numbered = ((turn, *one) for turn in itertools.count() for one in texts)
    with open(path, "w") as file:
        while file.tell() < _TEXT_BYTES:
            turn, text, source = next(numbered)
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
