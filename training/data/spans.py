"""Where each answer of a marked render begins and ends.

An answer begins where the server would let it begin: behind the text that the template, asked for that answer, puts
after the message before (B26). It ends with what ends a turn. Owns these places; what is rendered is `chat`'s.
"""

from __future__ import annotations

import bisect
import itertools
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from training.core.errors import UserError
from training.data.marks import Marked, Places
from training.data.supervision import lever
from training.tokenizer.template import Span, Unrenderable

if TYPE_CHECKING:
    from training.data.chat import Renderer

_LINE = re.compile(r"[^\n]*\n|[^\n]+")
_ASKED_FIRST, _MOST_TAILS = 16, 4


class Unfollowable(UserError):
    """A conversation in which what an assistant says cannot be told from its prompt."""


class Spans:
    """The spans of a conversation's answers.

    The server's prompt is rendered for each of the first answers; what it puts behind a message is then known by the
    message's role and fields, so that for later answers it is looked for in the text, and rendered where it is not
    found: a conversation of thousands of turns is rendered a few times.
    """

    def __init__(self, renderer: Renderer, marked: Marked, places: Places, text: str):
        self._renderer, self._marked, self._places, self._text = renderer, marked, places, text
        self._ordered = sorted(places)
        firsts = [min(places[index]) for index in self._ordered]
        behind = itertools.accumulate(reversed(firsts), min)
        self._limits = [*list(behind)[::-1][1:], len(text)]
        self._tails: dict[tuple, list[str]] = {}

    def all(self) -> tuple[Span, ...]:
        """One of each answer, in order."""
        return tuple(
            self._span(index, is_asked=number < _ASKED_FIRST)
            for number, index in enumerate(self._marked.conversation.answers)
        )

    def _span(self, index: int, *, is_asked: bool) -> Span:
        number = bisect.bisect_left(self._ordered, index)
        end = self._renderer.ends.search(self._text, max(self._places[index]), self._limits[number])
        if end is None:
            raise unfollowable("a turn without an end")
        start = None if is_asked else self._known_start(index)
        return (self._start(index) if start is None else start), end.end()

    def _known_start(self, index: int) -> int | None:
        """Where the answer begins if the server writes here what it wrote elsewhere; None where it does not."""
        if index - 1 not in self._places:
            return None
        place = max(self._places[index - 1]) + 1
        tails = self._tails.get(self._kind(index - 1), ())
        return next((place + len(tail) for tail in tails if self._text.startswith(tail, place)), None)

    def _kind(self, index: int) -> tuple:
        message = self._marked.conversation.messages[index]
        return message["role"], *sorted(message)

    def _start(self, index: int) -> int:
        """Where the server lets the answer begin: behind what its prompt has after the message before."""
        marked, places, text = self._marked, self._places, self._text
        try:
            prompt, asked = marked.strip(self._renderer.prompt(marked.before(index)))
        except Unrenderable as error:
            raise unfollowable(f"a prompt that the template refuses ({error.found})") from error
        earlier = self._ordered[: bisect.bisect_left(self._ordered, index)]
        before = next((other for other in reversed(earlier) if other in asked), None)
        anchor, place = (0, 0) if before is None else (max(asked[before]), max(places[before]))
        tail = prompt[anchor:]
        if text.startswith(tail, place):
            if before == index - 1:
                self._learn(index - 1, tail[1:])
            return place + len(tail)
        return self._behind_common(place, tail, marked.first_place(index, min(places[index]), text))

    def _learn(self, index: int, tail: str) -> None:
        tails = self._tails.setdefault(self._kind(index), [])
        if tail not in tails and len(tails) < _MOST_TAILS:
            tails.append(tail)

    def _behind_common(self, place: int, tail: str, limit: int) -> int:
        """Behind what prompt and text have in common: up to the answer's text, else whole lines and control tokens.

        Raises Unfollowable where that is nothing, or a header is still to come.
        """
        if tail.startswith(self._text[place:limit]):
            return limit
        control, start = self._renderer.control, place
        for piece in self._pieces(tail):
            if not self._text.startswith(piece, place) or place + len(piece) > limit:
                break
            place += len(piece)
        if place == start or set(control.findall(self._text, place, limit)) & set(control.findall(tail)):
            raise unfollowable("an answer behind another header than the server's")
        return place

    def _pieces(self, text: str) -> Iterator[str]:
        position = 0
        for token in [*self._renderer.control.finditer(text), None]:
            yield from _LINE.findall(text[position : token.start() if token else len(text)])
            if token:
                yield token[0]
                position = token.end()


def unfollowable(found: str) -> Unfollowable:
    """The error that says what cannot be followed."""
    return Unfollowable(
        "what an assistant says cannot be told from its prompt", where="the chat template", found=found,
        expected="answers that are printed as they stand, or {% generation %} marks around them",
        next_command=lever("loss_on", "all"),
    )  # fmt: skip
