"""What is known of each record, as columns on disk: one number or two a record, in the order of the input.

Owns the columns and how they are read within bounds; what they mean is `split`'s and `near`'s. Memory: a column is
read whole only where its reader says so (`column`); keys are sorted in parts of about two million (`sorted_parts`),
whatever their number, so that a hundred million records need no more than ten million do.
"""

import mmap
from collections.abc import Iterator
from pathlib import Path

import numpy as np

COLUMNS: dict[str, str] = {
    "digest": "<u8",  # the content's digest, its first half
    "digest2": "<u8",  # and its second
    "order": "<u8",  # of the whole line: decides between records of one content, whatever the input's order
    "group": "<u8",
    "wish": "u1",  # the split that the record asks for
    "day": "<u4",
    "text_bytes": "<u4",
    "line_bytes": "<u4",  # in the working copy, with the line's end
    "source": "<u2",
    "contaminated": "u1",
    "label": "<u8",  # what a draw is shared out by
    "tier": "u1",  # what a draw prefers, the lowest first
}
_PART_RECORDS = 1 << 21
_BLOCK_RECORDS = 1 << 20
_PAIRS_AT_ONCE = 1 << 10


class Ledger:
    """Columns in a folder. `bands` are as many more columns as near-duplicates are looked for by."""

    def __init__(self, folder: Path, num_bands: int = 0):
        self.folder, self.num_bands = folder, num_bands
        self._num = 0
        names = [*COLUMNS, "values", *(f"band{band}" for band in range(num_bands))]
        self._files = {name: open(folder / f"{name}.column", "wb") for name in names}  # noqa: SIM115

    def __len__(self) -> int:
        return self._num

    def append(
        self, columns: dict[str, np.ndarray], bands_NB: np.ndarray | None = None, values_NV: np.ndarray | None = None
    ) -> None:
        """Add N records; `bands_NB` and `values_NV` are a sketch of each, uint64 and uint8."""
        for name, dtype in COLUMNS.items():
            columns[name].astype(dtype, copy=False).tofile(self._files[name])
        if bands_NB is not None:
            values_NV.tofile(self._files["values"])
            for band in range(self.num_bands):
                bands_NB[:, band].astype("<u8").tofile(self._files[f"band{band}"])
        self._num += len(columns["digest"])

    def close(self) -> None:
        """Write what is still in memory; nothing is added after that."""
        for file in self._files.values():
            file.close()

    def __enter__(self) -> "Ledger":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def column(self, name: str) -> np.ndarray:
        """A whole column, in memory."""
        return np.fromfile(self.folder / f"{name}.column", self._dtype(name))

    def pick(self, name: str, rows: np.ndarray) -> np.ndarray:
        """A column's values at some rows, reading it in blocks."""
        dtype = np.dtype(self._dtype(name))
        values = np.empty(len(rows), dtype)
        blocks = rows // _BLOCK_RECORDS
        order = np.argsort(blocks, kind="stable")
        starts = np.flatnonzero(np.diff(blocks[order], prepend=-1))
        for start, end in zip(starts, [*starts[1:], len(rows)], strict=True):
            here = order[start:end]
            first = int(blocks[here[0]]) * _BLOCK_RECORDS
            block = self._block(name, first)
            values[here] = block[rows[here] - first]
        return values

    def blocks(self, name: str) -> Iterator[tuple[int, np.ndarray]]:
        """A column in parts, each with the number of its first record."""
        for first in range(0, self._num, _BLOCK_RECORDS):
            yield first, self._block(name, first)

    def agreement(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """The share of the values in which the records `a[i]` and `b[i]` agree, for all i."""
        shares = np.zeros(len(a))
        if not len(a):
            return shares
        with (
            open(self.folder / "values.column", "rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
        ):
            for start in range(0, len(a), _PAIRS_AT_ONCE):
                part = slice(start, start + _PAIRS_AT_ONCE)
                values_NV = np.frombuffer(mapped, np.uint8).reshape(self._num, -1)
                shares[part] = (values_NV[a[part]] == values_NV[b[part]]).mean(axis=1)
                del values_NV
                mapped.madvise(mmap.MADV_DONTNEED)  # else all that was read would count as this process's memory
        return shares

    def sorted_parts(self, name: str, *ties: np.ndarray | str, keep: np.ndarray | None = None) -> Iterator[np.ndarray]:
        """Row numbers in the order of a key column, part by part; equal keys are never parted.

        Args:
            ties: what decides between equal keys, first to last: columns, or arrays with a value a record.
            keep: a mask of the records that count; all by default.
        """
        num_parts = 1 << max(0, (self._num - 1) // _PART_RECORDS).bit_length()
        shift = np.uint64(64 - num_parts.bit_length() + 1)
        for part in range(num_parts):
            rows, keys = [], []
            for first, block in self.blocks(name):
                chosen = np.ones(len(block), bool) if keep is None else keep[first : first + len(block)].copy()
                if num_parts > 1:
                    chosen &= (block >> shift) == part
                found = np.flatnonzero(chosen)
                rows.append(found + first)
                keys.append(block[found])
            if rows and (taken := np.concatenate(rows)).size:
                tied = [self.pick(tie, taken) if isinstance(tie, str) else tie[taken] for tie in ties]
                yield taken[np.lexsort((*tied[::-1], np.concatenate(keys)))]

    def _block(self, name: str, first: int) -> np.ndarray:
        dtype = np.dtype(self._dtype(name))
        count = min(_BLOCK_RECORDS, self._num - first)
        return np.fromfile(self.folder / f"{name}.column", dtype, count, offset=first * dtype.itemsize)

    def _dtype(self, name: str) -> str:
        return COLUMNS.get(name, "<u8")


class Components:
    """Which records belong together, where links join two at a time; four bytes a record."""

    def __init__(self, num: int):
        self._parent = np.arange(num, dtype=np.uint32)

    def copy(self) -> "Components":
        """The same, to be linked further on its own."""
        twin = Components(0)
        twin._parent = self._parent.copy()
        return twin

    def link(self, a: np.ndarray, b: np.ndarray) -> None:
        """Join the records `a[i]` and `b[i]`, for all i."""
        for start in range(0, len(a), _BLOCK_RECORDS):
            part = slice(start, start + _BLOCK_RECORDS)
            self._link(a[part].astype(np.uint32), b[part].astype(np.uint32))

    def join(self, other: "Components") -> None:
        """Take over what another has linked of the same records."""
        roots = other.roots()
        for first in range(0, len(roots), _BLOCK_RECORDS):
            part = roots[first : first + _BLOCK_RECORDS]
            self._link(np.arange(first, first + len(part), dtype=np.uint32), part)

    def _link(self, a: np.ndarray, b: np.ndarray) -> None:
        while len(a):
            roots_a, roots_b = self._roots(a), self._roots(b)
            self._parent[a], self._parent[b] = roots_a, roots_b  # shorter ways for the next to come
            apart = roots_a != roots_b
            a, b = roots_a[apart], roots_b[apart]
            np.minimum.at(self._parent, np.maximum(a, b), np.minimum(a, b))

    def linked(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """Whether the records `a[i]` and `b[i]` belong together already."""
        return self._roots(a) == self._roots(b)

    def roots(self) -> np.ndarray:
        """The first record of each record's component."""
        for first in range(0, len(self._parent), _BLOCK_RECORDS):
            part = slice(first, first + _BLOCK_RECORDS)
            self._parent[part] = self._roots(self._parent[part])
        return self._parent

    def _roots(self, rows: np.ndarray) -> np.ndarray:
        above = self._parent[rows]
        while True:
            higher = self._parent[above]
            if np.array_equal(higher, above):
                return above
            above = higher
