"""PyTorch's caching allocator for one CUDA stream, without CUDA: what a sequence of requests reserves.

The rules are those of c10/cuda/CUDACachingAllocator.cpp with its default settings: sizes rounded up to 512 bytes;
requests up to 1 MiB from segments of 2 MiB, under 10 MiB from segments of 20 MiB, larger ones from segments of their
own in steps of 2 MiB; the smallest free block that is large enough; a rest is split off from 512 bytes on (small pool)
or above 1 MiB (large pool) and counts as allocated otherwise; free neighbours merge. Nothing is ever given back.

With `expandable_segments:True` each pool is one segment that grows at its end by pages of 2 MiB (small) or 20 MiB
(large), and a rest is always split off.
"""

from __future__ import annotations

from bisect import bisect_left, insort

_ROUND = 512
_SMALL = 1 << 20
_SMALL_SEGMENT = 2 << 20
_MIDDLE = 10 << 20
_MIDDLE_SEGMENT = 20 << 20
_LARGE_STEP = 2 << 20
_NUMBER_BITS = 32
_COUNTS = (
    "allocated_bytes", "reserved_bytes", "asked_bytes", "peak_allocated_bytes", "peak_reserved_bytes",
    "peak_rounding_bytes", "_number",
)  # fmt: skip


class ExactAllocator:
    """An allocator that rounds nothing and keeps nothing: the bytes asked for, now and at most."""

    def __init__(self) -> None:
        self.allocated_bytes = self.peak_allocated_bytes = 0

    @property
    def reserved_bytes(self) -> int:
        return self.peak_allocated_bytes

    def new(self, num_bytes: int) -> int:
        self.allocated_bytes += num_bytes
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return num_bytes

    def free(self, num_bytes: int) -> None:
        self.allocated_bytes -= num_bytes


class Block:
    """A piece of a segment; `before` and `after` are its neighbours in it.

    `key` is its place among the free ones, by size and then by age, as one number; 0 while it is in use.
    """

    __slots__ = ("after", "asked", "before", "is_small", "key", "number", "size")

    def __init__(self, size: int, is_small: bool, number: int, before: Block | None = None, after: Block | None = None):
        self.size, self.is_small, self.number = size, is_small, number
        self.before, self.after = before, after
        self.asked = self.key = 0


class CachingAllocator:
    """Allocated and reserved bytes as requests come and go, with the peaks of both.

    A replay makes tens of thousands of requests, so `new` and `free` are written out in one piece each.

    Args:
        expands: whether segments are expandable.
    """

    def __init__(self, *, expands: bool = False) -> None:
        self._expands = expands
        self._ends: dict[bool, Block | None] = {True: None, False: None}  # the last block of each growing segment
        self.allocated_bytes = self.reserved_bytes = self.asked_bytes = 0
        self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        self.peak_rounding_bytes = 0  # what was allocated at the peak and not asked for
        self._number = 0
        self._keys: dict[bool, list[int]] = {True: [], False: []}
        self._free: dict[int, Block] = {}

    def new(self, num_bytes: int) -> Block | None:
        """Allocate; nothing for an empty tensor."""
        if num_bytes <= 0:
            return None
        size = (num_bytes + _ROUND - 1) // _ROUND * _ROUND
        is_small = size <= _SMALL
        keys = self._keys[is_small]
        place = bisect_left(keys, size << _NUMBER_BITS)
        if place < len(keys):
            block = self._free.pop(keys.pop(place))
            block.key = 0
        else:
            block = self._segment(size, is_small)
        rest = block.size - size
        if rest >= _ROUND if is_small or self._expands else rest > _SMALL:
            self._split(block, size, rest)
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
        keys = self._keys[block.is_small]
        before, after = block.before, block.after
        if before is not None and before.key:
            self._take(keys, before)
            block.size += before.size
            block.before = before = before.before
            if before is not None:
                before.after = block
        if after is not None and after.key:
            self._take(keys, after)
            if after is self._ends[block.is_small]:
                self._ends[block.is_small] = block
            block.size += after.size
            block.after = after = after.after
            if after is not None:
                after.before = block
        self._offer(keys, block)

    def settled(self) -> CachingAllocator:
        """Make a second allocator in this state, in which the blocks now in use are never freed."""
        other = CachingAllocator(expands=self._expands)
        for name in _COUNTS:
            setattr(other, name, getattr(self, name))
        other._keys = {is_small: list(keys) for is_small, keys in self._keys.items()}
        for key, block in self._free.items():  # their neighbours are in use, so no block ever joins them
            other._free[key] = copy = Block(block.size, block.is_small, block.number)
            copy.key = key
            if block is self._ends[block.is_small]:
                other._ends[block.is_small] = copy
        return other

    def _segment(self, size: int, is_small: bool) -> Block:
        if self._expands:
            return self._grown(size, is_small)
        if is_small:
            whole = _SMALL_SEGMENT
        else:
            whole = _MIDDLE_SEGMENT if size < _MIDDLE else -(-size // _LARGE_STEP) * _LARGE_STEP
        self._reserve(whole)
        return Block(whole, is_small, self._number)

    def _grown(self, size: int, is_small: bool) -> Block:
        """The end of a growing segment, with as many pages more as it takes."""
        end, page = self._ends[is_small], _SMALL_SEGMENT if is_small else _MIDDLE_SEGMENT
        is_free = end is not None and end.key
        pages = -(-(size - (end.size if is_free else 0)) // page) * page
        self._reserve(pages)
        if is_free:
            self._take(self._keys[is_small], end)
            end.key, end.size = 0, end.size + pages
            return end
        self._ends[is_small] = block = Block(pages, is_small, self._number, end)
        if end is not None:
            end.after = block
        return block

    def _reserve(self, num_bytes: int) -> None:
        self._number += 1
        self.reserved_bytes += num_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def _split(self, block: Block, size: int, rest: int) -> None:
        self._number += 1
        other = Block(rest, block.is_small, self._number, block, block.after)
        block.size = size
        if block.after is not None:
            block.after.before = other
        block.after = other
        if block is self._ends[block.is_small]:
            self._ends[block.is_small] = other
        self._offer(self._keys[block.is_small], other)

    def _offer(self, keys: list[int], block: Block) -> None:
        block.key = key = block.size << _NUMBER_BITS | block.number
        insort(keys, key)
        self._free[key] = block

    def _take(self, keys: list[int], block: Block) -> None:
        del keys[bisect_left(keys, block.key)]
        del self._free[block.key]
