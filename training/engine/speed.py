"""How quick the trainer is beside other libraries' trainers on the very same rows, each in a process of its own.

Pretraining of the demo's model against Hugging Face's Trainer; LoRA on the smallest base, where that is fetched,
against TRL's SFTTrainer, where that is installed (nothing here needs it): prompts of about 400 tokens, answers of a
line. Times are those from the end of the first step to the end of the last; threads, batch, attention and adapter are
the same.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from training.core import files, paths
from training.core.timing import Ratio, best
from training.data.stdlib import StandardLibrary
from training.recipe import bases
from training.runs.events import read_events
from training.runs.folder import RunFolder

_BASE = "smollm2-135m-instruct"
_TEXT_BYTES = 3 << 20
_TIMES = 2
_DEMO = """\
extends: {recipes}/demo/pretrain-stdlib.yaml
data: {{dataset: texts}}
tokenizer: {{path: texts}}
stop: {{max_steps: 60, max_hours: null}}
schedule: {{kind: constant, warmup: 0 steps}}
checkpoint: {{every_steps: null, keep: 1, initial: false}}
evaluate: {{every_steps: null}}
"""
_LORA = """\
extends: {recipes}/lora/smollm2-135m.yaml
data: {{dataset: chat, seq_len: 1024, micro_batch: 2, on_error: drop}}
memory: {{loss_chunk: auto}}
stop: {{max_steps: 6}}
schedule: {{kind: constant, warmup: 0 steps}}
batch: {{accumulate: 1}}
lora: {{dropout: 0}}
checkpoint: {{every_steps: null, every_minutes: null, keep: 1}}
evaluate: {{every_steps: null}}
"""


@dataclass(frozen=True)
class _Seen:
    """What a run showed: seconds from its first step's end to its last's, losses, memory, seconds until its first."""

    seconds: float
    losses: list[float]
    peak_bytes: int
    started_seconds: float
    is_compiled: bool = False

    @property
    def mean_loss(self) -> float:
        return sum(self.losses) / len(self.losses)


def run() -> list[Ratio]:
    """Time both, in turns, the quickest of a few."""
    with tempfile.TemporaryDirectory(prefix="trainyard-") as name:
        place = _Place(Path(name))
        demo = place.demo()
        ratios = [_against(place, "pretraining over Hugging Face's Trainer", demo, "trainer"), _compiled(place, demo)]
        if bases.find(_BASE).is_fetched:
            recipe = place.lora()
            if importlib.util.find_spec("trl"):
                ratios.append(_against(place, "LoRA over TRL's SFTTrainer", recipe, "sft"))
            started = min(place.ours(recipe).started_seconds for _ in range(_TIMES))
            ratios.append(Ratio("start to first step over loading the base", started, best(place.loads, _TIMES)))
        return ratios


def _against(place: _Place, what: str, recipe: Path, name: str) -> Ratio:
    pairs = [(place.ours(recipe), place.theirs(name, recipe)) for _ in range(_TIMES)]
    ours, theirs = (min(side, key=lambda seen: seen.seconds) for side in zip(*pairs, strict=True))
    return Ratio(
        f"{what} (loss {ours.mean_loss:.3f} and {theirs.mean_loss:.3f})", ours.seconds, theirs.seconds,
        peak_bytes=ours.peak_bytes, base_peak_bytes=theirs.peak_bytes,
    )  # fmt: skip


def _compiled(place: _Place, recipe: Path) -> Ratio:
    """Steps of `memory.compile: auto` over plain ones; the trial before the first step chooses, and is not counted."""
    pairs = [(place.ours(recipe, "memory.compile=auto"), place.ours(recipe)) for _ in range(_TIMES)]
    ours, plain = (min(side, key=lambda seen: seen.seconds) for side in zip(*pairs, strict=True))
    what = f"pretraining {'compiled' if ours.is_compiled else 'not compiled, by its trial,'} over plain"
    return Ratio(what, ours.seconds, plain.seconds, peak_bytes=ours.peak_bytes, base_peak_bytes=plain.peak_bytes)


class _Place:
    """A data root of the bench's own, in which every process works."""

    def __init__(self, folder: Path):
        self._folder = folder
        own = {"DATA_ROOT": str(folder / "data"), "TRAINYARD_CACHE": str(folder / "cache")}  # no queue of others
        self._environment = os.environ | own | {"HF_HUB_OFFLINE": "1", "RUNTIME": "local"}

    def demo(self) -> Path:
        """The demo's recipe, its texts and its tokenizer."""
        self._write("texts.jsonl", ({"text": text, "group": path.name} for path, text in _sources()))
        self._command("data-prepare", str(self._folder / "texts.jsonl"), "--name", "texts")
        self._command("tokenizer-train", "--dataset", "texts", "--name", "texts", "--vocab-size", "4096")
        return self._recipe("demo.yaml", _DEMO)

    def lora(self) -> Path:
        """A recipe that asks for what a function's source is documented to do."""
        there = self._folder / "data" / "models" / "bases" / _BASE
        there.parent.mkdir(parents=True)
        there.symlink_to(bases.find(_BASE).folder)
        self._write("chat.jsonl", (record for path, text in _sources() for record in _questions(path, text)))
        self._command("data-prepare", str(self._folder / "chat.jsonl"), "--name", "chat")
        return self._recipe("lora.yaml", _LORA)

    def ours(self, recipe: Path, *overrides: str) -> _Seen:
        """Train the recipe by the command, as anybody does."""
        begun = time.time()
        folder = Path(json.loads(self._command("train", "--config", str(recipe), *overrides, "--json"))["folder"])
        summary, steps = RunFolder(folder).summary(), list(read_events(folder, "step"))
        first_seconds = steps[0]["train/tokens"] / steps[0]["speed/tokens_per_second"]
        return _Seen(
            steps[-1]["time"] - steps[0]["time"], [step["train/loss_nats"] for step in steps], summary["peak_bytes"],
            steps[0]["time"] - first_seconds - begun, any(one["compiled"] for one in read_events(folder, "compile")),
        )  # fmt: skip

    def theirs(self, name: str, recipe: Path) -> _Seen:
        done = json.loads(self._python("-m", "training.engine.peers", name, str(recipe)).splitlines()[-1])
        return _Seen(done["ends"][-1] - done["ends"][0], done["losses"], done["peak_bytes"], 0.0)

    def loads(self) -> None:
        """Open the base and do nothing with it."""
        folder = bases.find(_BASE).folder
        code = "import sys, torch; from training.objectives import base; from pathlib import Path; "
        self._python("-c", code + "base.opened(Path(sys.argv[1]), torch.float32, 'sdpa')", str(folder))

    def _command(self, *words: str) -> str:
        return self._python("-m", "training", *words)

    def _python(self, *words: str) -> str:
        return subprocess.run(
            [sys.executable, *words], check=True, capture_output=True, text=True, env=self._environment,
            cwd=paths.REPOSITORY,
        ).stdout  # fmt: skip

    def _write(self, name: str, records: Iterator[dict]) -> None:
        with open(self._folder / name, "w") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)

    def _recipe(self, name: str, text: str) -> Path:
        files.write_text(self._folder / name, text.format(recipes=paths.REPOSITORY / "recipes"))
        return self._folder / name


def _sources() -> Iterator[tuple[Path, str]]:
    size = 0
    for path in StandardLibrary().paths:
        text = path.read_text(errors="replace")
        size += len(text)
        if size >= _TEXT_BYTES:
            return
        if text.strip():
            yield path, text


def _questions(path: Path, text: str) -> Iterator[dict]:
    """Functions of about 400 tokens, and the first line of what each says of itself."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and (told := ast.get_docstring(node)):
            source = ast.get_source_segment(text, node).replace(told, "")
            if 1000 < len(source) < 1800:
                asked = {"role": "user", "content": f"What does this function do?\n\n{source}"}
                answered = {"role": "assistant", "content": told.strip().splitlines()[0]}
                yield {"messages": [asked, answered], "group": path.name}
