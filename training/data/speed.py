"""How quick text becomes records and packed shards, beside what else does it, in one run on one file.

Reading is held against bare `json.loads`, which no reader can beat; ids against the library's `encode_batch_fast` on
the same cores. Where the package `datasets` is installed (nothing here needs it) its own pipeline makes shards of the
same file: load, a batched map of 1,000 with two processes and a fast tokenizer, group, save; its time begins behind its
imports. The text is the sources of the standard library and of the installed packages, which every machine has.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from training.core import process
from training.core.timing import Ratio, best, best_of_both
from training.data import dataset, packing, tokens
from training.data.prepare import Preparation
from training.data.settings import Settings
from training.data.source import Jsonl
from training.data.stdlib import StandardLibrary
from training.tokenizer import artifact, huggingface, train
from training.tokenizer.artifact import TOKENIZER, Tokenizer

_TEXT_BYTES = 32 << 20
_ROW_TOKENS = 1024
_PIPELINE = """
import itertools, sys, time
import datasets, tokenizers
path, cache, model = sys.argv[1:]
started = time.perf_counter()
library = tokenizers.Tokenizer.from_file(model)
def encode(batch):
    return {"ids": [one.ids for one in library.encode_batch_fast(batch["text"])]}
def group(batch):
    flat = list(itertools.chain.from_iterable(batch["ids"]))
    return {"ids": [flat[at : at + 1024] for at in range(0, len(flat), 1024)]}
data = datasets.load_dataset("json", data_files=path, split="train", cache_dir=cache)
data = data.map(encode, batched=True, batch_size=1000, num_proc=2, remove_columns=data.column_names)
data.map(group, batched=True, batch_size=1000, num_proc=2).save_to_disk(cache + "/rows")
print(time.perf_counter() - started)
"""


def run() -> list[Ratio]:
    """Time each stage of the way from JSONL to shards, with the highest memory of each."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = _write(folder / "speed.jsonl")
        size, bare = path.stat().st_size, best(lambda: _bare(path))
        ratios = []
        for what, near in (("text to records over json.loads", 0.0), ("and near-duplicates too", Settings.near)):
            stages = _Stages(path, folder / f"data{near}", near)
            ratios.append(Ratio(what, best(stages.prepare), bare, size, stages.peak_bytes))
        tokenizer = _tokenizer(path, folder / "data0.0")
        return [*ratios, *_ids(path, folder, tokenizer), *_shards(path, folder, tokenizer)]


def _ids(path: Path, folder: Path, tokenizer: Tokenizer) -> list[Ratio]:
    """Text to ids, in one process and as the tokens of a data set are made, against the library on all cores."""
    texts = [json.loads(line)["text"] for line in path.read_bytes().splitlines()]
    size = sum(len(text.encode()) for text in texts)
    library = huggingface.open_library(tokenizer.folder / TOKENIZER, frozenset(tokenizer.specials))
    stages = _Stages(path, folder / "ids", 0.0)
    prepared = stages.prepare()
    peaks = []

    def ours() -> None:
        growth = process.Growth()
        stages.tokenize(prepared, tokenizer)
        peaks.append(growth.peak_bytes() + process.peak_of_children_bytes())

    times = best_of_both(ours, lambda: library.encode_batch_fast(texts, add_special_tokens=False))
    return [Ratio("text to ids on disk over the library's encode_batch_fast", *times, size, max(peaks))]


def _shards(path: Path, folder: Path, tokenizer: Tokenizer) -> list[Ratio]:
    """The whole way, against the pipeline of `datasets`."""
    if not importlib.util.find_spec("datasets"):
        return []
    stages = _Stages(path, folder / "shards", 0.0)
    ours = best(partial(stages.shards, tokenizer))
    theirs = min(_pipeline(path, folder, tokenizer) for _ in range(3))
    return [Ratio("text to packed shards over datasets", ours, theirs, path.stat().st_size)]


def _write(path: Path) -> Path:
    """Sources as JSONL up to `_TEXT_BYTES`, over again with another first line where they are fewer."""
    library, installed = StandardLibrary(), Path(sysconfig.get_path("purelib"))
    sources = [*library.paths, *sorted(installed.rglob("*.py"))]
    numbered = ((turn, source) for turn in itertools.count() for source in sources)
    with open(path, "w") as file:
        while file.tell() < _TEXT_BYTES:
            turn, source = next(numbered)
            if (text := source.read_text(errors="replace")).strip():
                group = f"{turn}-{source.parent.name}"
                file.write(json.dumps({"text": f"# {turn}\n{text}" if turn else text, "group": group}) + "\n")
    return path


class _Stages:
    """The stages, each time anew under a data root of its own."""

    def __init__(self, path: Path, root: Path, near: float):
        self._path, self._root, self._settings, self._turn = path, root, Settings(near=near), 0
        self.peak_bytes = 0

    def prepare(self) -> dataset.Dataset:
        preparation = Preparation([Jsonl(self._path)], name="speed", settings=self._settings)
        folder, _ = self._anew(preparation.run)
        self.peak_bytes = max(self.peak_bytes, preparation.peak_memory_bytes)
        return dataset.load(folder)

    def tokenize(self, prepared: dataset.Dataset, tokenizer: Tokenizer) -> Path:
        copy = self._root / f"tokens{self._turn}"
        self._turn += 1
        copy.mkdir(parents=True)
        for file in prepared.folder.iterdir():
            if file.is_file():
                (copy / file.name).hardlink_to(file)
        return tokens.tokenize(dataset.load(copy), tokenizer)

    def shards(self, tokenizer: Tokenizer) -> packing.Packs:
        """Records, tokens, and the plan of the rows."""
        split = tokens.open_split(tokens.tokenize(self.prepare(), tokenizer), "train")
        rows, rest = divmod(split.num_tokens, _ROW_TOKENS)
        return packing.plan([_ROW_TOKENS] * rows + [rest] * bool(rest), _ROW_TOKENS, seed=7)

    def _anew(self, work: Callable):
        self._turn += 1
        before = os.environ.get("DATA_ROOT")
        os.environ["DATA_ROOT"] = str(self._root / str(self._turn))
        try:
            return work()
        finally:
            os.environ.pop("DATA_ROOT")
            if before is not None:
                os.environ["DATA_ROOT"] = before


def _tokenizer(path: Path, root: Path) -> Tokenizer:
    """A tokenizer that has learned from the file's first records."""
    with open(path, "rb") as file:
        texts = [json.loads(line)["text"] for line in itertools.islice(file, 300)]
    corpus = train.Corpus("speed", "0" * 64, "train", sum(map(len, texts)), lambda: iter(texts))
    stages = _Stages(path, root / "tokenizer", 0.0)
    return artifact.load(stages._anew(lambda: train.train(corpus, train.Settings(), name="speed"))[0])


def _bare(path: Path) -> None:
    with open(path, "rb") as file:
        for line in file:
            json.loads(line)


def _pipeline(path: Path, folder: Path, tokenizer: Tokenizer) -> float:
    """Seconds of the pipeline of `datasets`, in a process of its own."""
    cache = tempfile.mkdtemp(dir=folder)
    environment = os.environ | {"HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-c", _PIPELINE, str(path), cache, str(tokenizer.folder / TOKENIZER)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return float(done.stdout)
