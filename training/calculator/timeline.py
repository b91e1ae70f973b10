"""Allocated and reserved bytes of a step, event by event: what a picture of it is drawn from. Values only."""

from __future__ import annotations

from dataclasses import dataclass

from training.calculator.allocator import Block, CachingAllocator


@dataclass(frozen=True)
class Timeline:
    """Both counts after each allocation and each release; `marks` are (event, phase) where a phase begins."""

    allocated_bytes: tuple[int, ...]
    reserved_bytes: tuple[int, ...]
    marks: tuple[tuple[int, str], ...]

    @property
    def peak(self) -> tuple[int, str]:
        """The first event that holds the most, and its phase."""
        event = max(range(len(self.allocated_bytes)), key=self.allocated_bytes.__getitem__)
        return event, next((phase for start, phase in reversed(self.marks) if start <= event), "")


class Recorder(CachingAllocator):
    """An allocator that writes down its counts."""

    def __init__(self, *, expands: bool = False) -> None:
        super().__init__(expands=expands)
        self.restart()

    def restart(self) -> None:
        """Forget what is written down; what is held stays."""
        self._allocated: list[int] = []
        self._reserved: list[int] = []
        self._marks: list[tuple[int, str]] = []

    def new(self, num_bytes: int) -> Block | None:
        block = super().new(num_bytes)
        self._note(block)
        return block

    def free(self, block: Block | None) -> None:
        super().free(block)
        self._note(block)

    def mark(self, phase: str) -> None:
        """Let a phase begin with the next event, unless it is the one that runs."""
        if not self._marks or self._marks[-1][1] != phase:
            self._marks.append((len(self._allocated), phase))

    def timeline(self) -> Timeline:
        return Timeline(tuple(self._allocated), tuple(self._reserved), tuple(self._marks))

    def _note(self, block: Block | None) -> None:
        if block is not None:
            self._allocated.append(self.allocated_bytes)
            self._reserved.append(self.reserved_bytes)
