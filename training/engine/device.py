"""Which device and number type a run gets, and why; nothing is swapped in silence.

A CPU trains in float32. On a GPU the weights have the type that the recipe names; what an NF4 base does not pack, and
its products, are in bfloat16, on older GPUs in float16.
"""

import dataclasses
import os
import platform

import torch

from training.core.errors import MachineError
from training.core.report import again

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclasses.dataclass(frozen=True)
class Device:
    """A torch device with the reasons that environment.json records."""

    torch_device: torch.device
    dtype: torch.dtype
    reason: str
    name: str = "cpu"  # the GPU's, as its driver tells it

    def peak_bytes(self) -> int | None:
        """The allocator's peak on a GPU; None on a CPU, where the process's own peak counts."""
        if self.torch_device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.torch_device)
        return None


def resolve(weights: str) -> Device:
    """Choose the device for weights of this type. Raises MachineError where there is none."""
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name(0)
        reason = f"CUDA found: {name}; weights {weights} by the recipe"
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        if weights == "bf16" and not has_bf16:
            raise MachineError(
                "this GPU has no bfloat16", where="memory.weights", found=f"bf16 on {name}",
                expected="fp16 for a frozen base under adapters, else fp32",
                next_command=again("memory.weights=fp32"),
            )  # fmt: skip
        if weights == "nf4":
            reason += f", its products in {'bfloat16' if has_bf16 else 'float16, since the GPU has no bfloat16'}"
        half = torch.bfloat16 if has_bf16 else torch.float16
        return Device(torch.device("cuda"), _DTYPES.get(weights, half), reason, name)
    if weights not in ("fp32", "nf4"):
        raise MachineError(
            "no GPU was found, and a CPU trains in fp32 alone",
            where="memory.weights",
            found=weights,
            expected="fp32 (nf4 for method qlora), or a GPU with its driver",
            next_command=again("memory.weights=fp32"),
        )
    return Device(torch.device("cpu"), torch.float32, f"no CUDA device; {platform.processor() or 'CPU'} in float32")


def for_teacher() -> Device:
    """Choose where a model that is only asked computes: in 16 bits on a GPU, else in float32."""
    return resolve("nf4")


def use_expandable_segments() -> None:
    """Let CUDA's allocator grow its segments; it reads this before its first allocation."""
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def use_cores(num_processes: int = 1) -> int:
    """Give torch its part of the cores that so many processes may use, unless OMP_NUM_THREADS says otherwise; return
    the number of its threads."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // num_processes))
    return torch.get_num_threads()
