"""Rows of several samples: which samples share a row of `seq_len` tokens, without cutting any.

Owns the plan; what keeps the samples of a row apart is the objective's. Best fit, the longest first, over counts of
equal lengths rather than over samples (Krell et al. 2021, "Efficient Sequence Packing without Cross-contamination"):
millions of samples are planned in a second. Invariants: every sample lies in exactly one row; the plan is a pure
function of lengths, seed and epoch; equal lengths are interchangeable, so which of them meet changes with the epoch.
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Packs:
    """Rows of samples.

    Args:
        samples: sample numbers, row after row; shape (num_samples,).
        starts: where each row begins in `samples`, and its end; shape (num_rows + 1,).
        seq_len: tokens that a row has room for.
        num_tokens: tokens of all samples.
    """

    samples: np.ndarray
    starts: np.ndarray
    seq_len: int
    num_tokens: int

    @property
    def num_rows(self) -> int:
        return len(self.starts) - 1

    def row(self, number: int) -> np.ndarray:
        """The samples of a row, in the order in which they stand in it."""
        return self.samples[self.starts[number] : self.starts[number + 1]]

    @property
    def padding_share(self) -> float:
        """The share of all positions that hold no sample, 0 to 1."""
        return 1 - self.num_tokens / (self.num_rows * self.seq_len) if self.num_rows else 0.0


def alone(lengths: Sequence[int], seq_len: int) -> Packs:
    """One sample a row, in order."""
    starts = np.arange(len(lengths) + 1)
    return Packs(starts[:-1], starts, seq_len, int(np.sum(lengths, dtype=np.int64)))


def plan(lengths: Sequence[int], seq_len: int, seed: int, epoch: int = 0) -> Packs:
    """Pack samples of these lengths into rows, which come in a shuffled order.

    Raises ValueError for a length that is 0 or longer than a row: the stage before has decided what becomes of those.
    """
    lengths_N = np.asarray(lengths, np.int64)
    if len(lengths_N) and not (lengths_N.min() >= 1 and lengths_N.max() <= seq_len):
        raise ValueError(f"lengths from {lengths_N.min()} to {lengths_N.max()} do not fit rows of {seq_len}")
    generator = np.random.default_rng((seed, epoch))
    groups = _groups(np.bincount(lengths_N, minlength=seq_len + 1), seq_len)
    rows = _rows(groups, lengths_N, generator)
    order = generator.permutation(len(rows))
    shuffled = [rows[number] for number in order]
    starts = np.concatenate([[0], np.cumsum([len(row) for row in shuffled], dtype=np.int64)])
    samples = np.concatenate([np.empty(0, np.int64), *shuffled])
    return Packs(samples, starts.astype(np.int64), seq_len, int(lengths_N.sum()))


def _groups(counts: np.ndarray, seq_len: int) -> list[tuple[tuple[int, ...], int]]:
    """Rows as the lengths in them, and how many rows are so; the longest first, into the smallest room that is left."""
    by_room: dict[int, list[tuple[tuple[int, ...], int]]] = {}
    rooms: list[int] = []  # the keys of by_room, ascending

    def put(room: int, lengths: tuple[int, ...], count: int) -> None:
        if room not in by_room:
            by_room[room] = []
            bisect.insort(rooms, room)
        by_room[room].append((lengths, count))

    for length in np.flatnonzero(counts)[::-1].tolist():
        left = int(counts[length])
        while left:
            place = bisect.bisect_left(rooms, length)
            if place == len(rooms):
                each = min(left, seq_len // length)  # rows of this length alone, the last of them with the rest
                whole = left // each
                put(seq_len - each * length, (length,) * each, whole)
                left -= whole * each
                continue
            room = rooms[place]
            lengths, count = by_room[room].pop()
            if not by_room[room]:
                del by_room[room], rooms[place]
            used = min(count, left)
            if count > used:
                put(room, lengths, count - used)
            put(room - length, (*lengths, length), used)
            left -= used
    return [group for room in rooms for group in by_room[room]]


def _rows(
    groups: list[tuple[tuple[int, ...], int]], lengths_N: np.ndarray, generator: np.random.Generator
) -> list[np.ndarray]:
    """Fill rows with samples, drawn at random from those of each length."""
    drawn = generator.permutation(len(lengths_N))
    by_length = drawn[np.argsort(lengths_N[drawn], kind="stable")]
    ends = np.cumsum(np.bincount(lengths_N)).tolist() if len(lengths_N) else []
    rows: list[np.ndarray] = []
    for lengths, count in groups:
        columns = np.empty((count, len(lengths)), np.int64)
        for column, length in enumerate(lengths):
            ends[length] -= count
            columns[:, column] = by_length[ends[length] : ends[length] + count]
        rows.extend(generator.permuted(columns, axis=1))
    return rows
