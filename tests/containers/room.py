"""A Compose project of a test's own, with a tiny model to serve."""

import contextlib
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from training.containers import compose, engine
from training.llamacpp import tiny
from training.llamacpp.client import Client
from training.llamacpp.server import free_port


@dataclass(frozen=True)
class Project:
    """One service of compose.yaml under a project's name, with variables of its own."""

    name: str
    data: Path
    variables: dict[str, object]

    @classmethod
    def make(cls, data: Path, **variables: object) -> "Project":
        tiny.write(data / "models" / "tiny.gguf", seed=1)
        own = {
            "LLAMA_CPU_MODEL": "/app/models/tiny.gguf", "LLAMA_CPU_PORT": free_port(), "LLAMA_CPU_CTX_SIZE": 256,
            "LLAMA_CPU_THREADS": 1, "LLAMA_CPU_BATCH_SIZE": 256, "LLAMA_CPU_UBATCH_SIZE": 256,
        }  # fmt: skip
        return cls(f"trainyard-test-{uuid.uuid4().hex[:8]}", data, own | variables)

    def run(self, *words: str) -> str:
        environment = compose.environment(DATA_ROOT=self.data, COMPOSE_PROJECT_NAME=self.name, **self.variables)
        command = ["compose", "--project-name", self.name, "--file", str(compose.FILE), *words]
        return engine.run(command, " ".join(words[:2]), environment=environment, seconds=120)

    @contextlib.contextmanager
    def up(self, *words: str) -> Iterator[Client]:
        try:
            self.run("up", "--detach", *words, "llama-cpu")
            yield Client(f"http://127.0.0.1:{self.variables['LLAMA_CPU_PORT']}")
        finally:
            self.run("--profile", "llama-cpu", "down", "--timeout", "5")

    def container(self) -> str:
        return self.run("ps", "--all", "--quiet", "llama-cpu").strip()


def user() -> str:
    return f"{os.getuid()}:{os.getgid()}"
