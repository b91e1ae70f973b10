"""`environment.json`: the machine and the libraries a run had. It is never a reason for a run to fail."""

import os
import platform
from pathlib import Path

from training.core import files, paths, version

_SECRET = ("TOKEN", "KEY", "SECRET", "PASSWORD", "CREDENTIAL")
_SETTINGS = ("OMP_", "MKL_", "CUDA_", "PYTORCH_", "TORCH_", "HF_", "OPENBLAS_", "NVIDIA_", "TRAINYARD_", "DATA_ROOT")


def record() -> dict:
    """Versions, platform, cores and the environment's settings that change training; secrets' names are left out."""
    settings = {
        name: paths.for_people(value)
        for name, value in sorted(os.environ.items())
        if name.startswith(_SETTINGS) and not any(word in name.upper() for word in _SECRET)
    }
    return {
        "schema": 1,
        "tool": version.tool(),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)),
        "packages": version.packages(),
        "settings": settings,
    }


def write(folder: Path, extra: dict) -> None:
    """Write the record into a run's folder, with what is known only later (device, threads)."""
    files.write_json(folder / "environment.json", record() | extra)
