"""One row of the campaign, in a process of its own: a recipe's step measured on the device beside its estimate.

`python -m tests.gpu.campaign_row ROW OUT [--cpu-rehearsal]` writes the row's figures into OUT. The rehearsal runs the
same lines on the CPU with a small model; the device's counters stand still in it, so that its figures mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from tests.calculator.counts import Counts
from tests.gpu.rows import ROWS, Row
from training.calculator import calibrate_gpu, calibration, formula, nvml
from training.calculator.allocator import CachingAllocator
from training.calculator.calibration import Calibration, Comparison
from training.calculator.gpu_meter import GpuMeter
from training.core import files
from training.recipe.load import load
from training.recipe.model import Recipe

_MOST_EVENTS = 2_000_000


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("row", choices=[row.name for row in ROWS])
    parser.add_argument("out", type=Path)
    parser.add_argument("--cpu-rehearsal", action="store_true")
    args = parser.parse_args()
    row = next(one for one in ROWS if one.name == args.row)
    files.write_json(args.out, run(row, Rehearsal() if args.cpu_rehearsal else Card()))


class Card:
    """The first GPU that this process may use, and what it used before this process touched it."""

    is_rehearsal = False

    def __init__(self):
        import pynvml

        answer = nvml.ask()
        if not answer.gpus:
            raise SystemExit(answer.problem)
        self.gpu, self.driver = answer.gpus[0], answer.driver
        pynvml.nvmlInit()
        self.used_bytes: Callable[[], int] = functools.partial(nvml.used_bytes, self.gpu.uuid)
        import torch

        self.cuda, self.device = torch.cuda, torch.device("cuda")
        self.weights = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"

    @contextlib.contextmanager
    def requests(self) -> Iterable[list[dict]]:
        """Record every request to the allocator (torch.cuda.memory, "Understanding CUDA Memory Usage")."""
        events: list[dict] = []
        self.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=_MOST_EVENTS)
        try:
            yield events
            events += self.cuda.memory._snapshot()["device_traces"][0]
        finally:
            self.cuda.memory._record_memory_history(enabled=None)


class Rehearsal:
    """The same on the CPU: a small model, and counters that stand still."""

    is_rehearsal = True
    driver, weights = "none", "bf16"

    def __init__(self):
        import torch

        self.gpu = nvml.Gpu("rehearsal", "none", None, 8 << 30, 0, ())
        self.cuda, self.device = Counts(), torch.device("cpu")
        self.cuda.use(1 << 20, 2 << 20)
        self.used_bytes = lambda: 3 << 20

    @contextlib.contextmanager
    def requests(self) -> Iterable[list[dict]]:
        yield [{"action": "alloc", "addr": 1, "size": 1 << 20}, {"action": "free_completed", "addr": 1}]


def run(row: Row, card: Card | Rehearsal) -> dict:
    """Measure a row; the estimate is made with the context and the workspaces that were measured in it."""
    with tempfile.TemporaryDirectory() as folder:
        recipe = load(row.write(Path(folder), card.weights, is_small=card.is_rehearsal)).recipe
        with card.requests() as events:
            new_meter = functools.partial(GpuMeter, card.cuda, card.used_bytes, card.gpu.used_bytes)
            found = calibrate_gpu.measure(recipe, functools.partial(_probe, row), card.device, new_meter)
        known = Calibration(
            card.gpu.name, calibration.torch_version(), card.driver, found["context_bytes"], found["workspace_bytes"]
        )
        estimate = formula.estimate(recipe, on_cpu=False, gpu=card.gpu.name, calibration=known).peak
    peak = found["peak"]
    comparisons = [
        Comparison(name, peak[key], getattr(estimate, key), under, over)
        for name, key, under, over in (
            ("allocated", "allocated_bytes", 0.10, 0.10), ("reserved", "reserved_bytes", 1, None),
            ("device", "device_bytes", 0, None),
        )
    ]  # fmt: skip
    return {
        "gpu": card.gpu.name, "driver": card.driver, "torch": known.torch, "weights": card.weights, **found,
        "estimate": dataclasses.asdict(estimate), "replayed": replay(events),
        "comparisons": [one.to_json() for one in comparisons],
    }  # fmt: skip


def _probe(row: Row, recipe: Recipe, device: object, dtype: object) -> object:
    from tests.gpu.plain_step import PlainStep
    from training.engine.probe import TrainerProbe

    if recipe.memory.profile == "trainyard":
        return TrainerProbe(recipe, device, dtype)
    return PlainStep(recipe, device, dtype, is_padded=row.is_padded)


def replay(events: Iterable[dict]) -> dict[str, int]:
    """Send recorded requests through the simulated allocator: what it would have allocated and reserved at most."""
    allocator, blocks = CachingAllocator(), {}
    num_requests = 0
    for event in events:
        if event["action"] == "alloc":
            blocks[event["addr"]] = allocator.new(event["size"])
            num_requests += 1
        elif event["action"] == "free_completed" and event["addr"] in blocks:
            allocator.free(blocks.pop(event["addr"]))
    return {
        "allocated_bytes": allocator.peak_allocated_bytes, "reserved_bytes": allocator.peak_reserved_bytes,
        "num_requests": num_requests,
    }  # fmt: skip


if __name__ == "__main__":
    main()
