"""The most memory that a run may take, held to by the allocator of a GPU, or by the kernel for the process on a CPU.

What asks for more gets an out-of-memory error at that point, and the machine's other work keeps its memory.
Source: setrlimit(2), RLIMIT_DATA, which counts private memory since Linux 4.7; proc(5), VmData and VmRSS.
"""

import resource

import torch

from training.core import process
from training.core.errors import RunError
from training.core.units import format_bytes, parse_bytes
from training.engine.device import Device

TIMES_ESTIMATE = 2.0


def of_device(cap: str | None, device: Device, estimate_bytes: int | None) -> None:
    """Cap what PyTorch takes of a GPU, before it has taken anything."""
    if device.torch_device.type != "cuda":
        return
    total = torch.cuda.get_device_properties(device.torch_device).total_memory
    wanted = parse_bytes(cap) if cap else int(TIMES_ESTIMATE * estimate_bytes) if estimate_bytes else total
    torch.cuda.set_per_process_memory_fraction(min(total, wanted) / total, device.torch_device)


def of_process(cap: str | None, device: Device) -> None:
    """Cap this process's memory on a CPU, its model loaded. Raises RunError where the process has more already."""
    if cap is None or device.torch_device.type != "cpu":
        return
    held, mapped = process.status_bytes("VmRSS"), process.status_bytes("VmData")
    left = parse_bytes(cap) - held
    if left <= 0:
        raise RunError(
            "out of memory: the model alone takes more than the run may", where="memory.cap",
            found=f"{format_bytes(held)} before the first step", expected=f"at most {cap}, memory.cap",
        )  # fmt: skip
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = mapped + left if hard == resource.RLIM_INFINITY else min(hard, mapped + left)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
