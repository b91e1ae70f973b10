"""The device that an estimate is held against: the GPU found, one by name or size, or this machine's own memory.

Usable is the total less what is in use before the run and a margin.
"""

from __future__ import annotations

import difflib
import platform
from dataclasses import dataclass, replace
from pathlib import Path

from training.calculator import nvml
from training.core.errors import UserError
from training.core.units import parse_bytes
from training.recipe.model import Recipe

MARGIN_BYTES = 256 << 20
_MIB = 1 << 20

GPUS = {
    "RTX 3060 12GB": 12288, "RTX 3070 8GB": 8192, "RTX 3080 10GB": 10240, "RTX 3080 12GB": 12288,
    "RTX 3090 24GB": 24576, "RTX 4060 8GB": 8188, "RTX 4060 Ti 16GB": 16380, "RTX 4070 12GB": 12282,
    "RTX 4080 16GB": 16376, "RTX 4090 24GB": 24564, "RTX 5070 Ti 16GB": 16303, "RTX 5080 16GB": 16303,
    "RTX 5090 32GB": 32607, "T4 16GB": 15360, "L4 24GB": 23034, "A10 24GB": 23028, "RTX A6000 48GB": 49140,
    "L40S 48GB": 46068, "V100 16GB": 16384, "V100 32GB": 32768, "A100 40GB": 40960, "A100 80GB": 81920,
    "H100 80GB": 81559, "H200 141GB": 143771,
}  # fmt: skip
"""MiB in all as `nvidia-smi` shows them on public machines; the card that is found is asked instead."""


@dataclass(frozen=True)
class Device:
    """Something with memory. `used_bytes` is in use before the run."""

    name: str
    kind: str  # "cuda" | "cpu"
    total_bytes: int
    used_bytes: int
    users: tuple[str, ...] = ()
    place: str | None = None  # which of the machine's GPUs it is, where it was found

    @property
    def available_bytes(self) -> int:
        return max(0, self.total_bytes - self.used_bytes)

    @property
    def usable_bytes(self) -> int:
        return max(0, self.available_bytes - MARGIN_BYTES)

    def to_json(self) -> dict:
        return {
            "name": self.name, "kind": self.kind, "total_bytes": self.total_bytes, "used_bytes": self.used_bytes,
            "margin_bytes": MARGIN_BYTES, "usable_bytes": self.usable_bytes, "users": list(self.users),
            "place": self.place,
        }  # fmt: skip


def choose(recipe: Recipe, *, gpu: str | None = None, vram: str | None = None) -> Device | None:
    """The device asked for, else the GPU found, else this machine where a CPU can train the recipe, else None."""
    if vram is not None:
        size = parse_bytes(vram, "--vram")
        if size < MARGIN_BYTES:
            raise UserError("no GPU has so little memory", where="--vram", found=vram, expected="a size such as 10GiB")
        return Device(f"a GPU of {vram}", "cuda", size, 0)
    if gpu is not None:
        return _by_name(gpu)
    found = gpus()
    if found:
        return found[0]
    return this_machine() if trains_on_cpu(recipe) else None


def trains_on_cpu(recipe: Recipe) -> bool:
    """Whether this machine would train the recipe on its CPU: in float32 or on an NF4 base, and with no GPU in it."""
    return recipe.memory.weights in ("fp32", "nf4") and not gpus()


def _by_name(name: str) -> Device:
    wanted = _plain(name)
    exact = [known for known in GPUS if wanted in (_plain(known), _plain(_without_size(known)))]
    matches = exact or [known for known in GPUS if wanted and wanted in _plain(known)]
    if len(matches) == 1:
        return Device(matches[0], "cuda", GPUS[matches[0]] * _MIB, 0)
    near = matches or difflib.get_close_matches(name, GPUS, 3, cutoff=0.3) or list(GPUS)
    raise UserError(
        f"which {name} is meant" if matches else f"unknown GPU {name}", where="--gpu", found=name,
        expected=f"{' or '.join(near)}; or a size instead, --vram 10GiB",
    )  # fmt: skip


def is_same(name: str, other: str) -> bool:
    """Whether two names mean one kind of GPU, however they are spelled, and with or without its size."""
    return bool({_plain(name), _plain(_without_size(name))} & {_plain(other), _plain(_without_size(other))})


def _without_size(name: str) -> str:
    head, _, tail = name.rpartition(" ")
    return head if tail.upper().endswith("GB") else name


def _plain(name: str) -> str:
    words = name.lower().replace("nvidia", "").replace("geforce", "").replace("tesla", "")
    return "".join(words.split()).replace("-", "")


# ---- what is here


def gpus() -> tuple[Device, ...]:
    """The NVIDIA GPUs that this process may use, with who uses them; none where there is no driver."""
    return tuple(
        Device(gpu.name, "cuda", gpu.total_bytes, gpu.used_bytes, gpu.users, gpu.place) for gpu in nvml.ask().gpus
    )


def this_machine() -> Device:
    """This machine's memory, or what its container may use where that is less."""
    import psutil

    memory = psutil.virtual_memory()
    limit, used = _container_limit()
    if limit is not None and limit < memory.total:
        return Device("this container's memory", "cpu", limit, min(limit, used))
    return Device("this machine's memory", "cpu", memory.total, memory.total - memory.available)


def share(device: Device, count: int) -> Device:
    """One of so many equal shares of a device's memory."""
    total, used = device.total_bytes // count, device.used_bytes // count
    return replace(device, name=f"a share of {device.name}, for one of {count}", total_bytes=total, used_bytes=used)


def processor() -> str:
    """The name of this machine's CPU, as far as the kernel tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Model")))
    return next(names, None) or platform.processor() or platform.machine()


def _container_limit(root: Path = Path("/sys/fs/cgroup")) -> tuple[int | None, int]:
    """Limit and use of this process's control group (version 2, then 1); None where there is no limit."""
    for limit_name, used_name in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            limit, used = (root / limit_name).read_text().strip(), (root / used_name).read_text().strip()
        except OSError:
            continue
        return (int(limit), int(used)) if limit.isdigit() else (None, 0)
    return None, 0
