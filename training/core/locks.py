"""Locks between processes, which the kernel drops when their holder dies, whatever it died of.

A lock is an `flock` on a small file that also says who holds it and by which command, so that who waits can tell.
"""

import contextlib
import fcntl
import json
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

from training.core import paths, report
from training.core.errors import MachineError
from training.core.files import disk_errors
from training.core.process import identity
from training.core.units import format_seconds

_logger = logging.getLogger(__name__)
_POLL_SECONDS = 0.2


def machine_lock() -> Path:
    """The lock that whatever trains on this machine holds."""
    return paths.roots().cache / "locks" / "machine.lock"


def holder(path: Path) -> dict | None:
    """Who holds a lock now (`{"pid", "started", "what", "command", "since"}`), or None when it is free."""
    if not path.exists():
        return None
    with open(path) as file:  # for reading alone: to ask must work where nothing can be written
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _read(path)
        return None


def _read(path: Path) -> dict:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {"pid": None, "started": None, "what": "a process that is just starting", "since": time.time()}


def describe(who: dict) -> str:
    """`training mine (process 4711, make train CONFIG=mine.yaml, for 3 min 20 s)`."""
    held = format_seconds(max(0.0, time.time() - who["since"]))
    command = f", {paths.for_people(who['command'])}" if who.get("command") else ""
    return f"{who['what']} (process {who['pid']}{command}, for {held})"


@contextlib.contextmanager
def hold(path: Path, what: str, *, wait_seconds: float | None = None, resource: str = "the machine") -> Iterator[int]:
    """Hold the lock at `path` while the block runs, waiting for it and saying for whom.

    Args:
        what: what the holder is doing, shown to those who wait.
        wait_seconds: how long to wait; None waits for ever, 0 refuses at once.
        resource: what the lock stands for, as the message names it.

    Yields the lock's descriptor: a child that inherits it holds the lock too, until both have ended. Raises
    MachineError, naming the holder, where the time is up.
    """
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        _acquire(descriptor, path, wait_seconds, resource)
        with disk_errors(path):
            write_holder(descriptor, {"what": what})
        yield descriptor
    finally:
        os.close(descriptor)


def write_holder(descriptor: int, body: dict) -> None:
    """Write down that this process holds the lock of a descriptor, for those who ask `holder`; `body` has a `what`."""
    command = report.again() if report.RUNNING in os.environ else None
    who = identity() | body | {"command": command, "since": time.time()}
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(who).encode(), 0)


def _acquire(descriptor: int, path: Path, wait_seconds: float | None, resource: str) -> None:
    deadline = None if wait_seconds is None else time.monotonic() + wait_seconds
    told = False
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass
        if deadline is not None and time.monotonic() >= deadline:
            raise MachineError(
                f"{resource} is busy",
                where=path,
                found=f"held by {describe(_read(path))}",
                expected="nobody holding it, as when that process has ended",
            )
        if not told:
            _logger.warning("waiting for %s, held by %s", resource, describe(_read(path)))
            told = True
        time.sleep(_POLL_SECONDS)
