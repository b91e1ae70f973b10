"""A look at a data set: figures by source, lengths, and single records as training sees them.

Owns what is counted and picked; `peek_view` shows it. Without tokens the unit of length is the byte. Nothing is
written, and all of it is a pure function of the data set, the tokens and a seed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from training.core.errors import UserError
from training.data import conversation, record
from training.data.chat import Renderer
from training.data.dataset import Dataset
from training.tokenizer.template import of_tokenizer

if TYPE_CHECKING:
    from training.data.tokens import TokenSplit
    from training.tokenizer.artifact import Tokenizer

NO_SOURCE = "(none)"
_MOST_BINS = 16
_NEARLY_ALL = 99


@dataclass(frozen=True)
class Piece:
    """One token of an example: its id, its text, whether it is a label, and where it comes from."""

    id: int
    text: str
    is_trained: bool
    is_control: bool
    origin: str


@dataclass(frozen=True)
class Example:
    """A record and, where there are tokens, what training reads of it."""

    place: str
    value: dict
    pieces: tuple[Piece, ...]

    @property
    def num_trained(self) -> int:
        return sum(piece.is_trained for piece in self.pieces)


@dataclass(frozen=True)
class SourceFigures:
    """What one source gives; tokens and trained tokens are None where nothing is tokenized."""

    name: str
    num_records: int
    text_bytes: int
    num_tokens: int | None
    num_trained: int | None


class Peek:
    """One split, with its tokens where there are any.

    Args:
        tokens: the split's tokens; None shows records alone.
        tokenizer: the tokens' own.
    """

    def __init__(self, data: Dataset, split: str, tokens: TokenSplit | None = None, tokenizer: Tokenizer | None = None):
        self.data, self.split, self.tokens, self.tokenizer = data, split, tokens, tokenizer

    # ---- lengths

    @cached_property
    def lines(self) -> np.ndarray:
        """The record of each length, as a line number from 0 in the split's file; shape (N,)."""
        return np.arange(len(self._byte_lengths)) if self.tokens is None else np.asarray(self.tokens.records)

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each record that has some, else its bytes of text; shape (N,)."""
        return self._byte_lengths if self.tokens is None else np.diff(self.tokens.offsets.astype(np.int64))

    @property
    def unit(self) -> str:
        return "bytes" if self.tokens is None else "tokens"

    @cached_property
    def trained(self) -> np.ndarray | None:
        """Labels of each record, shape (N,); None without tokens."""
        if self.tokens is None:
            return None
        if self.tokens.trained is None:
            return self.lengths - int(self.tokenizer.bos_id is not None)
        counts = np.concatenate([[0], np.cumsum(self.tokens.trained, dtype=np.int64)])
        return np.diff(counts[self.tokens.offsets.astype(np.int64)])

    def longest(self, count: int) -> list[tuple[str, int]]:
        """The longest records: place and length, the longest first."""
        order = np.argsort(-self.lengths, kind="stable")[:count]
        return [(self.place(int(self.lines[index])), int(self.lengths[index])) for index in order]

    def place(self, line: int) -> str:
        """A line's place as every message names it: `train.jsonl:1` is the first."""
        return f"{self.split}.jsonl:{line + 1}"

    # ---- figures by source

    @cached_property
    def _read(self) -> tuple[list[str], np.ndarray, np.ndarray]:
        """Names of sources, and of each record its source's number and its bytes of text; one pass over the file."""
        numbers, of_record, num_bytes = {}, [], []
        for value in self.data.iter_records(self.split):
            of_record.append(numbers.setdefault(value.get("source") or NO_SOURCE, len(numbers)))
            num_bytes.append(sum(len(text.encode()) for text in record.texts(value)))
        return list(numbers), np.array(of_record, np.int64), np.array(num_bytes, np.int64)

    @property
    def _byte_lengths(self) -> np.ndarray:
        return self._read[2]

    def sources(self) -> list[SourceFigures]:
        """Figures of each source, the one with the most text first."""
        names, of_record, num_bytes = self._read
        count = len(names)

        def total(weights: np.ndarray | None, of: np.ndarray = of_record) -> np.ndarray:
            return np.bincount(of, weights, count).astype(np.int64)

        records, text_bytes = total(None), total(num_bytes)
        if self.tokens is None:
            rows = [
                SourceFigures(name, int(r), int(b), None, None)
                for name, r, b in zip(names, records, text_bytes, strict=True)
            ]
        else:
            of = of_record[self.lines]
            tokens, trained = total(self.lengths, of), total(self.trained, of)
            figures = zip(names, records, text_bytes, tokens, trained, strict=True)
            rows = [SourceFigures(name, int(r), int(b), int(t), int(k)) for name, r, b, t, k in figures]
        return sorted(rows, key=lambda row: (-row.text_bytes, row.name))

    # ---- examples

    def draw(self, count: int, seed: int) -> list[int]:
        """Line numbers of records drawn without repeating, in the order of the draw."""
        order = np.random.default_rng(seed).permutation(len(self.lines))[:count]
        return [int(self.lines[index]) for index in order]

    def examples(self, lines: Sequence[int]) -> Iterator[Example]:
        """Yield the records of these lines, in this order. Raises UserError for a line that the split has not."""
        wanted, values = set(lines), {}
        for number, value in enumerate(self.data.iter_records(self.split)):
            if number in wanted:
                values[number] = value
        for line in lines:
            if line not in values:
                last = self.data.manifest["splits"][self.split]["records"] - 1
                raise UserError(
                    "the split has no such record", where=self.data.reference, found=self.place(line),
                    expected=f"{self.place(0)} to {self.place(last)}",
                )  # fmt: skip
            yield Example(self.place(line), values[line], self._pieces(line, values[line]))

    def _pieces(self, line: int, value: dict) -> tuple[Piece, ...]:
        """The tokens of a record; none where it has none (it was too long, say)."""
        if self.tokens is None:
            return ()
        found = np.flatnonzero(self.lines == line)
        if not len(found):
            return ()
        start, end = (int(self.tokens.offsets[found[0] + step]) for step in (0, 1))
        ids = self.tokens.tokens[start:end].tolist()
        is_trained = self._labels(start, end, ids)
        controls = set(self.tokenizer.specials.values())
        pieces = zip(ids, is_trained, self._origins(value, ids), strict=True)
        return tuple(self._piece(one, bool(flag), one in controls, origin) for one, flag, origin in pieces)

    def _piece(self, one: int, is_trained: bool, is_control: bool, origin: str) -> Piece:
        return Piece(one, self.tokenizer.decode([one]), is_trained, is_control, "control" if is_control else origin)

    def _origins(self, value: dict, ids: list[int]) -> list[str]:
        """What of the record each token is of; where its contents cannot be followed, nothing is said."""
        talk = conversation.of_record(value)
        if talk is None:
            return self._parts(value, ids)
        try:
            rendered, spans = self._renderer.contents(talk)
        except UserError:
            return [""] * len(ids)
        text = self.tokenizer.with_bos(rendered)
        if not text.startswith(self.tokenizer.decode(ids)):  # it was shortened
            return [""] * len(ids)
        shift = len(text) - len(rendered)
        ends = np.cumsum(self.tokenizer.num_bytes_V[ids])
        origins = ["template"] * len(ids)
        for number, (message, span) in enumerate(zip(talk.messages, spans, strict=True)):
            if span is not None:
                first, last = (len(text[: place + shift].encode()) for place in span)
                start, end = np.searchsorted(ends, first, "right"), np.searchsorted(ends, last, "right")
                origins[start:end] = [f"{talk.place(number)} {message['role']}"] * (end - start)
        return origins

    @cached_property
    def _renderer(self) -> Renderer:
        date = self.tokens.manifest.get("labels", {}).get("template_date")
        return Renderer(of_tokenizer(self.tokenizer, date), list(self.tokenizer.specials))

    def _parts(self, value: dict, ids: list[int]) -> list[str]:
        if "text" in value:
            return ["text"] * len(ids)
        count = len(self.tokenizer.encode_plain([value["completion"]])[0]) + 1
        return ["prompt"] * (len(ids) - count) + ["completion"] * count

    def _labels(self, start: int, end: int, ids: list[int]) -> Sequence[int]:
        if self.tokens.trained is not None:
            return self.tokens.trained[start:end].tolist()
        return [int(one != self.tokenizer.bos_id) for one in ids]


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
