"""Signals put off while a service is being changed.

Inside `Deferred` a SIGINT, SIGTERM or SIGHUP is only remembered, except within `interruptible()`, where the first one
raises, once. Whatever the moment and however many come, the code that puts things back runs to its end. What was
remembered and has not raised yet raises when the block ends. Only the main thread gets signals: only it can use this.
"""

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType

from training.core import signals


class Deferred:
    """A context manager; `pending` is the signal that came, or None."""

    def __init__(self) -> None:
        self.pending: signal.Signals | None = None
        self._raises = False
        self._has_raised = False
        self._handled = signals.handled(self._take)

    def __enter__(self) -> "Deferred":
        self._handled.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._handled.__exit__(None, None, None)
        if kind is None:
            self.check()

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let a signal raise in this block: one that has come already at once, else the first that comes."""
        self.check()
        self._raises = True
        try:
            yield
        finally:
            self._raises = False

    def check(self) -> None:
        """Raise KeyboardInterrupt or Terminated where a signal has come, once: a second does not break the clean-up."""
        if self.pending and not self._has_raised:
            self._has_raised = True
            raise signals.interruption(self.pending.name)

    def _take(self, number: int, _: FrameType | None) -> None:
        self.pending = self.pending or signal.Signals(number)
        if self._raises:
            self.check()
        _tell(f"{signal.Signals(number).name}: heard; first the service is put in order, please wait\n")


def _tell(text: str) -> None:
    """Write without Python's buffers, which a signal may have interrupted."""
    with contextlib.suppress(OSError):
        os.write(2, text.encode())
