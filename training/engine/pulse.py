"""What the engine's process says of itself while it works: its stage, its step, and when its main thread last moved.

It is a page of memory that supervisor and engine share: saying it costs nothing, and never waits for the reader.
Times are of the monotonic clock, which every process of a machine sees alike.
"""

import mmap
import os
import struct
import time
from dataclasses import dataclass

STAGES = ("loading", "first step", "step", "validation", "saving")
_LAYOUT = struct.Struct("=ddqq")


@dataclass(frozen=True)
class Beat:
    """The last movement.

    Args:
        at: seconds of the monotonic clock.
        longest_seconds: the longest wait between two movements in this stage so far.
    """

    at: float
    longest_seconds: float
    stage: str
    step: int


class Pulse:
    """One side of the page. The engine calls `beat`, the supervisor `last`."""

    def __init__(self, descriptor: int):
        self.descriptor = descriptor
        self._page = mmap.mmap(descriptor, mmap.PAGESIZE)
        self._stage, self._at = "loading", time.monotonic()
        self._longest = dict.fromkeys(STAGES, 0.0)

    @classmethod
    def create(cls) -> "Pulse":
        """A new page, at its first movement."""
        descriptor = os.memfd_create("pulse")
        os.ftruncate(descriptor, mmap.PAGESIZE)
        pulse = cls(descriptor)
        pulse.beat("loading", 0)
        return pulse

    def beat(self, stage: str, step: int) -> None:
        """Say that the main thread moves, in this stage of this step."""
        now = time.monotonic()
        if stage == self._stage:
            self._longest[stage] = max(self._longest[stage], now - self._at)
        self._stage, self._at = stage, now
        _LAYOUT.pack_into(self._page, 0, now, self._longest[stage], STAGES.index(stage), step)

    def last(self) -> Beat:
        """The last movement; read until two looks agree, since a writer may be in the middle of one."""
        before = None
        while before != (seen := self._page[: _LAYOUT.size]):
            before = seen
        at, longest, stage, step = _LAYOUT.unpack(seen)
        return Beat(at, longest, STAGES[stage], step)

    def close(self) -> None:
        self._page.close()
        os.close(self.descriptor)
