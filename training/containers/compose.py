"""Compose for this checkout: its project, the variables that compose.yaml takes, and the command line.

The project's name holds a hash of the checkout's place, so that two checkouts side by side never touch each other's
containers; Compose's own COMPOSE_PROJECT_NAME replaces it. What is not named here keeps compose.yaml's default, the
environment's or `.env`'s value: Compose reads them itself, a variable of the environment first.
"""

import json
import os
from collections.abc import Mapping

from training.containers import engine, image
from training.core import paths

FILE = paths.REPOSITORY / "compose.yaml"
_GPU_FILE = paths.REPOSITORY / "docker" / "compose.gpu.yaml"
_IMAGES = {"train": "train", "export": "export", "llama-gpu": "llama-cuda", "llama-cpu": "llama-cpu"}
_MEMORY_SHARE = 0.9  # a training that wants more is ended by the engine, before the desktop is
SERVICES = tuple(_IMAGES)
SERVERS = {"llama-gpu": "LLAMA_GPU", "llama-cpu": "LLAMA_CPU"}
"""The services that serve, and the prefix of their variables: `LLAMA_CPU_MODEL`, `_PORT`, `_CTX_SIZE`, ..."""
LABEL_PROJECT, LABEL_SERVICE = "com.docker.compose.project", "com.docker.compose.service"


def project() -> str:
    """The name of this checkout's Compose project."""
    return paths.setting("COMPOSE_PROJECT_NAME", f"trainyard-{image.checkout()}")


def image_of(service: str) -> str:
    """The image that a service runs."""
    return _IMAGES[service]


def environment(**variables: object) -> dict[str, str]:
    """The variables that compose.yaml takes for this checkout and user, and more by name: `LLAMA_CPU_MODEL=...`."""
    from training.calculator import devices

    roots, memory = paths.roots(), devices.this_machine()
    own = {
        "TRAINYARD_UID": os.getuid(), "TRAINYARD_GID": os.getgid(), "TRAINYARD_TAG": image.tag(),
        "TRAINYARD_CHECKOUT": paths.REPOSITORY, "DATA_ROOT": roots.data,
        "TRAINYARD_MEMORY": int(memory.total_bytes * _MEMORY_SHARE), "TRAINYARD_CACHE": roots.cache,
    }  # fmt: skip
    return {name: str(value) for name, value in (own | variables).items()}


def arguments(*words: str, gpu: bool = False) -> list[str]:
    """The words after `docker` of a Compose command on this checkout's project."""
    more = ["--file", str(_GPU_FILE)] if gpu else []
    return ["compose", "--project-name", project(), "--file", str(FILE), *more, *words]


def run(*words: str, what: str, variables: Mapping[str, object] | None = None, seconds: float | None = None) -> str:
    """Run Compose and return its stdout. Raises RunError with its last lines."""
    return engine.run(arguments(*words), what, environment=environment(**(variables or {})), seconds=seconds)


def config(*profiles: str, **variables: object) -> dict:
    """compose.yaml as Compose resolves it, with its profiles (default: all)."""
    chosen = [word for name in profiles or SERVICES for word in ("--profile", name)]
    text = run(*chosen, "config", "--format", "json", what="reading compose.yaml", variables=variables)
    return json.loads(text)
