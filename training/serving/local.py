"""The `local` runtime: llama.cpp's server as a process of its own, found again by what stands in its command line.

`<key>.json` is the record; it exists while the service is meant to run. A start's token stands in the command line, so
that one which was cut off before it was written down is found by the swap's journal, and so does the record's own path,
so that a server whose record is lost or damaged is found too.
"""

import importlib.metadata
import os
import secrets
from pathlib import Path

from training.core import files
from training.core.errors import IntegrityError, RunError
from training.core.report import utc_stamp
from training.llamacpp.server import HOST, ServerProcess, find, require_free_port
from training.serving import records
from training.serving.model import ModelFile
from training.serving.runtime import OnWait
from training.serving.settings import DEFAULT_CTX_SIZE, default_port, require_in_range, service_command

_MAX_LOG_BYTES = 16 << 20


class LocalRuntime:
    """A server process of its own session, which outlives the command that started it."""

    name = "local"
    record_kinds = {
        "token": str, "log_start": int, "process": dict | None,
        "arguments": {"ctx_size": int, "slots": int, "threads": int},
    }  # fmt: skip

    def __init__(self, service: str, folder: Path) -> None:
        self.service = self.key = service
        self._record_path = folder / f"{service}.json"
        self._log = folder / f"{service}.log"
        self._own: dict[str, ServerProcess] = {}  # those started here: their exit status can be read

    def hold(self, descriptor: int) -> None:
        """Nothing that this runtime starts changes the service after its starter is gone."""

    def record(self) -> dict | None:
        if not self._record_path.exists():
            return None
        try:
            return records.read_record(self._record_path, self.record_kinds)
        except IntegrityError as error:
            error.next_command = f"{service_command('serve-stop', self.service)} ends whatever still serves"
            raise

    def is_there(self) -> bool:
        return self._record_path.exists() or bool(find(str(self._record_path)))

    def new_record(
        self, model: ModelFile, *, port: int | None, ctx_size: int | None = None, slots: int | None = None
    ) -> dict:
        port = default_port() if port is None else port
        require_in_range("port", port, 1, 65_535)
        if ctx_size is None:
            ctx_size = min(model.header["context_length"], DEFAULT_CTX_SIZE)
        require_in_range("context size", ctx_size, 1, 1 << 24)
        return {
            "schema": 1,
            "kind": "service",
            "service": self.service,
            "runtime": self.name,
            "token": secrets.token_hex(16),
            "process": None,
            "port": port,
            "model": str(model.path),
            "served_as": str(model.path),
            "sha256": model.sha256,
            "file": model.signature,
            "memory_bytes": model.memory_bytes(ctx_size),
            "device": "cpu",
            "arguments": {"ctx_size": ctx_size, "slots": slots or 1, "threads": len(os.sched_getaffinity(0))},
            "log": str(self._log),
            "log_start": 0,
            "since": utc_stamp(),
        }

    def again(self, record: dict) -> dict:
        return record | {"token": secrets.token_hex(16), "process": None}

    def start(self, record: dict) -> dict:
        self._trim_log()
        server = ServerProcess.start(
            Path(record["model"]), port=record["port"], log=Path(record["log"]), detached=True, token=record["token"],
            service=str(self._record_path), **record["arguments"],
        )  # fmt: skip
        self._own[record["token"]] = server
        version = f"xllamacpp {importlib.metadata.version('xllamacpp')}"
        return record | {"process": server.identity, "log_start": server.log_start, "version": version}

    def _trim_log(self) -> None:
        if self._log.exists() and self._log.stat().st_size > _MAX_LOG_BYTES:
            self._log.replace(self._log.with_suffix(".old.log"))

    def leave(self, record: dict | None) -> None:
        if record is None:
            self._record_path.unlink(missing_ok=True)
        else:
            files.write_json(self._record_path, record)

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
            raise RunError("the server has gone", where=record["log"], expected=f"it on port {record['port']}")
        return server.wait_healthy(budget_seconds, on_wait)

    def require_as_recorded(self, record: dict) -> None:
        """A process with the record's token in its command line was started by that record."""

    def stop(self, record: dict) -> None:
        for server in self._servers(record):
            server.stop()

    def remove(self) -> None:
        for identity in find(str(self._record_path)):
            ServerProcess(identity, 0, self._log).stop()
        self.leave(None)

    def require_startable(self, record: dict) -> None:
        require_free_port(record["port"])

    def require_restorable(self, record: dict) -> None:
        """A process is started again by its record alone."""

    def by_hand(self, record: dict) -> str:
        stop = service_command("serve-stop", self.service)
        return f"{stop} && {service_command('serve-start', self.service, MODEL=record['model'])}"

    def url(self, record: dict) -> str:
        return f"http://{HOST}:{record['port']}"
