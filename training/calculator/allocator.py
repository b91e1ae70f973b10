"""PyTorch's caching allocator for one CUDA stream, without CUDA: what a sequence of requests reserves.

The rules are those of c10/cuda/CUDACachingAllocator.cpp with its default settings: sizes rounded up to 512 bytes;
requests up to 1 MiB from segments of 2 MiB, under 10 MiB from segments of 20 MiB, larger ones from segments of their
own in steps of 2 MiB; the smallest free block that is large enough; a rest is split off from 512 bytes on (small pool)
or above 1 MiB (large pool) and counts as allocated otherwise; free neighbours merge. Nothing is ever given back.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import count

_ROUND = 512
_SMALL = 1 << 20
_SMALL_SEGMENT = 2 << 20
_MIDDLE = 10 << 20
_MIDDLE_SEGMENT = 20 << 20
_LARGE_STEP = 2 << 20


class Block:
    """A piece of a segment; `before` and `after` are its neighbours in it."""

    __slots__ = ("after", "asked", "before", "is_small", "key", "number", "size")

    def __init__(self, size: int, is_small: bool, number: int):
        self.size, self.is_small, self.number = size, is_small, number
        self.asked = 0
        self.before: Block | None = None
        self.after: Block | None = None
        self.key: tuple[int, int] | None = None  # its place among the free ones; None while it is in use


class CachingAllocator:
    """Allocated and reserved bytes as requests come and go, with the peaks of both."""

    def __init__(self) -> None:
        self.allocated_bytes = self.reserved_bytes = 0
        self.asked_bytes = 0
        self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        self.peak_rounding_bytes = 0  # what was allocated at the peak and not asked for
        self._numbers = count()
        self._keys: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        self._free: dict[tuple[int, int], Block] = {}

    def new(self, num_bytes: int) -> Block | None:
        """Allocate; nothing for an empty tensor."""
        if num_bytes <= 0:
            return None
        size = -(-num_bytes // _ROUND) * _ROUND
        is_small = size <= _SMALL
        block = self._best_fit(size, is_small) or self._segment(size, is_small)
        rest = block.size - size
        if rest >= _ROUND if is_small else rest > _SMALL:
            self._split(block, size)
        block.asked = num_bytes
        self.asked_bytes += num_bytes
        self.allocated_bytes += block.size
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes
            self.peak_rounding_bytes = self.allocated_bytes - self.asked_bytes
        return block

    def free(self, block: Block | None) -> None:
        """Give a block back to its pool and join it with free neighbours."""
        if block is None:
            return
        self.allocated_bytes -= block.size
        self.asked_bytes -= block.asked
        for other in (block.before, block.after):
            if other is not None and other.key is not None:
                self._take(other)
                self._join(block, other)
        self._offer(block)

    def _best_fit(self, size: int, is_small: bool) -> Block | None:
        keys = self._keys[is_small]
        place = bisect_left(keys, (size, -1))
        if place == len(keys):
            return None
        block = self._free.pop(keys.pop(place))
        block.key = None
        return block

    def _segment(self, size: int, is_small: bool) -> Block:
        if is_small:
            whole = _SMALL_SEGMENT
        else:
            whole = _MIDDLE_SEGMENT if size < _MIDDLE else -(-size // _LARGE_STEP) * _LARGE_STEP
        self.reserved_bytes += whole
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return Block(whole, is_small, next(self._numbers))

    def _split(self, block: Block, size: int) -> None:
        rest = Block(block.size - size, block.is_small, next(self._numbers))
        block.size = size
        rest.before, rest.after = block, block.after
        if block.after is not None:
            block.after.before = rest
        block.after = rest
        self._offer(rest)

    def _join(self, block: Block, other: Block) -> None:
        if other is block.before:
            block.before = other.before
            if block.before is not None:
                block.before.after = block
        else:
            block.after = other.after
            if block.after is not None:
                block.after.before = block
        block.size += other.size

    def _offer(self, block: Block) -> None:
        block.key = (block.size, block.number)
        insort(self._keys[block.is_small], block.key)
        self._free[block.key] = block

    def _take(self, block: Block) -> None:
        keys = self._keys[block.is_small]
        keys.pop(bisect_left(keys, block.key))
        del self._free[block.key]
        block.key = None
