"""The NVIDIA GPUs of this machine, as the driver's own library (NVML) tells of them. It touches no CUDA.

Owns which of them a process may use and who uses them. An absent or failing driver is an answer, not an error.
Source: NVML API reference; CUDA C++ Programming Guide, "CUDA Environment Variables" (CUDA_VISIBLE_DEVICES).
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass

_MIB = 1 << 20


@dataclass(frozen=True)
class Gpu:
    """A card that this process may use. `place` is its number where the machine has several."""

    name: str
    uuid: str
    place: str | None
    total_bytes: int
    used_bytes: int
    users: tuple[str, ...]


@dataclass(frozen=True)
class Answer:
    """What NVML says: the cards by their place on the bus (CUDA puts the fastest first, unless CUDA_DEVICE_ORDER says
    PCI_BUS_ID), or the problem why there are none."""

    gpus: tuple[Gpu, ...]
    driver: str | None
    problem: str | None


def ask() -> Answer:
    """Ask NVML once."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return Answer((), None, f"no NVIDIA driver answers ({error})")
    try:
        driver = _text(pynvml.nvmlSystemGetDriverVersion())
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        uuids = [_text(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles]
        chosen = _visible(uuids, os.environ.get("CUDA_VISIBLE_DEVICES"))
        gpus = tuple(_gpu(pynvml, handles[index], uuids[index], _place(index, len(handles))) for index in chosen)
    except pynvml.NVMLError as error:
        return Answer((), None, f"the NVIDIA driver answers with an error ({error})")
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()
    return Answer(gpus, driver, None if gpus else _why_none(len(handles)))


def used_bytes(uuid: str) -> int:
    """What is in use of a card now, by all processes. NVML must have been initialised. Raises NVMLError."""
    import pynvml

    return pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByUUID(uuid)).used


def _visible(uuids: list[str], setting: str | None) -> list[int]:
    """The cards that CUDA_VISIBLE_DEVICES leaves: numbers or beginnings of UUIDs, up to the first that names none."""
    if setting is None:
        return list(range(len(uuids)))
    chosen: list[int] = []
    for word in setting.split(","):
        word = word.strip()
        if word.isdigit():
            matching = [int(word)] if int(word) < len(uuids) else []
        else:
            matching = [index for index, uuid in enumerate(uuids) if word.startswith("GPU-") and uuid.startswith(word)]
        if len(matching) != 1:
            break
        chosen += matching
    return chosen


def _place(index: int, count: int) -> str | None:
    return f"GPU {index} of {count}" if count > 1 else None


def _why_none(count: int) -> str:
    if count == 0:
        return "the NVIDIA driver finds no GPU"
    return f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')} leaves none of the {count} GPUs"


def _gpu(nvml: object, handle: object, uuid: str, place: str) -> Gpu:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    name = _text(nvml.nvmlDeviceGetName(handle))
    return Gpu(name, uuid, place, memory.total, memory.used, _users(nvml, handle))


def _users(nvml: object, handle: object) -> tuple[str, ...]:
    """The other processes on a card, those that compute and those that draw, the largest first."""
    found: dict[int, int] = {}
    for ask_for in ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses"):
        with contextlib.suppress(nvml.NVMLError):
            for one in getattr(nvml, ask_for)(handle):
                found[one.pid] = max(found.get(one.pid, 0), one.usedGpuMemory or 0)
    found.pop(os.getpid(), None)
    return tuple(_in_words(pid, held) for pid, held in sorted(found.items(), key=lambda pair: -pair[1]))


def _in_words(pid: int, held_bytes: int) -> str:
    """`process 42 (python3): 3072 MiB`; neither name nor size is always visible."""
    import psutil

    name = ""
    with contextlib.suppress(psutil.Error, OSError):
        name = f" ({psutil.Process(pid).name()})"
    return f"process {pid}{name}: {f'{held_bytes / _MIB:.0f} MiB' if held_bytes else 'memory not told'}"


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode()
