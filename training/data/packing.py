"""Records put together into rows: best fit, longest first, no record cut.

Owns which records share a row, as numbers alone: how a row becomes a batch is the objective's. The plan is a function
of the lengths. Source: best-fit decreasing (Johnson 1973), at most 11/9 of the fewest rows and 2/3 of a row more.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Packs:
    """Which records each row holds: row i has `records[offsets[i] : offsets[i + 1]]`, in the row's order."""

    records: np.ndarray
    offsets: np.ndarray
    num_tokens: int
    seq_len: int

    @property
    def num_rows(self) -> int:
        return len(self.offsets) - 1

    @property
    def padding_share(self) -> float:
        """The part of all positions that holds no token."""
        return 1 - self.num_tokens / max(1, self.num_rows * self.seq_len)

    def row(self, number: int) -> np.ndarray:
        return self.records[self.offsets[number] : self.offsets[number + 1]]


def alone(lengths: np.ndarray, seq_len: int) -> Packs:
    """One record a row."""
    numbers = np.arange(len(lengths) + 1)
    return Packs(numbers[:-1], numbers, int(lengths.sum()), seq_len)


def plan(lengths: np.ndarray, seq_len: int) -> Packs:
    """Pack records of these lengths in tokens, each at most `seq_len`, into rows of at most `seq_len`."""
    rows: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (tokens left, row), sorted; the first that is large enough fits best
    for record in np.argsort(-lengths.astype(np.int64), kind="stable").tolist():
        length = int(lengths[record])
        place = bisect_left(rooms, (length, -1))
        left, row = rooms.pop(place) if place < len(rooms) else (seq_len, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(record)
        if left > length:
            insort(rooms, (left - length, row))
    offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    records = np.array([record for row in rows for record in row], np.int64)
    return Packs(records, offsets, int(lengths.sum()), seq_len)
