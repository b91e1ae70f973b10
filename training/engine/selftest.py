"""One forward and backward pass of a small model, the same on every device: a GPU is held against the processor.

It is the trainer's own step (`probe`), its weights, adapter and tokens drawn from fixed seeds on the CPU, in float32,
so that two devices that compute alike give one loss and one gradient. A GPU that passes computes; its speed and its
whole memory are not tried.
"""

import dataclasses
import math
import time
from pathlib import Path

import numpy as np
import torch

from training.core.errors import MachineError, RunError
from training.engine.device import Device
from training.engine.probe import TrainerProbe
from training.recipe.load import Resolved, load

RECIPE = Path(__file__).with_name("selftest.yaml")
METHODS = {"lora": (), "qlora": ("method=qlora", "memory.weights=nf4")}
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-4, 1e-2
"""Relative. Float32 on two devices differs by rounding alone, some 1e-6; TF32 by 1e-3 in the gradient."""


@dataclasses.dataclass(frozen=True)
class Pass:
    """What a forward and a backward pass gave.

    Args:
        gradient: of the trained weights, float32 on the CPU, flat.
    """

    loss_nats: float
    gradient: torch.Tensor
    seconds: float

    def to_json(self) -> dict:
        norm = self.gradient.norm().item()
        return {"loss_nats": self.loss_nats, "grad_norm": norm, "seconds": round(self.seconds, 2)}


def recipe_of(method: str, model: str | None = None) -> Resolved:
    """The recipe of a method's pass, over the shape of another model where one is named (a base, or a config.json)."""
    named: tuple[str, ...] = ()
    if model is not None:
        named = (f"model.config={model}",) if model.endswith(".json") else (f"model.base={model}", "model.config=null")
    return load(RECIPE, [*METHODS[method], *named])


def run(method: str, device: torch.device, model: str | None = None) -> Pass:
    """Run a method's pass on a device.

    Raises MachineError where a part is missing, RunError where it computes wrongly.
    """
    started = time.monotonic()
    recipe = recipe_of(method, model).recipe
    torch.manual_seed(recipe.seeds.train)
    probe = TrainerProbe(recipe, device, torch.float32)
    batch = probe.rows.batch(np.arange(recipe.data.micro_batch))
    loss = probe.rows.loss(probe.model, batch.to(device)) / batch.num_tokens
    loss.backward()
    _require_packed(method, probe.model)
    found = Pass(loss.item(), _gradient(probe.model), time.monotonic() - started)
    _require_sound(method, found)
    return found


def _gradient(model: torch.nn.Module) -> torch.Tensor:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if any(parameter.grad is None for parameter in trained):
        raise RunError("a trained weight got no gradient", expected="one for each part of the adapter")
    return torch.cat([parameter.grad.detach().float().cpu().flatten() for parameter in trained])


def _require_packed(method: str, model: torch.nn.Module) -> None:
    """Raise RunError where QLoRA's base is not in 4 bits, or a frozen weight got a gradient."""
    if method == "qlora" and not any(one.dtype == torch.uint8 for one in model.parameters()):
        raise RunError("the base of qlora is not in 4 bits", expected="bitsandbytes' packed weights")
    if any(one.grad is not None for one in model.parameters() if not one.requires_grad):
        raise RunError("a frozen weight got a gradient", expected="gradients of the adapter alone")


def _require_sound(method: str, found: Pass) -> None:
    norm = found.gradient.norm().item()
    if not (math.isfinite(found.loss_nats) and math.isfinite(norm) and found.loss_nats > 0 and norm > 0):
        raise RunError(
            f"a step of {method} does not compute", found=f"loss {found.loss_nats}, norm of the gradient {norm}",
            expected="finite numbers above 0", next_command="make doctor",
        )  # fmt: skip


def compare(method: str, one: Pass, other: Pass) -> dict:
    """How far a device's pass is from the processor's. Raises MachineError where it is too far."""
    loss = abs(one.loss_nats / other.loss_nats - 1)
    gradient = ((one.gradient - other.gradient).norm() / other.gradient.norm()).item()
    if not (loss <= LOSS_TOLERANCE and gradient <= GRADIENT_TOLERANCE):  # NaN is too far
        raise MachineError(
            f"the GPU does not compute what the processor does ({method})",
            found=f"loss {one.loss_nats:.6f} against {other.loss_nats:.6f}, gradient off by {gradient:.2%}",
            expected=f"within {LOSS_TOLERANCE:.2%} and {GRADIENT_TOLERANCE:.2%}",
            next_command="nvidia-smi",
        )  # fmt: skip
    return {"loss_difference": loss, "gradient_difference": gradient}


def require(device: Device) -> dict:
    """Hold a device against the processor before a run; returns the differences. Raises MachineError."""
    return compare("lora", run("lora", device.torch_device), run("lora", torch.device("cpu")))
