"""What a runtime must be able to do to hold a service; `local` does it with a process, another may with a container.

A record is the JSON object that says what is to be served and what came of it: see `training.serving.service`. Its
`token` marks everything that one start has made, so that a start which was killed before it could write down what it
made is found again. No method looks at the disk or keeps state that a later process would need.
"""

from collections.abc import Callable
from typing import Protocol

OnWait = Callable[[float, str], object]


class Runtime(Protocol):
    """Starts, finds and stops what a record describes."""

    name: str

    def start(self, record: dict) -> dict:
        """Start what the record says, without waiting for health; return it with what identifies the result."""

    def is_running(self, record: dict) -> bool:
        """Whether something that this record's start has made still runs."""

    def wait_healthy(self, record: dict, budget_seconds: float, on_wait: OnWait | None) -> float:
        """Wait for health and return the seconds; RunError with the last log lines when it ends or the time is up."""

    def stop(self, record: dict) -> None:
        """Stop everything that this record's start has made and wait until it is gone. Nothing happens otherwise."""

    def require_startable(self, record: dict) -> None:
        """Raise MachineError where the machine stands in the way of starting this record (a port in use)."""

    def describe(self, record: dict) -> str:
        """Name it for people."""

    def url(self, record: dict) -> str:
        """Where it answers."""
