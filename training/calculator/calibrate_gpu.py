"""A recipe's step on the GPU, measured and held against its estimate; what it leaves is the GPU's record."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING

from training.calculator import calibration, formula, nvml
from training.calculator.calibration import Calibration, Comparison
from training.calculator.gpu_meter import GpuMeter, warm_up
from training.calculator.nvml import Gpu
from training.calculator.probe import MakeProbe, dtype_of
from training.core import version
from training.core.errors import MachineError, RunError
from training.core.report import again
from training.recipe.load import Resolved
from training.recipe.model import Recipe

if TYPE_CHECKING:
    import torch

_STEPS = 3
_ALLOWED = 0.10
"""How far the tensors' estimate may be off, either way. The device's may not be under at all."""


def calibrate(resolved: Resolved, make_probe: MakeProbe, gpu: Gpu, driver: str) -> tuple[dict, list[Comparison]]:
    """Run three steps and an evaluation of a recipe on a GPU that is idle.

    Returns the record and two comparisons: the tensors', and the device's. `gpu.used_bytes` must have been read before
    this process touched CUDA.
    """
    import pynvml
    import torch

    _require_cuda(torch.cuda, gpu)
    device = torch.device("cuda")
    pynvml.nvmlInit()
    try:
        measured = measure(
            resolved.recipe, make_probe, device,
            lambda: GpuMeter(torch.cuda, lambda: nvml.used_bytes(gpu.uuid), gpu.used_bytes),
        )  # fmt: skip
    except torch.OutOfMemoryError as error:
        raise RunError(
            "the step ran out of the GPU's memory", found=str(error).splitlines()[0],
            expected="the estimate to hold, on an idle GPU",
            next_command=again(f"data.micro_batch={max(1, resolved.recipe.data.micro_batch // 2)}"),
        ) from error  # fmt: skip
    finally:
        pynvml.nvmlShutdown()
    record = {
        "schema": 1, "kind": calibration.KIND, "gpu": {"name": gpu.name, "total_bytes": gpu.total_bytes},
        "driver": driver, "torch": calibration.torch_version(), "cuda": torch.version.cuda,
        "recipe": {"name": resolved.recipe.name, "sha256": resolved.sha256},
        "idle_bytes": gpu.used_bytes, "other_users": list(gpu.users), **measured,
    }  # fmt: skip
    known = Calibration(gpu.name, record["torch"], driver, record["context_bytes"], record["workspace_bytes"])
    estimate = formula.estimate(resolved.recipe, on_cpu=False, gpu=gpu.name, calibration=known).peak
    comparisons = [
        Comparison("tensors", measured["peak"]["allocated_bytes"], estimate.allocated_bytes, _ALLOWED, _ALLOWED),
        Comparison("device", measured["peak"]["device_bytes"], estimate.device_bytes, 0, None),
    ]
    return record | {
        "estimate": asdict(estimate), "comparisons": [one.to_json() for one in comparisons], "tool": version.tool(),
    }, comparisons  # fmt: skip


def _require_cuda(cuda: object, gpu: Gpu) -> None:
    """Raise MachineError where torch cannot use the GPU that NVML tells of, or takes another one first."""
    if not cuda.is_available():
        raise MachineError(
            "there is a GPU, and the installed torch cannot use it", found=f"{gpu.name}, torch without CUDA",
            expected="a torch with CUDA", next_command="make setup LOCK=cuda",
        )  # fmt: skip
    name = cuda.get_device_name(0)
    if name != gpu.name:
        raise MachineError(
            "CUDA and NVML number the GPUs differently", where="CUDA_VISIBLE_DEVICES", found=f"{name} and {gpu.name}",
            expected="one order", next_command=f"export CUDA_DEVICE_ORDER=PCI_BUS_ID && {again()}",
        )  # fmt: skip


def measure(recipe: Recipe, make_probe: MakeProbe, device: torch.device, new_meter: Callable[[], GpuMeter]) -> dict:
    """The figures of a record: context and workspaces, the peaks of the first step, of later ones and an evaluation."""
    dtype = dtype_of(recipe.memory.weights)
    meter, first, later = (new_meter() for _ in range(3))
    workspaces = warm_up(meter, device, dtype)
    meter.forget()
    with meter.phase("load"):
        probe = make_probe(recipe, device, dtype)
    probe.step(first.phase)
    for _ in range(_STEPS - 1):
        probe.step(later.phase)
    probe.evaluate(later.phase)
    meters = {"stages": meter, "first_step": first, "later_steps": later}
    contexts = {name: one.contexts for name, one in meters.items()}
    peak = meter.peak.highest(first.peak).highest(later.peak)
    of_a_thread = max(workspaces["autograd"], workspaces["cublas"] + workspaces["cublaslt"])
    return {
        "context_bytes": max(0, *(size for sizes in contexts.values() for size in sizes.values())),
        "workspace_bytes": max(0, of_a_thread), "contexts": contexts, "workspaces": workspaces,
        **{name: {phase: asdict(one) for phase, one in of.readings.items()} for name, of in meters.items()},
        "peak": asdict(peak),
    }  # fmt: skip
