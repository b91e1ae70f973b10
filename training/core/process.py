"""Processes by identity: a process id is reused, a process id with the moment of its start is not.

The moment is the kernel's own, in clock ticks since the boot it names, so that a corrected wall clock changes nothing
(proc(5), /proc/PID/stat field 22).
"""

import contextlib
import ctypes
import os
import resource
import signal
from functools import cache
from pathlib import Path

_PR_SET_PDEATHSIG = 1


@cache
def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text()[:8]


def _stat(pid: int) -> tuple[str, str]:
    """State letter and start ticks; the command's name before them may hold blanks and brackets."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], fields[19]


def identity(pid: int | None = None) -> dict:
    """`{"pid", "started"}` of a process (this one by default). Raises FileNotFoundError where there is none."""
    pid = os.getpid() if pid is None else pid
    return {"pid": pid, "started": f"{_boot()}-{_stat(pid)[1]}"}


def is_running(who: dict | None) -> bool:
    """Whether the very process of `identity()` still runs (a zombie does not)."""
    if not who or who["pid"] is None:
        return False
    try:
        state, ticks = _stat(who["pid"])
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX" and who["started"] == f"{_boot()}-{ticks}"


def end_with(parent: int) -> None:
    """Die with the parent, and leave the terminal's interrupts to it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with(parent)


def die_with(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent dies, whatever ends it (prctl(2))."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it was gone before
        os._exit(1)


def give_back() -> None:
    """Give memory that was freed back to the system, where the C library can: it keeps what a library's threads freed,
    and the next stage's would come on top of it (malloc_trim(3))."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def reset_peak_rss() -> None:
    """Give freed memory back and count the peak of resident memory anew; where that cannot be, the old peak stays."""
    give_back()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


class Growth:
    """How much more memory this process holds at its peak from now on: what a stage takes, wherever it runs."""

    def __init__(self) -> None:
        reset_peak_rss()
        self._before_bytes = status_bytes("VmRSS")

    def peak_bytes(self) -> int:
        """The growth at its highest until now."""
        return max(0, peak_rss_bytes() - self._before_bytes)


def peak_rss_bytes(pid: int | None = None) -> int:
    """The highest resident memory of a process since its start or the last reset; this one's by default."""
    return status_bytes("VmHWM", pid)


def peak_of_children_bytes() -> int:
    """The highest resident memory of the largest child process that has ended (getrusage(2))."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024


def status_bytes(name: str, pid: int | None = None) -> int:
    """A size of proc(5), `/proc/PID/status`, this process's by default; 0 where the process is gone."""
    try:
        status = Path(f"/proc/{pid or 'self'}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    words = status.partition(f"\n{name}:")[2].split()  # none of a zombie's
    return int(words[0]) * 1024 if words else 0
