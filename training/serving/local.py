"""The `local` runtime: llama.cpp's server as a process of its own, found again by the token in its command line."""

import importlib.metadata
from pathlib import Path

from training.core.errors import RunError
from training.llamacpp.server import HOST, ServerProcess, find, require_free_port
from training.serving.runtime import OnWait


class LocalRuntime:
    """A server process of its own session, which outlives the command that started it."""

    name = "local"

    def __init__(self) -> None:
        self._own: dict[str, ServerProcess] = {}  # those started here: their exit status can be read

    def start(self, record: dict) -> dict:
        server = ServerProcess.start(
            Path(record["model"]), port=record["port"], log=Path(record["log"]), detached=True, token=record["token"],
            **record["arguments"],
        )  # fmt: skip
        self._own[record["token"]] = server
        version = f"xllamacpp {importlib.metadata.version('xllamacpp')}"
        return record | {"process": server.identity, "log_start": server.log_start, "version": version}

    def _servers(self, record: dict) -> list[ServerProcess]:
        own = self._own.get(record["token"])
        if own is not None:
            return [own] if own.is_running() else []
        log, start = Path(record["log"]), record["log_start"]
        return [ServerProcess(identity, record["port"], log, start) for identity in find(record["token"])]

    def is_running(self, record: dict) -> bool:
        return bool(self._servers(record))

    def wait_healthy(self, record: dict, budget_seconds: float, on_wait: OnWait | None) -> float:
        server = self._own.get(record["token"]) or next(iter(self._servers(record)), None)
        if server is None:
            raise RunError("the server has gone", where=record["log"], expected=f"{self.describe(record)} running")
        return server.wait_healthy(budget_seconds, on_wait)

    def stop(self, record: dict) -> None:
        for server in self._servers(record):
            server.stop()

    def require_startable(self, record: dict) -> None:
        require_free_port(record["port"])

    def describe(self, record: dict) -> str:
        process = record["process"] or {}
        return f"process {process.get('pid', 'unknown')} on port {record['port']}"

    def url(self, record: dict) -> str:
        return f"http://{HOST}:{record['port']}"
