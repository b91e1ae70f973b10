"""`environment.json`: the machine and the libraries a run had. It is never a reason for a run to fail.

It is written before anything heavy is imported, so that it is there when an import fails; the engine adds what only it
knows. What may hold a secret, by its name, is left out.
"""

import logging
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path

from training.core import files, paths, version

FILE = "environment.json"
_SECRET = ("TOKEN", "KEY", "SECRET", "PASSWORD", "CREDENTIAL")
_SETTINGS = (
    "OMP_", "MKL_", "GOMP_", "KMP_", "OPENBLAS_", "CUDA_", "CUBLAS_", "NVIDIA_", "NCCL_", "PYTORCH_", "TORCH_", "HF_",
    "TRANSFORMERS_", "TOKENIZERS_", "BNB_", "LD_", "PYTHON", "TRAINYARD_", "DATA_ROOT", "RUNTIME",
)  # fmt: skip
_logger = logging.getLogger(__name__)


def record() -> dict:
    """Versions, platform, processor, memory, GPUs and the environment's settings that change training."""
    return {"schema": 1} | {name: _told(part) for name, part in _PARTS.items()}


def write(folder: Path) -> None:
    """Write the record into a run's folder."""
    _keep(folder, record)


def add(folder: Path, device: str, threads: int) -> None:
    """Add what the engine alone knows: its device and why, its threads, and PyTorch."""
    told = {"device": device, "threads": threads, "torch": _told(_torch)}
    _keep(folder, lambda: files.read_json(folder / FILE) | told)


def _keep(folder: Path, content: Callable[[], dict]) -> None:
    try:
        files.write_json(folder / FILE, content())
    except Exception as error:
        _logger.warning("the record of the environment was not kept: %s", error)


def _torch() -> dict:
    """What PyTorch was built for, and found."""
    import torch

    cuda = torch.version.cuda
    return {
        "cuda": cuda, "cudnn": torch.backends.cudnn.version() if cuda else None,
        "cpu_kernels": torch.backends.cpu.get_cpu_capability(), "interop_threads": torch.get_num_interop_threads(),
    }  # fmt: skip


def _told(part: Callable[[], object]) -> object:
    """A part of the record; where it cannot be had, why."""
    try:
        return part()
    except Exception as error:
        return f"not known: {error!r}"


def _settings() -> dict:
    return {
        name: paths.for_people(value)
        for name, value in sorted(os.environ.items())
        if name.startswith(_SETTINGS) and not any(word in name.upper() for word in _SECRET)
    }


def _processor() -> str:
    from training.calculator.devices import processor

    return processor()


def _memory() -> dict:
    from training.calculator.devices import this_machine

    machine = this_machine()
    return {"of": machine.name, "total_bytes": machine.total_bytes, "used_bytes": machine.used_bytes}


def _gpus() -> dict:
    from training.calculator import nvml

    answer = nvml.ask()
    cards = [{"name": gpu.name, "total_bytes": gpu.total_bytes, "used_bytes": gpu.used_bytes} for gpu in answer.gpus]
    return {"driver": answer.driver, "cards": cards, "problem": answer.problem}


def _disk() -> dict:
    return {"free_bytes": files.free_bytes(paths.roots().data)}


_PARTS: dict[str, Callable[[], object]] = {
    "tool": version.tool,
    "python": platform.python_version,
    "platform": lambda: " ".join((platform.system(), platform.release(), platform.machine(), *platform.libc_ver())),
    "processor": _processor,
    "cores": lambda: len(os.sched_getaffinity(0)),
    "memory": _memory,
    "gpus": _gpus,
    "disk": _disk,
    "container": lambda: Path("/.dockerenv").exists(),
    "command": lambda: paths.for_people(" ".join(sys.orig_argv[1:])),
    "packages": version.packages,
    "settings": _settings,
}
