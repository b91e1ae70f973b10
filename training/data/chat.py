"""A conversation as text, and the spans of it that an assistant says: the answer and what ends its turn.

Spans are read off the full render, never from lengths of rendered prefixes, which a template that rewrites earlier
turns makes wrong (B23). Where the template marks what is generated, its marks are the spans. Else each answer is
rendered once more between characters that no text holds; without them the text must be the plain render again, or the
template is refused. A span begins behind the header that the server will add (B26) and ends with the turn's end.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from training.core.errors import UserError
from training.data.supervision import lever
from training.tokenizer.template import Template

_THINK_END = re.compile(r"</think>\s*")
_PLANES = (0xF0000, 0x100000)
"""Where Unicode has 65,534 private characters each; a record that uses both planes is refused."""
_MOST_MESSAGES = 32_000

Span = tuple[int, int]


@dataclass(frozen=True)
class Conversation:
    """A rendered conversation; `answers` are spans of `text` in characters, in order, one an assistant's turn."""

    text: str
    answers: tuple[Span, ...]


class Renderer:
    """Renders conversations by one template.

    Args:
        template: the tokenizer's.
        controls: the texts of its control tokens, by which the end of a turn is known.
    """

    def __init__(self, template: Template, controls: Sequence[str]):
        self.template = template
        ordered = sorted(filter(None, controls), key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, ordered)) or r"(?!)")
        self._headers: tuple[str, str] | None = None

    def render(self, messages: Sequence[dict]) -> Conversation:
        """Render and find the answers. Raises UserError where the template cannot be followed."""
        text = self.template.render(messages)
        if self.template.marks_answers:
            return Conversation(text, tuple(self.template.marked(messages)))
        return Conversation(text, tuple(self._answers(messages, text)))

    def contents(self, messages: Sequence[dict]) -> tuple[str, list[Span]]:
        """The text, and the span of each message's own content in it. Raises UserError where it cannot be followed."""
        text = self.template.render(messages)
        return text, self._places(messages, range(len(messages)), text)

    def prompt(self, messages: Sequence[dict]) -> str:
        """The text up to where the next answer begins."""
        return self.template.render(messages, with_prompt=True)

    # ---- answers by marks of our own

    def _answers(self, messages: Sequence[dict], text: str) -> list[Span]:
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        places = self._places(messages, turns, text)
        # Words that close the conversation close each turn, where no control token does.
        closing = text[places[-1][1] :].strip() if turns and turns[-1] == len(messages) - 1 else ""
        spans, before = [], 0
        for number, (first, last) in enumerate(places):
            start = self._behind_header(text, before, first, messages)
            limit = places[number + 1][0] if number + 1 < len(places) else len(text)
            end = self._turn_end(text, last, limit, closing)
            spans.append((start, end))
            before = end
        return spans

    def _places(self, messages: Sequence[dict], turns: Sequence[int], text: str) -> list[Span]:
        """Where each answer's own text lies in the render: the first of its characters that is kept, and its end."""
        base = _free_plane(messages)
        marked = [dict(message) for message in messages]
        for number, index in enumerate(turns):
            first, last = chr(base + 2 * number), chr(base + 2 * number + 1)
            marked[index]["content"] = _mark(messages[index]["content"], first, last)
        rendered = self.template.render(marked)
        found: dict[int, list[int]] = {}
        plain, position = [], 0
        for character in rendered:
            if base <= ord(character) < base + 2 * len(turns):
                found.setdefault(ord(character) - base, []).append(position)
            else:
                plain.append(character)
                position += 1
        whole = all(2 * number + 1 in found and 2 * number in found for number in range(len(turns)))
        if "".join(plain) != text or not whole:
            raise UserError(
                "the chat template rewrites answers, so that what an assistant says cannot be told from its prompt",
                where="the chat template", found="an answer that is cut, changed or left out",
                expected="answers that are printed as they stand, or {% generation %} marks",
                next_command=lever("loss_on", "all"),
            )  # fmt: skip
        return [(min(found[2 * number]), max(found[2 * number + 1])) for number in range(len(turns))]

    def _behind_header(self, text: str, before: int, first: int, messages: Sequence[dict]) -> int:
        """Where the answer begins: behind the header that the server adds, else behind the longest beginning of it."""
        if self._headers is None:
            self._headers = self._find_headers(messages)
        header, with_thought = self._headers
        for words in (header, *(with_thought[:length] for length in range(len(with_thought), 0, -1))):
            place = text.rfind(words, before, first) if words else -1
            if place >= 0:
                return place + len(words)
        return first

    def _find_headers(self, messages: Sequence[dict]) -> tuple[str, str]:
        """What the template adds where an answer is asked for: with thinking off, and with it on."""
        asked = list(messages[: next(i for i, message in enumerate(messages) if message["role"] == "assistant")])
        plain, found = self.template.render(asked), []
        for variables in ({}, {"enable_thinking": True}):
            prompt = self.template.render(asked, with_prompt=True, **variables)
            found.append(prompt[len(plain) :] if prompt.startswith(plain) else "")
        return found[0], found[1]

    def _turn_end(self, text: str, last: int, limit: int, closing: str) -> int:
        """The end of the first control token behind an answer, else of the words that close a conversation."""
        if token := self._control.search(text, last, limit):
            return token.end()
        if closing and text.startswith(closing, last):
            return last + len(closing)
        raise UserError(
            "the chat template does not end an assistant's turn", where="the chat template",
            found=f"{text[last : last + 20]!r} behind an answer", expected="a control token, which is trained",
            next_command=lever("loss_on", "all"),
        )  # fmt: skip


def _free_plane(messages: Sequence[dict]) -> int:
    if len(messages) > _MOST_MESSAGES:
        raise UserError("a conversation is too long", found=f"{len(messages)} messages", expected=_MOST_MESSAGES)
    highest = [ord(max(message["content"], default=" ")) for message in messages]
    for base in _PLANES:
        if not any(base <= one < base + 0x10000 for one in highest):
            return base
    raise UserError("a conversation uses Unicode's private planes", expected="text without U+F0000 and above")


def _mark(content: str, first: str, last: str) -> str:
    """Put marks around an answer, inside its blanks, and behind each end of a thought, where a template may cut."""
    core = content.strip()
    start = content.index(core) if core else 0
    thought_out = _THINK_END.sub(lambda match: match[0] + first, core)
    opening = "" if core.startswith("<think>") and thought_out != core else first
    return content[:start] + opening + thought_out + last + content[start + len(core) :]
