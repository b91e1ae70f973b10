"""The cap on a run's memory: refused before where the estimate is above it, and told at the point on the way."""

import subprocess
import sys
import types
from pathlib import Path

import pytest

from training.core import paths
from training.engine import memory_cap
from training.engine.launch import start
from training.recipe.load import load

GREEDY = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from training.core.errors import RunError, translated
from training.engine import device, memory_cap
cpu = device.Device(torch.device("cpu"), torch.float32, "")
try:
    memory_cap.of_process(sys.argv[2], cpu)
    kept = [torch.ones(64 << 20) for _ in range(int(sys.argv[3]))]
    print("held")
except Exception as error:
    known = error if isinstance(error, RunError) else translated(error)
    print(known.exit_code, known.what)
"""


@pytest.mark.parametrize(("cap", "num_tensors", "told"), [
    ("4GiB", 2, "held"), ("1GiB", 8, "4 out of memory"), ("10MiB", 0, "4 out of memory: the model alone takes"),
])  # fmt: skip
def test_a_process_gets_no_more_than_its_cap(cap: str, num_tensors: int, told: str):
    """Tensors of 256 MiB each; the machine has room for all of them."""
    command = [sys.executable, "-c", GREEDY, str(paths.REPOSITORY), cap, str(num_tensors)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(told)


@pytest.mark.parametrize(
    ("cap", "estimate", "share"),
    [(None, 2 << 30, 0.4), (None, 9 << 30, 1.0), ("1GiB", 2 << 30, 0.1), (None, None, 1.0)],
)
def test_a_gpu_is_capped_at_twice_the_estimate_or_at_what_the_recipe_says(cap, estimate, share, monkeypatch):
    """D10, on a card of 10 GiB."""
    seen = []
    card = types.SimpleNamespace(total_memory=10 << 30)
    monkeypatch.setattr(memory_cap.torch.cuda, "get_device_properties", lambda _: card)
    monkeypatch.setattr(memory_cap.torch.cuda, "set_per_process_memory_fraction", lambda part, _: seen.append(part))
    device = types.SimpleNamespace(torch_device=types.SimpleNamespace(type="cuda"))
    memory_cap.of_device(cap, device, estimate)
    assert seen == [pytest.approx(share)] and memory_cap.of_process(cap, device) is None


def test_an_estimate_above_the_cap_is_refused_before_anything_is_made(recipe: Path):
    from training.core.errors import RunError
    from training.runs.folder import all_runs

    with pytest.raises(RunError, match="does not fit its own cap"):
        start(load(recipe, ["memory.cap=100MiB"]))
    assert all_runs() == []
