"""Processes by identity: a process id is reused, a process id with its start time is not."""

import os
import resource
import sys

import psutil


def identity(pid: int | None = None) -> dict:
    """`{"pid", "started"}` of a process (this one by default). Raises psutil.NoSuchProcess."""
    pid = os.getpid() if pid is None else pid
    return {"pid": pid, "started": round(psutil.Process(pid).create_time(), 2)}


def is_running(who: dict | None) -> bool:
    """Whether the very process of `identity()` still runs (a zombie does not)."""
    if not who:
        return False
    try:
        process = psutil.Process(who["pid"])
        same = abs(process.create_time() - who["started"]) < 0.05
        return same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def peak_rss_bytes() -> int:
    """The highest resident memory that this process has had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
