"""A look at a data set: figures by source, lengths, and single records as training sees them.

Owns what is counted and picked; `peek_view` shows it. Without tokens the unit of length is the byte. Nothing is
written, and all of it is a pure function of the data set, the tokens and a seed. The split's file is read once, and
memory is 12 bytes a record and the records that are shown.
"""

from __future__ import annotations

import heapq
import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from training.core.errors import UserError
from training.core.progress import Progress
from training.data import origins, record
from training.data.dataset import Dataset

if TYPE_CHECKING:
    from training.data.tokens import TokenSplit
    from training.tokenizer.artifact import Tokenizer

NO_SOURCE = "(none)"
SHOWN_AT_AN_END = 512
"""Of a record with more than twice as many tokens the first and the last so many are taken apart."""
_MOST_BINS = 16
_NEARLY_ALL = 99


@dataclass(frozen=True)
class Piece:
    """One token of an example: its place, its id, its text, whether it is a label, and where it comes from."""

    place: int
    id: int
    text: str
    is_trained: bool
    is_control: bool
    origin: str


@dataclass(frozen=True)
class Example:
    """A record and, where there are tokens, what training reads of it; of a long one the two ends."""

    place: str
    value: dict
    pieces: tuple[Piece, ...] = ()
    num_tokens: int = 0
    num_trained: int = 0

    @property
    def ends(self) -> tuple[tuple[Piece, ...], ...]:
        """The pieces in one part, or in two where tokens between them are left out."""
        if len(self.pieces) == self.num_tokens:
            return (self.pieces,)
        return self.pieces[:SHOWN_AT_AN_END], self.pieces[SHOWN_AT_AN_END:]


@dataclass(frozen=True)
class SourceFigures:
    """What one source gives; tokens and trained tokens are None where nothing is tokenized."""

    name: str
    num_records: int
    text_bytes: int
    num_tokens: int | None
    num_trained: int | None


@dataclass(frozen=True)
class _Read:
    """One pass over the file: names of sources; of each record its source's number and its bytes of text."""

    names: list[str]
    source_N: np.ndarray
    bytes_N: np.ndarray


class Peek:
    """One split, with its tokens where there are any.

    Args:
        tokens: the split's tokens; None shows records alone.
        tokenizer: the tokens' own.
    """

    def __init__(self, data: Dataset, split: str, tokens: TokenSplit | None = None, tokenizer: Tokenizer | None = None):
        self.data, self.split, self.tokens, self.tokenizer = data, split, tokens, tokenizer
        self._known: _Read | None = None

    # ---- the pass

    def _pass(self, wanted: set[int], num_longest: int = 0) -> dict[int, dict]:
        """Read the split's file, and return the records of some lines, or those with the most text."""
        numbers: dict[str, int] = {}
        of_record, num_bytes = array("I"), array("Q")
        values, heap = {}, []
        with Progress("records", self.num_records, "record") as progress:
            for number, value in enumerate(self.data.iter_records(self.split)):
                size = sum(len(text.encode()) for text in record.texts(value))
                of_record.append(numbers.setdefault(value.get("source") or NO_SOURCE, len(numbers)))
                num_bytes.append(size)
                if number in wanted:
                    values[number] = value
                if num_longest and (len(heap) < num_longest or (size, -number) > heap[0]):
                    values[number] = value
                    if len(heap) == num_longest:
                        del values[-heapq.heappop(heap)[1]]
                    heapq.heappush(heap, (size, -number))
                progress.advance(1)
        self._known = _Read(list(numbers), np.array(of_record), np.array(num_bytes, np.int64))
        return values

    @property
    def _read(self) -> _Read:
        if self._known is None:
            self._pass(set())
        return self._known

    @property
    def num_records(self) -> int:
        return self.data.manifest["splits"][self.split]["records"]

    # ---- lengths

    @cached_property
    def lines(self) -> np.ndarray:
        """The record of each length, as a line number from 0 in the split's file, ascending; shape (N,)."""
        return np.arange(self.num_records) if self.tokens is None else np.asarray(self.tokens.records)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each record that has some, else its bytes of text; shape (N,)."""
        return self._read.bytes_N if self.tokens is None else self._num_tokens_N

    @cached_property
    def _num_tokens_N(self) -> np.ndarray:
        return np.diff(self.tokens.offsets.astype(np.int64))

    @property
    def unit(self) -> str:
        return "bytes" if self.tokens is None else "tokens"

    @cached_property
    def trained(self) -> np.ndarray | None:
        """Labels of each record, shape (N,); None without tokens."""
        if self.tokens is None:
            return None
        if self.tokens.trained is None:
            return self.lengths - 1  # nothing predicts a text's first token
        if not len(self.lengths):
            return self.lengths
        return np.add.reduceat(self.tokens.trained, self.tokens.offsets[:-1].astype(np.int64), dtype=np.int64)

    def longest(self, count: int) -> list[tuple[str, int]]:
        """The longest records: place and length, the longest first."""
        return [(self.place(int(self.lines[index])), int(self.lengths[index])) for index in self._longest(count)]

    def _longest(self, count: int) -> np.ndarray:
        return np.argsort(-self.lengths, kind="stable")[:count]

    def place(self, line: int) -> str:
        """A line's place as every message names it: `train.jsonl:1` is the first."""
        return f"{self.split}.jsonl:{line + 1}"

    # ---- figures by source

    def sources(self) -> list[SourceFigures]:
        """Figures of each source, the one with the most text first."""
        read = self._read
        records, text_bytes = self._totals(None), self._totals(read.bytes_N)
        if self.tokens is None:
            tokens = trained = [None] * len(read.names)
        else:
            of_N = read.source_N[self.lines]
            tokens, trained = (self._totals(weights, of_N).tolist() for weights in (self.lengths, self.trained))
        figures = zip(read.names, records.tolist(), text_bytes.tolist(), tokens, trained, strict=True)
        return sorted((SourceFigures(*row) for row in figures), key=lambda row: (-row.text_bytes, row.name))

    def _totals(self, weights_N: np.ndarray | None, of_N: np.ndarray | None = None) -> np.ndarray:
        read = self._read
        return np.bincount(read.source_N if of_N is None else of_N, weights_N, len(read.names)).astype(np.int64)

    # ---- examples

    def draw(self, count: int, seed: int) -> list[int]:
        """Line numbers of records drawn without repeating, in the order of the draw."""
        chosen = np.random.default_rng(seed).permutation(len(self.lines))[:count]
        return [int(self.lines[index]) for index in chosen]

    def examples(self, lines: Sequence[int]) -> list[Example]:
        """The records of these lines, in this order. Raises UserError for a line that the split has not."""
        for line in lines:
            if not 0 <= line < self.num_records:
                raise UserError(
                    "the split has no such record", where=self.data.reference, found=self.place(line),
                    expected=f"{self.place(0)} to {self.place(self.num_records - 1)}",
                    next_command=f"make data-peek DATASET={self.data.reference} "
                    f'ARGS="--split {self.split} --at {self.num_records}"',
                )  # fmt: skip
        values = self._pass(set(lines))
        return [self._example(line, values[line]) for line in lines]

    def longest_examples(self, count: int) -> list[Example]:
        """The longest records, the longest first."""
        if self.tokens is not None:
            return self.examples([int(self.lines[index]) for index in self._longest(count)])
        values = self._pass(set(), count)
        return [self._example(int(line), values[int(line)]) for line in self._longest(count)]

    def _example(self, line: int, value: dict) -> Example:
        """A record with its tokens; without them where it has none (it was too long, say)."""
        index = -1 if self.tokens is None else int(np.searchsorted(self.lines, line))
        if index < 0 or index == len(self.lines) or self.lines[index] != line:
            return Example(self.place(line), value)
        start, end = (int(self.tokens.offsets[index + step]) for step in (0, 1))
        ids = self.tokens.tokens[start:end]
        is_trained = self.tokens.trained[start:end] if self.tokens.trained is not None else np.arange(len(ids)) > 0
        found = origins.of_tokens(
            value, ids, self.tokenizer, self.tokens.manifest.get("labels", {}).get("template_date")
        )
        pieces = tuple(self._piece(place, int(ids[place]), is_trained, found) for place in _ends(len(ids)))
        return Example(self.place(line), value, pieces, len(ids), int(is_trained.sum()))

    def _piece(self, place: int, one: int, is_trained: np.ndarray, found: origins.Origins) -> Piece:
        is_control = one in self._controls
        origin = "control" if is_control else found.of(place)
        return Piece(place, one, self.tokenizer.decode([one]), bool(is_trained[place]), is_control, origin)

    @cached_property
    def _controls(self) -> frozenset[int]:
        return frozenset(self.tokenizer.specials.values())


def _ends(count: int) -> itertools.chain[int]:
    """The places of the tokens that are taken apart."""
    head = min(count, SHOWN_AT_AN_END)
    return itertools.chain(range(head), range(max(head, count - SHOWN_AT_AN_END), count))


@dataclass(frozen=True)
class Histogram:
    """How many records lie in each range of lengths; a range leaves out its end, and the last one has none."""

    edges: tuple[int, ...]
    counts: tuple[int, ...]

    @property
    def labels(self) -> list[str]:
        """The ranges as people read them: `0-49`, `50-99`, `100+`."""
        *closed, last = self.edges
        return [f"{start}-{end - 1}" for start, end in itertools.pairwise((*closed, last))] + [f"{last}+"]


def histogram(lengths: np.ndarray) -> Histogram:
    """Count lengths in ranges of one round width, 1, 2 or 5 times a power of ten; the last one is open."""
    if not len(lengths):
        return Histogram((0,), (0,))
    near = int(np.percentile(lengths, _NEARLY_ALL, method="higher"))
    widths = (factor * 10**power for power in range(20) for factor in (1, 2, 5))
    width = next(one for one in widths if near // one < _MOST_BINS)
    edges = [width * step for step in range(int(lengths.min()) // width, near // width + 2)]
    counts = np.histogram(lengths, [*edges, max(edges[-1], int(lengths.max())) + 1])[0]
    return Histogram(tuple(edges), tuple(counts.tolist()))
