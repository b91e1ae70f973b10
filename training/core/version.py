"""Versions, as manifests and reports record them: the tool's with its commit, and the packages' that it stands on."""

import importlib.metadata
import os
import subprocess
from functools import cache

from training import __version__
from training.core.paths import REPOSITORY


@cache
def tool() -> dict:
    """`{"version", "commit"}`; with `+` behind the commit where files differ.

    An image carries its commit in TRAINYARD_COMMIT; outside that and a git checkout it is None.
    """
    if os.environ.get("TRAINYARD_COMMIT"):
        return {"version": __version__, "commit": os.environ["TRAINYARD_COMMIT"]}
    try:
        run = ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"]
        commit = subprocess.run(run, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        commit = None
    return {"version": __version__, "commit": commit}


PACKAGES = (
    "torch", "transformers", "peft", "bitsandbytes", "tokenizers", "safetensors", "gguf", "xllamacpp", "numpy",
    "accelerate", "triton", "nvidia-ml-py", "docker",
)  # fmt: skip
_CUDA_ALONE = ("triton",)
"""Those that a CPU build of PyTorch comes without."""


def packages() -> dict[str, str | None]:
    """The installed version of each package, None where it is missing. Imports none of them."""
    return {name: _version_of(name) for name in PACKAGES}


def missing(found: dict[str, str | None], *, on_gpu: bool) -> list[str]:
    """Which of the packages are missing where training runs on a GPU, or on a CPU."""
    return sorted(name for name, its in found.items() if its is None and (on_gpu or name not in _CUDA_ALONE))


def _version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
