"""How quick the calculator is: a command, in a process of its own, a replay by depth, and solving for the batch."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

from training.calculator import fit
from training.calculator.plan import Plan
from training.calculator.replay import replay
from training.core import paths
from training.core.timing import Ratio, best
from training.recipe.load import load

_GPU = "RTX 4090"
_DEEP, _SHALLOW = 32, 4


def run() -> tuple[Ratio, ...]:
    """Time the demo's estimate as a command, its replay by depth, and its solving."""
    path = paths.REPOSITORY / "recipes" / "demo" / "pretrain-stdlib.yaml"
    command = [sys.executable, "-m", "training", "memfit", "--config", str(path), "--gpu", _GPU]
    resolved = load(path, [])
    plan = Plan.of(resolved.recipe)
    deep, shallow = (replace(plan, shape=replace(plan.shape, num_layers=layers)) for layers in (_DEEP, _SHALLOW))
    deeper, shallower = best(lambda: replay(deep)), best(lambda: replay(shallow))
    one = best(lambda: fit.fit(resolved, gpu=_GPU, with_levers=False))
    solved = best(lambda: fit.fit(resolved, gpu=_GPU, with_levers=False, solve="batch"))
    return (
        Ratio("memfit over an empty interpreter", _process(command), _process([sys.executable, "-c", "pass"])),
        Ratio(f"a replay of {_DEEP} layers over {_SHALLOW}", deeper, shallower),
        Ratio("solving for the batch over one estimate", solved, one),
    )


def _process(command: list[str]) -> float:
    return best(lambda: subprocess.run(command, capture_output=True, check=False))
