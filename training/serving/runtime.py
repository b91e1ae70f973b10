"""What a runtime must be able to do to hold a service, and which runtime a service has.

A record is the JSON object that says what is to be served and what came of it (`new_record` makes one). Every runtime's
has `runtime, service, port, model, served_as, sha256, file, memory_bytes, arguments, log, since`: `model` is the host's
file, `served_as` the name by which the server must call it; `sha256` and `file` are None where nobody hashed the file
when it was put in service. What else stands in it is the runtime's own.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from training.containers import compose
from training.containers import runtime as containers
from training.core import paths
from training.core.errors import TrainyardError, UserError
from training.core.log import say
from training.core.report import make_command

if TYPE_CHECKING:
    from training.serving.model import ModelFile
    from training.serving.records import Kinds

OnWait = Callable[[float, str], object]
LOCAL_SERVICE = "llama-local"
CONTAINER_SERVICES = tuple(compose.SERVERS)


class Runtime(Protocol):
    """Starts, finds and stops what a service's records describe."""

    name: str
    key: str
    """What tells this service from every other one that shares the data root: the stem of its files."""

    record_kinds: "Kinds"
    """What its records have beyond what everyone's have (`training.serving.records`)."""

    def hold(self, descriptor: int) -> None:
        """Take note of the lock that is held: what is started to change the service must hold it too."""

    def record(self) -> dict | None:
        """What is in service, or was when it was stopped; None where nothing is. Raises where that is damaged."""

    def is_there(self) -> bool:
        """Whether there is anything of the service, running or not, by what identifies it alone."""

    def new_record(
        self, model: "ModelFile", *, port: int | None, ctx_size: int | None = None, slots: int | None = None
    ) -> dict:
        """The record of a start that is still to come; what is None is as the service has it. Raises UserError."""

    def again(self, record: dict) -> dict:
        """The record of a second start of what `record` says."""

    def start(self, record: dict) -> dict:
        """Start what the record says, without waiting for health; return it with what identifies the result."""

    def is_running(self, record: dict) -> bool:
        """Whether something that this record's start has made still runs."""

    def wait_healthy(self, record: dict, budget_seconds: float, on_wait: OnWait | None) -> float:
        """Wait for health and return the seconds; RunError with the last log lines when it ends or the time is up."""

    def require_as_recorded(self, record: dict) -> None:
        """Raise MachineError where what this record's start has made is not made as the record says."""

    def stop(self, record: dict) -> None:
        """Stop everything that this record's start has made and wait until it is gone. Nothing happens otherwise."""

    def remove(self) -> None:
        """End whatever serves under this name, written down or not, and leave nothing in service."""

    def leave(self, record: dict | None) -> None:
        """Leave the service as the record says: what runs is written down, what does not is left stopped."""

    def require_startable(self, record: dict) -> None:
        """Raise MachineError where the machine stands in the way of starting this record (a port in use)."""

    def require_restorable(self, record: dict) -> None:
        """Raise where what is in service now could not be started again just as it is."""

    def by_hand(self, record: dict) -> str:
        """The commands that put this record in service without any journal."""

    def url(self, record: dict) -> str:
        """Where it answers."""


def choose(name: str | None, *, existing: bool = False) -> tuple[str, Runtime, str]:
    """The service, its runtime, and why: a service of compose.yaml is docker's, any other local.

    Without a name the setting RUNTIME decides (`training.containers.runtime`); with `existing`, for what is only looked
    at or ended, it is the service that there is, whatever could be started now. Raises UserError on a contradiction,
    and what stands in the way where docker is asked for.
    """
    asked = containers.setting()
    why = "by its name"
    if name is None:
        name, why = (existing and _existing(asked)) or _default()
    if asked != "auto" and (asked == "docker") != (name in CONTAINER_SERVICES):
        other = "local" if asked == "docker" else "docker"
        raise UserError(
            f"the service {name} is not of the runtime {asked}",
            where=f"RUNTIME={asked}",
            found=name,
            expected=" or ".join(CONTAINER_SERVICES) if asked == "docker" else "another name than compose.yaml has",
            next_command=make_command("serve-status", SERVICE=name, RUNTIME=other),
        )
    return name, _of(name), why


def _default() -> tuple[str, str]:
    """The first service of compose.yaml that this machine can run, else the local one; and why."""
    found: list[tuple[str, str]] = []
    for service in CONTAINER_SERVICES:
        try:
            runtime, why = containers.choose(service)
        except TrainyardError:
            if service == CONTAINER_SERVICES[-1]:
                raise
            continue
        if runtime == "docker":
            return service, why
        found.append((LOCAL_SERVICE, why))
    return found[-1]


def _existing(asked: str) -> tuple[str, str] | None:
    """The first service that there is something of, and why; says which others there are. None where there is none."""
    able = asked != "local" and shutil.which("docker") is not None
    names = [*(CONTAINER_SERVICES if able else ()), *((LOCAL_SERVICE,) if asked != "docker" else ())]
    there = [name for name in names if _is_there(name)]
    if len(there) > 1:
        say(f"there are {' and '.join(there)}; this is about {there[0]}, SERVICE={there[1]} names the other")
    return (there[0], "which there is") if there else None


def _is_there(name: str) -> bool:
    try:
        return _of(name).is_there()
    except TrainyardError:  # no engine, or a container that is not ours
        return False


def _of(name: str) -> Runtime:
    return (_docker if name in CONTAINER_SERVICES else _local)(name, paths.roots().serving)


def _local(name: str, folder: Path) -> Runtime:
    from training.serving.local import LocalRuntime

    return LocalRuntime(name, folder)


def _docker(name: str, folder: Path) -> Runtime:
    from training.serving.docker import DockerRuntime

    return DockerRuntime(name, folder)
