"""Near-duplicates: texts that share most of their shingles, found by MinHash bands and proved on the texts.

A text's shingles are its runs of 12 bytes, letters lowered and blanks made one: no words are needed, so that every
script and code are served alike. A text of fewer than 64 bytes is one shingle, since there a word makes another text.
Owns shingles, bands and their proof; where bands lie on disk is the ledger's. Two records that agree in one band (7 of
126 values, at the threshold 0.8) are candidates, and are near-duplicates where their shingles overlap by the threshold
or more (Jaccard): by the estimate of all 128 values, and where that is not sure, by the texts. A pair at the very
threshold is found with a probability of 95 % or more.

Sources: MinHash, Broder 1997; one permutation for all values, Li, Owen and Zhang 2012; the filling of empty ones,
Shrivastava and Li 2014.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache

import numpy as np

from training.data.ledger import Components, Ledger

SHINGLE_BYTES, FEWEST_BYTES = 12, 64
NUM_VALUES = 128
_BIN_BITS = 7
_SEED = 0x9E3779B97F4A7C15
_CHUNK_BYTES = 128 << 10
_MIN_RECALL = 0.95
_MAX_ROUNDS = 4
_UNSURE = 0.15
"""How far from the threshold the estimate of an overlap decides alone: three of its standard deviations or more."""
_MOST_COMPARED = 4
"""How often a record's text is compared; after that the estimate decides, so that data of one mould ends in time."""
_SAMPLED_ABOVE = 1 << 20
"""Texts with more shingles are compared by a fixed sixteenth of them."""
_SKETCHED_AT_ONCE = 4096
_EMPTY, _SIXTEENTH = np.uint64(2**64 - 1), np.uint64(2**60)


@dataclass(frozen=True)
class Bands:
    """How many values make a band, for a threshold: as many as still find 95 % of the pairs that lie right at it."""

    threshold: float

    @cached_property
    def rows(self) -> int:
        """Values of one band."""
        fitting = (rows for rows in range(16, 1, -1) if self.recall(self.threshold, rows) >= _MIN_RECALL)
        return next(fitting, 2)

    @property
    def num(self) -> int:
        return NUM_VALUES // self.rows

    def recall(self, jaccard: float, rows: int | None = None) -> float:
        """The probability that a pair of this overlap shares a band."""
        rows = rows or self.rows
        return 1 - (1 - jaccard**rows) ** (NUM_VALUES // rows)

    def of(self, texts: Sequence[Sequence[str]]) -> "Sketches":
        """The sketches of one record or more by their texts; a kilobyte each is held for a few thousand at a time."""
        parts = [self._of(texts[at : at + _SKETCHED_AT_ONCE]) for at in range(0, len(texts), _SKETCHED_AT_ONCE)]
        return Sketches(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))

    def _of(self, texts: Sequence[Sequence[str]]) -> tuple[np.ndarray, np.ndarray]:
        values_VN = _filled(_minima([normal(parts) for parts in texts]))
        bands_NB = np.zeros((len(texts), self.num), np.uint64)
        for band in range(self.num):
            for row in range(self.rows):
                bands_NB[:, band] = _mixed(bands_NB[:, band] + values_VN[band * self.rows + row])
        return bands_NB, (values_VN.T >> np.uint64(20)).astype(np.uint8)


@dataclass(frozen=True)
class Sketches:
    """What is kept of N records: `bands_NB`, uint64, and a byte of each MinHash value, `values_NV`, uint8."""

    bands_NB: np.ndarray
    values_NV: np.ndarray

    def __len__(self) -> int:
        return len(self.bands_NB)


# ---- shingles


def normal(texts: Sequence[str]) -> bytes:
    """The texts of one record as shingles are taken of them."""
    return " ".join(" ".join(texts).lower().split()).encode()


def _runs(data: bytes) -> np.ndarray:
    """The hashes of all runs of 12 bytes, in order, as uint64."""
    bytes_N = np.frombuffer(data, np.uint8).astype(np.uint64)
    twos = bytes_N[:-1] * _power(1) + bytes_N[1:]
    fours = twos[:-2] * _power(2) + twos[2:]
    runs = fours[:-8] * _power(8) + fours[4:-4] * _power(4) + fours[8:]
    return _mixed(runs)


def _whole(data: bytes) -> np.ndarray:
    """A short text's one shingle."""
    return np.frombuffer(hashlib.blake2b(data, digest_size=8).digest(), np.uint64)


@cache
def _power(exponent: int) -> np.uint64:
    return np.uint64(pow(_SEED, exponent, 2**64))


def _mixed(values: np.ndarray) -> np.ndarray:
    """Spread 64-bit values evenly over their high bits, by which they are compared."""
    return (values ^ (values >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)


def _chunks(data: bytes) -> Iterator[np.ndarray]:
    """The shingles of a text of any length, in parts."""
    if len(data) < FEWEST_BYTES:
        yield _whole(data)
        return
    for start in range(0, len(data) - SHINGLE_BYTES + 1, _CHUNK_BYTES):
        yield _runs(data[start : start + _CHUNK_BYTES + SHINGLE_BYTES - 1])


def _minima(texts: Sequence[bytes]) -> np.ndarray:
    """The lowest hash of each of 128 bins of each text, shape (128, N); bins without one hold the highest number."""
    lowest_VN = np.full((NUM_VALUES, len(texts)), _EMPTY)
    together, num_bytes = [], 0
    for number, data in enumerate(texts):
        if FEWEST_BYTES <= len(data) < _CHUNK_BYTES:  # several at once are quicker
            together.append((number, data))
            num_bytes += len(data)
            if num_bytes >= _CHUNK_BYTES:
                _lower(lowest_VN, *_joined(together))
                together, num_bytes = [], 0
        else:
            for hashes in _chunks(data):
                _lower(lowest_VN, np.full(len(hashes), number), hashes)
    if together:
        _lower(lowest_VN, *_joined(together))
    return lowest_VN


def _joined(texts: list[tuple[int, bytes]]) -> tuple[np.ndarray, np.ndarray]:
    """The shingles of several texts, and the number of the text that each is of."""
    lengths = np.array([len(data) for _, data in texts])
    number_of = np.repeat([number for number, _ in texts], lengths)
    across = (np.cumsum(lengths)[:, None] - np.arange(1, SHINGLE_BYTES)).ravel()  # from one into the next
    within = np.ones(len(number_of), bool)
    within[across] = False
    within = within[: 1 - SHINGLE_BYTES]
    return number_of[: 1 - SHINGLE_BYTES][within], _runs(b"".join(data for _, data in texts))[within]


def _lower(lowest_VN: np.ndarray, numbers: np.ndarray, hashes: np.ndarray) -> None:
    places = (hashes >> np.uint64(64 - _BIN_BITS)).astype(np.intp) * lowest_VN.shape[1] + numbers
    np.minimum.at(lowest_VN.reshape(-1), places, hashes)


def _filled(values_VN: np.ndarray) -> np.ndarray:
    """Give each empty bin the value of the next that is not, going round, changed by the way there."""
    for value in range(2 * NUM_VALUES - 1, -1, -1):
        here, following = value % NUM_VALUES, (value + 1) % NUM_VALUES
        empty = values_VN[here] == _EMPTY
        step = np.where(values_VN[following] == _EMPTY, np.uint64(0), np.uint64(_SEED))
        values_VN[here] = np.where(empty, values_VN[following] + step, values_VN[here])
    return values_VN


def _distinct(data: bytes, is_sampled: bool) -> np.ndarray:
    parts = [part[part < _SIXTEENTH] if is_sampled else part for part in _chunks(data)]
    return np.unique(np.concatenate(parts))


def _jaccard(a: np.ndarray, b: np.ndarray) -> float:
    """The overlap of two texts' distinct shingles, 0 to 1."""
    shared = len(np.intersect1d(a, b, assume_unique=True))
    return shared / max(1, len(a) + len(b) - shared)


# ---- clusters


class Clusters:
    """Joins the near-duplicates of a ledger, band by band.

    Args:
        text_of: gives the normal text of a record by its row.
        keep: which records count; identical ones are one already.
    """

    def __init__(self, ledger: Ledger, threshold: float, text_of: Callable[[int], bytes], keep: np.ndarray):
        self._ledger, self._threshold, self._text_of, self._keep = ledger, threshold, text_of, keep
        self.components = Components(len(ledger))
        self.num_compared = 0
        self._times_compared = np.zeros(len(ledger), np.uint8)
        self._sets = lru_cache(2)(lambda row, is_sampled: _distinct(self._text_of(row), is_sampled))

    def run(self, on_band: Callable[[], object] = lambda: None) -> Components:
        """Compare all candidates and return what belongs together."""
        for band in range(self._ledger.num_bands):
            for rows in self._ledger.sorted_parts(f"band{band}", "digest", keep=self._keep):
                self._join(rows, self._ledger.pick(f"band{band}", rows))
            on_band()
        return self.components

    def _join(self, rows: np.ndarray, keys: np.ndarray) -> None:
        """Compare each record with the first of its bucket; those that differ, among themselves, and so on."""
        for _ in range(_MAX_ROUNDS):
            is_first = np.diff(keys, prepend=~keys[:1]) != 0
            firsts = rows[np.flatnonzero(is_first)[np.cumsum(is_first) - 1]]
            others = ~is_first
            a, b, keys = firsts[others], rows[others], keys[others]
            if not len(a):
                return
            near = self._are_near(a, b)
            self.components.link(a[near], b[near])
            rows, keys = b[~near], keys[~near]
            if not len(rows):
                return

    def _are_near(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """Whether each pair is near: surely so or surely not by their values, else by their texts, a few times each."""
        near = self.components.linked(a, b)
        asked = np.flatnonzero(~near)
        estimates = self._ledger.agreement(a[asked], b[asked])
        near[asked] = estimates >= self._threshold
        for index in asked[np.abs(estimates - self._threshold) < _UNSURE]:
            if self._times_compared[b[index]] < _MOST_COMPARED:
                self._times_compared[b[index]] += 1
                near[index] = self._is_near(int(a[index]), int(b[index]))
        return near

    def _is_near(self, a: int, b: int) -> bool:
        self.num_compared += 1
        is_sampled = max(len(self._text_of(a)), len(self._text_of(b))) > _SAMPLED_ABOVE
        return _jaccard(self._sets(a, is_sampled), self._sets(b, is_sampled)) >= self._threshold


class Texts:
    """The normal texts of the working copy's records, read where they lie: the file may be larger than memory.

    Args:
        starts: where each line begins, shape (records + 1,).
        text_of_line: makes the normal text of one line.
    """

    def __init__(self, file, starts: np.ndarray, text_of_line: Callable[[bytes], bytes]):
        self._file, self._starts, self._text_of_line = file, starts, text_of_line
        self._recent = lru_cache(2)(self._read)

    def __call__(self, row: int) -> bytes:
        return self._recent(row)

    def _read(self, row: int) -> bytes:
        start, end = int(self._starts[row]), int(self._starts[row + 1])
        return self._text_of_line(os.pread(self._file.fileno(), end - start, start))
