"""A peek as lines for people and as a picture: tables, lengths, and examples with their trained tokens marked.

On a terminal trained text is green and control tokens are magenta; elsewhere trained text stands in brackets of their
own. What a terminal would obey is printed as an escape, so no record can write to the screen.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from training.core import figure
from training.core.chart import bars
from training.core.units import format_bytes, format_count
from training.data import peek, record

if TYPE_CHECKING:
    from training.data.peek import Example, Peek, Piece
    from training.tokenizer.artifact import Tokenizer

TRAINED_OPEN, TRAINED_CLOSE = "⟦", "⟧"
_GREEN, _MAGENTA, _RESET = "\x1b[32m", "\x1b[35m", "\x1b[0m"
_MOST_SOURCES, _MOST_CHARS = 12, 3000
_MOST_TURNS, _MOST_LINES, _LINE_CHARS = 12, 24, 200
"""Of a record that is shown as it stands: turns, lines of all of them together, and characters of a line."""
_PERCENTILES = (50, 90, 99)
_SHOWN_KEYS = ("id", "source", "group", "date")


def has_colour() -> bool:
    """Whether stderr is a terminal whose owner has not refused colours (NO_COLOR)."""
    return sys.stderr is not None and sys.stderr.isatty() and "NO_COLOR" not in os.environ


def printable(text: str) -> str:
    """A text with everything that is no letter, mark, sign or line written as its escape."""
    return "".join(one if one.isprintable() or one in "\n\t" else repr(one)[1:-1] for one in text)


# ---- tables


def source_lines(look: Peek) -> list[str]:
    """A table of the sources, those with the most text first; beyond a dozen, the rest as one line."""
    rows = look.sources()
    total = sum(row.text_bytes for row in rows) or 1
    lines = [f"{'source':<24} {'records':>9} {'text':>11} {'share':>7}" + _token_heads(rows[0])]
    for row in rows[:_MOST_SOURCES]:
        name = printable(row.name)[:24]
        size = format_bytes(row.text_bytes)
        lines.append(f"{name:<24} {row.num_records:>9} {size:>11} {row.text_bytes / total:>7.1%}" + _token_cells(row))
    if len(rows) > _MOST_SOURCES:
        lines.append(f"... and {len(rows) - _MOST_SOURCES} sources more")
    return lines


def _token_heads(row: peek.SourceFigures) -> str:
    return "" if row.num_tokens is None else f" {'tokens':>10} {'trained':>8}"


def _token_cells(row: peek.SourceFigures) -> str:
    if row.num_tokens is None:
        return ""
    return f" {format_count(row.num_tokens):>10} {row.num_trained / max(1, row.num_tokens):>8.1%}"


# ---- lengths


def percentiles(look: Peek) -> dict[str, int]:
    """The lengths that half, nine in ten and 99 in a hundred records do not exceed, and the longest."""
    if not len(look.lengths):
        return {}
    points = np.percentile(look.lengths, _PERCENTILES, method="higher")
    named = {f"p{name}": int(value) for name, value in zip(_PERCENTILES, points, strict=True)}
    return named | {"max": int(look.lengths.max())}


def length_lines(look: Peek) -> list[str]:
    """The histogram of lengths as bars, and the longest records."""
    found = peek.histogram(look.lengths)
    rows = [(label, count, str(count)) for label, count in zip(found.labels, found.counts, strict=True)]
    spread = "  ".join(f"{name} {value}" for name, value in percentiles(look).items())
    longest = ", ".join(f"{place} ({length})" for place, length in look.longest(3))
    return [f"{look.unit} of a record: {spread}", *bars(rows), f"longest: {longest}"]


def draw_lengths(look: Peek, path: Path) -> None:
    """Draw the histogram of lengths, with the percentiles in its title."""
    found = peek.histogram(look.lengths)
    title = f"{look.data.reference}, {look.split}: {len(look.lengths)} records"
    inches = {"width_inches": 1.5 + 0.42 * len(found.counts), "height_inches": 3.2}
    with figure.drawing(path, title, **inches) as drawn:
        axes = drawn.add_subplot()
        axes.bar(range(len(found.counts)), found.counts, color=figure.BLUE, alpha=0.8)
        axes.set_xticks(range(len(found.counts)), found.labels, rotation=45, ha="right")
        spread = "   ".join(f"{name} {value}" for name, value in percentiles(look).items())
        axes.set(xlabel=f"{look.unit} of a record", ylabel="records", title=f"{title}\n{spread}")


# ---- examples


def example_lines(example: Example, tokenizer: Tokenizer | None, *, colour: bool, with_ids: bool) -> list[str]:
    """One record: what it is, its text with the trained part marked, and, if asked for, a line a token."""
    value = example.value
    about = "  ".join(f"{key} {printable(str(value[key]))}" for key in _SHOWN_KEYS if key in value)
    if not example.pieces:
        missing = "" if tokenizer is None else " (left out: it gives no tokens under these settings)"
        return [f"── {example.place}{missing}  {about}".rstrip(), *_texts(value)]
    counts = f"{example.num_tokens} tokens, {example.num_trained} trained"
    between = f" [... {example.num_tokens - len(example.pieces)} tokens ...] "
    marked = between.join(_marked(part, tokenizer, colour=colour) for part in example.ends)
    lines = [f"── {example.place}  {counts}  {about}".rstrip(), marked]
    return lines + (list(_id_lines(example.pieces)) if with_ids else [])


def _texts(value: dict) -> Iterator[str]:
    """The two ends of a conversation and of each turn, or of a text; what a turn thinks and the tools that it calls
    stand behind what it says."""
    turns = []
    for key in ("text", "messages", "prompt", "completion"):
        part = value.get(key, [])
        turns += [{"role": key, "content": part}] if isinstance(part, str) else part
    most = max(2, _MOST_LINES // min(len(turns), _MOST_TURNS))
    said = (f"{turn['role']}: " + printable(" ".join(record.texts({"messages": [turn]}))) for turn in turns)
    for turn in _ends_of(list(said), _MOST_TURNS, "turns"):
        yield from (_shortened(line, _LINE_CHARS) for line in _ends_of(turn.split("\n"), most, "lines"))


def _ends_of(lines: list[str], most: int, what: str) -> list[str]:
    """A list that is no longer than this, or its two ends with what was left out between them."""
    half = most // 2
    if len(lines) <= most:
        return lines
    return [*lines[:half], f"[... {len(lines) - 2 * half} {what} ...]", *lines[-half:]]


def _marked(pieces: Sequence[Piece], tokenizer: Tokenizer, *, colour: bool) -> str:
    """The text of a record as it is trained; runs are decoded together, since a token may be part of a character."""
    parts = []
    for (trained, control), run in itertools.groupby(pieces, key=lambda one: (one.is_trained, one.is_control)):
        text = printable(tokenizer.decode([piece.id for piece in run]))
        parts.append(_coloured(_shortened(text), trained, control, colour=colour))
    joined = "".join(parts)
    return joined if colour else joined.replace(TRAINED_CLOSE + TRAINED_OPEN, "")


def _coloured(text: str, trained: bool, control: bool, *, colour: bool) -> str:
    if not colour:
        return f"{TRAINED_OPEN}{text}{TRAINED_CLOSE}" if trained else text
    tone = (_GREEN if trained else "") + ("\x1b[1m" if trained and control else _MAGENTA if control else "")
    return f"{tone}{text}{_RESET}" if tone else text


def _shortened(text: str, most: int = _MOST_CHARS) -> str:
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} [... {len(text) - 2 * half} characters ...] {text[-half:]}"


def _id_lines(pieces: Sequence[Piece]) -> Iterator[str]:
    """A line a token: its place, id, text, whether it is a label, and where it comes from."""
    yield f"{'place':>6} {'id':>7} label {'from':<22} text"
    for piece in pieces:
        label = "*" if piece.is_trained else ""
        yield f"{piece.place:>6} {piece.id:>7} {label:>5} {piece.origin:<22} {printable(piece.text)!r}"
