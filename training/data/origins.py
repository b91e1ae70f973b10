"""Where each token of a record comes from: which of its texts, or the template.

Owns the way from a record's texts to tokens' places; where texts stand in a render is `chat`'s. Where a record's
contents cannot be followed, nothing is said.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from training.core.errors import UserError
from training.data import conversation
from training.data.chat import Renderer
from training.tokenizer.template import of_tokenizer

if TYPE_CHECKING:
    from training.tokenizer.artifact import Tokenizer


@dataclass(frozen=True)
class Origins:
    """Names of runs of tokens: `names[i]` is of the tokens from `starts[i]` to the next run."""

    starts: tuple[int, ...]
    names: tuple[str, ...]

    def of(self, token: int) -> str:
        """The name of a token, by its place."""
        return self.names[bisect.bisect_right(self.starts, token) - 1]


def of_tokens(value: dict, ids_N: np.ndarray, tokenizer: Tokenizer, date: str | None) -> Origins:
    """The origins of a valid record's tokens.

    Args:
        date: the day that a template which reads the clock is told.
    """
    talk = conversation.of_record(value)
    if talk is None:
        return _of_texts(value, ids_N, tokenizer)
    try:
        renderer = Renderer(of_tokenizer(tokenizer, date), list(tokenizer.specials))
        rendered, spans = renderer.contents(talk)
    except UserError:
        return Origins((0,), ("",))
    text = tokenizer.with_bos(rendered)
    if not text.startswith(tokenizer.decode(ids_N.tolist())):  # it was shortened
        return Origins((0,), ("",))
    shift = len(text) - len(rendered)
    named = [
        (span[0] + shift, span[1] + shift, f"{talk.place(number)} {message['role']}")
        for number, (message, span) in enumerate(zip(talk.messages, spans, strict=True))
        if span is not None
    ]
    ends_N = np.cumsum(tokenizer.num_bytes_V[ids_N])
    runs = [(0, "template")]
    for first, last, name in _in_bytes(text, sorted(named)):
        runs += [
            (int(np.searchsorted(ends_N, first, "right")), name),
            (int(np.searchsorted(ends_N, last, "right")), "template"),
        ]
    return Origins(*zip(*runs, strict=True))


def _of_texts(value: dict, ids_N: np.ndarray, tokenizer: Tokenizer) -> Origins:
    if "text" in value:
        return Origins((0,), ("text",))
    count = len(tokenizer.encode_plain([value["completion"]])[0]) + 1
    return Origins((0, len(ids_N) - count), ("prompt", "completion"))


def _in_bytes(text: str, spans: Sequence[tuple[int, int, str]]) -> Iterator[tuple[int, int, str]]:
    """Spans of a text in bytes instead of characters, in order; one pass over the text."""
    place = num_bytes = 0
    for start, end, name in spans:
        first = num_bytes + len(text[place:start].encode())
        num_bytes = first + len(text[start:end].encode())
        place = end
        yield first, num_bytes, name
