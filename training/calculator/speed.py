"""How quick the calculator is, as ratios of times taken in one run: a ratio says the same on a slow machine and a fast.

Each time is the best of a few, in this process or in one of its own; a machine that is busy shows larger ones.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from training.calculator import fit
from training.calculator.plan import Plan
from training.calculator.replay import replay
from training.recipe.load import load

_TIMES = 5
_GPU = "RTX 4090"
_DEEP, _SHALLOW = 32, 4


@dataclass(frozen=True)
class Ratio:
    """Two times and what they are of."""

    name: str
    seconds: float
    base_seconds: float

    @property
    def value(self) -> float:
        return self.seconds / self.base_seconds

    def to_json(self) -> dict:
        return {"name": self.name, "seconds": self.seconds, "base_seconds": self.base_seconds, "ratio": self.value}


def run(path: Path) -> tuple[Ratio, ...]:
    """Time a recipe's estimate as a command, its replay by depth, and its solving."""
    command = [sys.executable, "-m", "training", "memfit", "--config", str(path), "--gpu", _GPU]
    resolved = load(path, [])
    plan = Plan.of(resolved.recipe)
    deep, shallow = (replace(plan, shape=replace(plan.shape, num_layers=layers)) for layers in (_DEEP, _SHALLOW))
    deeper, shallower = _best(lambda: replay(deep)), _best(lambda: replay(shallow))
    one = _best(lambda: fit.fit(resolved, gpu=_GPU, with_levers=False))
    solved = _best(lambda: fit.fit(resolved, gpu=_GPU, with_levers=False, solve="batch"))
    return (
        Ratio("memfit over an empty interpreter", _process(command), _process([sys.executable, "-c", "pass"])),
        Ratio(f"a replay of {_DEEP} layers over {_SHALLOW}", deeper, shallower),
        Ratio("solving for the batch over one estimate", solved, one),
    )


def _best(work: Callable[[], object]) -> float:
    """Seconds of the quickest of a few calls."""

    def once() -> float:
        started = time.perf_counter()
        work()
        return time.perf_counter() - started

    return min(once() for _ in range(_TIMES))


def _process(command: list[str]) -> float:
    return _best(lambda: subprocess.run(command, capture_output=True, check=False))
