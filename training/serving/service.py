"""A service: what is to be in service under a name, on disk, and the lock that its changes hold.

`<folder>/<name>.json` is the record; it is written before its server is started (the intent, `process` null) and again
after, so that a start cut off in between is found by its token. It exists while the service is meant to run; the
folder's `<name>.journal.json` exists while a swap is unfinished (`training.serving.swap`).
"""

import contextlib
import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

from training.core import files, locks, paths
from training.core.errors import IntegrityError, TrainyardError, UserError
from training.core.report import make_command, utc_stamp
from training.llamacpp.client import Client
from training.serving.local import LocalRuntime
from training.serving.model import ModelFile, hash_with_bar, signature
from training.serving.runtime import OnWait, Runtime

DEFAULT_NAME = "llama-local"
DEFAULT_CTX_SIZE = 4096
HEALTH_BUDGET_SECONDS = 180.0
_LOCK_WAIT_SECONDS = 600.0
_MAX_LOG_BYTES = 16 << 20
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,40}")


@dataclass(frozen=True)
class Service:
    """A service by name; made by `open_service`."""

    name: str
    runtime: Runtime
    folder: Path

    @property
    def record_path(self) -> Path:
        return self.folder / f"{self.name}.json"

    @property
    def journal_path(self) -> Path:
        return self.folder / f"{self.name}.journal.json"

    @property
    def log_path(self) -> Path:
        return self.folder / f"{self.name}.log"

    def hold(self, what: str, wait_seconds: float = _LOCK_WAIT_SECONDS) -> contextlib.AbstractContextManager[None]:
        """Hold the service while it is changed. Raises MachineError, naming the holder, when the time is up."""
        path = self.folder / f"{self.name}.lock"
        return locks.hold(path, what, wait_seconds=wait_seconds, resource=f"the service {self.name}")

    def record(self) -> dict | None:
        """What is meant to be in service; None where it is stopped."""
        return files.read_json(self.record_path) if self.record_path.exists() else None

    def write_record(self, record: dict | None) -> None:
        """Write down what is meant to be in service; None for nothing."""
        if record is None:
            self.record_path.unlink(missing_ok=True)
        else:
            files.write_json(self.record_path, record)

    def journal(self) -> dict | None:
        """The journal of an unfinished swap, or None."""
        return files.read_json(self.journal_path) if self.journal_path.exists() else None

    def remove_journal(self) -> None:
        """Remove the journal for good: a power cut must not bring it back."""
        self.journal_path.unlink(missing_ok=True)
        files.fsync_path(self.folder)

    def new_record(self, model: ModelFile, *, port: int, ctx_size: int | None = None) -> dict:
        """The record of a start that is still to come, one slot, every setting given. Raises UserError."""
        _require_in_range("port", port, 1, 65_535)
        if ctx_size is None:
            ctx_size = min(model.header["context_length"], DEFAULT_CTX_SIZE)
        _require_in_range("context size", ctx_size, 1, 1 << 24)
        return {
            "schema": 1,
            "kind": "service",
            "service": self.name,
            "runtime": self.runtime.name,
            "token": secrets.token_hex(16),
            "process": None,
            "port": port,
            "model": str(model.path),
            "sha256": model.sha256,
            "file": model.signature,
            "arguments": {"ctx_size": ctx_size, "slots": 1, "threads": len(os.sched_getaffinity(0))},
            "log": str(self.log_path),
            "log_start": 0,
            "since": utc_stamp(),
        }

    def start(self, record: dict) -> dict:
        """Start what the record says, its intent written first; return the completed record."""
        self._trim_log()
        self.write_record(record)
        record = self.runtime.start(record)
        self.write_record(record)
        return record

    def _trim_log(self) -> None:
        if self.log_path.exists() and self.log_path.stat().st_size > _MAX_LOG_BYTES:
            self.log_path.replace(self.log_path.with_suffix(".old.log"))

    def state(self, *, budget_seconds: float = 0.0, on_wait: OnWait | None = None) -> dict:
        """What runs now: `{"running", "healthy", "record", "loaded"}`.

        A server that is still loading is waited for within the budget. `loaded` is the server's own word.
        """
        record = self.record()
        if record is None or not self.runtime.is_running(record):
            return {"running": False, "healthy": False, "record": record, "loaded": None}
        try:
            self.runtime.wait_healthy(record, budget_seconds, on_wait)
            loaded = Client(self.runtime.url(record)).model_info()
        except TrainyardError:
            return {"running": True, "healthy": False, "record": record, "loaded": None}
        return {"running": True, "healthy": True, "record": record, "loaded": loaded}


def default_port() -> int:
    """The port of a service that has none yet: the setting TRAINYARD_PORT, else 18080. Raises UserError."""
    text = paths.setting("TRAINYARD_PORT", "18080")
    if not (text.isdigit() and 0 < int(text) < 65536):
        raise UserError("not a port", where="TRAINYARD_PORT", found=text, expected="a number from 1 to 65535")
    return int(text)


def open_service(name: str = DEFAULT_NAME, runtime: Runtime | None = None) -> Service:
    """A service by its name, in the data root's serving folder. Raises UserError on a bad name."""
    if not _NAME.fullmatch(name):
        raise UserError("not a service's name", found=repr(name), expected="small letters, digits and '-'")
    return Service(name, runtime or LocalRuntime(), paths.roots().serving)


def _require_in_range(what: str, value: int, lowest: int, highest: int) -> None:
    if not lowest <= value <= highest:
        raise UserError(f"not a {what}", found=value, expected=f"{lowest} to {highest}")


def service_command(target: str, service: str, **variables: object) -> str:
    """A command about a service to paste, in make's form; the default service is not named."""
    return make_command(target, **variables, SERVICE=None if service == DEFAULT_NAME else service)


def require_same_file(record: dict) -> None:
    """Raise IntegrityError where a record's file is no longer the one that was hashed when it was started.

    Then the running server could not be put back once stopped, so it must not be stopped.
    """
    path = Path(record["model"])
    if not path.is_file():
        found = "no such file any more"
    elif signature(path) == record["file"] or hash_with_bar(path) == record["sha256"]:
        return
    else:
        found = "other bytes than when it was started"
    raise IntegrityError(
        f"the model in service ({record['service']}) could not be put back: its file has changed under it",
        where=path,
        found=found,
        expected=f"sha256 {files.short(record['sha256'])}",
        next_command=f"{service_command('serve-stop', record['service'])}, if the model in service may go",
    )
