"""A service: a name under which a model is served, its lock, its journal, and what is in service by the server's word.

The lock is held by whoever changes the service. `<key>.journal.json` exists while a swap is unfinished
(`training.serving.swap`). What is in service is the runtime's to know.
"""

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from training.containers import compose
from training.core import files, locks, paths
from training.core.errors import IntegrityError, TrainyardError, UserError
from training.core.log import say
from training.llamacpp.client import Client
from training.serving.model import hash_with_bar, signature
from training.serving.records import read_journal
from training.serving.runtime import OnWait, Runtime, choose
from training.serving.settings import service_command

_LOCK_WAIT_SECONDS = 600.0
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,40}")


@dataclass(frozen=True)
class Service:
    """A service by name; made by `open_service`."""

    name: str
    runtime: Runtime
    folder: Path

    @property
    def lock_path(self) -> Path:
        return self.folder / f"{self.runtime.key}.lock"

    @property
    def journal_path(self) -> Path:
        return self.folder / f"{self.runtime.key}.journal.json"

    @contextlib.contextmanager
    def hold(self, what: str) -> Iterator[None]:
        """Hold the service while it is changed. Raises MachineError, naming the holder, when the time is up."""
        resource = f"the service {self.name}"
        with locks.hold(self.lock_path, what, wait_seconds=_LOCK_WAIT_SECONDS, resource=resource) as descriptor:
            self.runtime.hold(descriptor)
            yield

    def journal(self) -> dict | None:
        """The journal of an unfinished swap, or None. Raises IntegrityError where it is damaged."""
        if not self.journal_path.exists():
            return None
        try:
            return read_journal(self.journal_path, self.runtime.record_kinds)
        except IntegrityError as error:
            error.next_command = f"{service_command('serve-stop', self.name)} ends what the swap has left"
            raise

    def remove_journal(self) -> None:
        """Remove the journal for good: a power cut must not bring it back."""
        if self.journal_path.exists():
            self.journal_path.unlink()
            files.fsync_path(self.folder)

    def state(self, *, budget_seconds: float = 0.0, on_wait: OnWait | None = None) -> dict:
        """What runs now: `{"running", "healthy", "record", "loaded"}`.

        A server that is still loading is waited for within the budget. `loaded` is the server's own word.
        """
        record = self.runtime.record()
        if record is None or not self.runtime.is_running(record):
            return {"running": False, "healthy": False, "record": record, "loaded": None}
        try:
            self.runtime.wait_healthy(record, budget_seconds, on_wait)
            loaded = Client(self.runtime.url(record)).model_info()
        except TrainyardError:
            return {"running": True, "healthy": False, "record": record, "loaded": None}
        return {"running": True, "healthy": True, "record": record, "loaded": loaded}


def open_service(name: str | None = None, *, existing: bool = False) -> Service:
    """A service by its name, else the one that RUNTIME decides on; says which. Raises UserError on a bad name.

    With `existing` it is, without a name, the one that there is, if any.
    """
    if name is not None and not _NAME.fullmatch(name):
        raise UserError("not a service's name", found=repr(name), expected="small letters, digits and '-'")
    chosen, runtime, why = choose(name, existing=existing)
    say(f"runtime {runtime.name}: service {chosen}, {why}")
    return Service(chosen, runtime, paths.roots().serving)


def port_of(asked: int | None, previous: dict) -> int | None:
    """The port that was asked for, else the one that the service has; None where neither says one."""
    return asked if asked is not None else (previous["record"] or {}).get("port") or None


def unfinished() -> list[str]:
    """The names of the services that have an unfinished swap. Other checkouts' containers are not among them."""
    names = []
    for path in sorted(paths.roots().serving.glob("*.journal.json")):
        stem = path.name.removesuffix(".journal.json")
        project, _, service = stem.rpartition(".")
        if project in ("", compose.project()):
            names.append(service)
    return names


def require_same_file(record: dict) -> None:
    """Raise IntegrityError where a record's file is no longer the one that was hashed when it was started.

    Then the running server could not be put back once stopped, so it must not be stopped. Where nobody hashed it, it
    must not have been changed, nor a link to it, since the server was started.
    """
    path = Path(record["model"])
    if not path.is_file():
        found = "no such file any more"
    elif record["sha256"] is None:
        changed = max(path.stat().st_ctime, path.lstat().st_ctime)
        if changed <= record["started"]:
            return
        found = "a file that changed after the server was started"
    elif signature(path) == record["file"] or hash_with_bar(path) == record["sha256"]:
        return
    else:
        found = "other bytes than when it was started"
    raise IntegrityError(
        f"the model in service ({record['service']}) could not be put back: its file has changed under it",
        where=path,
        found=found,
        expected=f"sha256 {files.short(record['sha256'])}"
        if record["sha256"]
        else "the file that was loaded; or nothing in service",
        next_command=service_command("serve-stop", record["service"]),
    )
