"""The machine's queue: who comes first is served first, and whoever dies leaves it.

A ticket is a numbered file of the machine's cache that its holder keeps locked (`flock`), so that it counts only while
that process lives, whatever it dies of, and in a container as on the host. The first in line takes the machine's lock
and gives its ticket back.
"""

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

from training.core import files, locks, paths

_logger = logging.getLogger(__name__)
_POLL_SECONDS = 0.3


def waiting() -> list[dict]:
    """Who waits for the machine, the next one first: `{"number", "pid", "what", "run", "since"}`."""
    return [found for number in _numbers() if (found := _alive(number)) is not None]


@contextlib.contextmanager
def turn(what: str, *, run: str | None = None) -> Iterator[int]:
    """Hold the machine while the block runs, in the order of coming; say for whom, and at which place, it waits.

    Args:
        what: what is to be done, shown to those who come later.
        run: the run's id, where there is one.

    Yields the machine lock's descriptor: a child that inherits it holds the machine too, until both have ended.
    """
    with contextlib.ExitStack() as held:
        with _ticket({"what": what, "run": run}) as number:
            _wait_to_be_first(number)
            descriptor = held.enter_context(locks.hold(locks.machine_lock(), what))
        yield descriptor


def _folder() -> Path:
    return paths.roots().cache / "queue"


def _path(number: int) -> Path:
    return _folder() / f"{number:06d}.json"


def _numbers() -> list[int]:
    return sorted(int(path.stem) for path in _folder().glob("*.json") if path.stem.isdigit())


def _alive(number: int) -> dict | None:
    """What a ticket says while its holder lives."""
    try:
        who = locks.holder(_path(number))
    except FileNotFoundError:  # given back just now
        return None
    return None if who is None else {"run": None, **who, "number": number}


@contextlib.contextmanager
def _ticket(body: dict) -> Iterator[int]:
    """Take the next number; the file goes when the block ends."""
    with locks.hold(_folder() / "lock", "taking a number", resource="the queue"):
        for number in _numbers():  # those of the dead
            if _alive(number) is None:
                _path(number).unlink(missing_ok=True)
        number = max(_numbers(), default=0) + 1
        with files.disk_errors(_path(number)):
            descriptor = os.open(_path(number), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        locks.write_holder(descriptor, body)
    try:
        yield number
    finally:
        _path(number).unlink(missing_ok=True)
        os.close(descriptor)


def _wait_to_be_first(number: int) -> None:
    told = None
    while ahead := [one for one in waiting() if one["number"] < number]:
        place = f"{len(ahead) + 1} of {len(waiting())}"
        if place != told:
            holder = locks.holder(locks.machine_lock())
            busy = f", held by {locks.describe(holder)}" if holder else ""
            _logger.warning("waiting %s for the machine%s", place, busy)
            told = place
        time.sleep(_POLL_SECONDS)
