"""A conversation as text, and the spans of it that an assistant says: the answer and what ends its turn.

Spans are read off the full render, never from lengths of rendered prefixes, which a template that rewrites earlier
turns makes wrong (B23). One private character goes into each message; without them the text must be the plain render
again, to the byte, and where they stand tells whose text is where; `spans` tells where an answer begins there. It ends
with the token that ends a turn, which the template shows on a conversation of four words. A template's own
`{% generation %}` marks narrow a span. Where a template cuts or rewrites what is said, only a last turn that the
server's whole prompt leads to is taken, and told; else the conversation is refused.
"""

import bisect
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from training.core.errors import UserError
from training.data.conversation import ANSWERING, Conversation
from training.data.marks import Marked, Places, Position, at_first, at_last, at_middle, at_start, without
from training.data.spans import Spans, Unfollowable, unfollowable
from training.tokenizer.encoder import any_of
from training.tokenizer.template import Span, Template, Unrenderable


@dataclass(frozen=True)
class Rendered:
    """A rendered conversation.

    Args:
        text: what transformers renders.
        spans: of `text` in characters, one for each answer in `answers`, in order.
        answers: the numbers of the messages that the spans are of.
        is_last_only: other answers than the last could not be followed.
    """

    text: str
    spans: tuple[Span, ...]
    answers: tuple[int, ...]
    is_last_only: bool = False


class Renderer:
    """Renders conversations by one template.

    Args:
        template: the tokenizer's.
        controls: the texts of its control tokens, by which the end of a turn is known.
    """

    def __init__(self, template: Template, controls: Sequence[str]):
        self.template = template
        self.control = any_of(controls)

    def render(self, conversation: Conversation) -> Rendered:
        """Render and find the answers. Raises UserError where the template refuses or cannot be followed."""
        text = self.text(conversation)
        if not conversation.answers:
            return Rendered(text, (), ())
        try:
            spans = self._traced(conversation, text)
            if self.template.marks_answers:
                return self._narrowed(conversation, text, spans)
            return Rendered(text, spans, conversation.answers)
        except Unfollowable:
            if self.template.marks_answers:
                return self._narrowed(conversation, text, None)
            return self._last_turn(conversation, text)

    def prompt(self, conversation: Conversation) -> str:
        """The text up to where the next answer begins."""
        return self.text(conversation, prompt=True)

    def contents(self, conversation: Conversation) -> tuple[str, list[Span | None]]:
        """The text, and the span of each message's own content in it. Raises UserError where it cannot be followed."""
        text = self.text(conversation)
        first = self._places(conversation, text, at_start)
        last = self._places(conversation, text, at_last)
        numbers = range(len(conversation.messages))
        spans = [(min(first[i]), max(last[i]) + 1) if i in first and i in last else None for i in numbers]
        return text, spans

    def text(self, conversation: Conversation, *, prompt: bool = False) -> str:
        """What the template makes of a conversation, or of what goes before its next answer. Raises Unrenderable."""
        return self.template.render(
            conversation.messages, tools=conversation.tools, prompt=prompt, thinking=conversation.thinks
        )

    # ---- what the template shows of itself

    @cached_property
    def ends(self) -> re.Pattern:
        """What ends an assistant's turn. Raises UserError where nothing does."""
        texts = dict.fromkeys(filter(None, self._endings()))
        if not texts:
            raise UserError(
                "the chat template ends an answer with nothing, so that no model could learn to stop",
                where="the chat template", found="no token behind a last answer that can be followed",
                expected="a control token of the tokenizer behind each answer",
            )  # fmt: skip
        return re.compile("|".join(map(re.escape, texts)))

    def _endings(self) -> Iterator[str]:
        """The first control token behind a last answer, else the words there; that of other turns; of tool calls."""
        for call in (False, True):
            tail = self._tail(_example(call), -1)
            tokens = self.control.findall(tail)
            last = (tokens[-1] if call else tokens[0]) if tokens else "" if call else tail.strip()
            yield last
            between = self._tail(_example(call, turns=2), 1)
            tokens = self.control.findall(between)
            if len(tokens) > 1 and not call:  # one alone may be the header of the next turn
                yield tokens[0]

    def _tail(self, conversation: Conversation, index: int) -> str:
        """What stands between a message and the next one's content; "" where the template refuses the example."""
        index %= len(conversation.messages)
        try:
            text = self.text(conversation)
            places = self._places(conversation, text, at_last)
        except UserError:
            return ""
        if index not in places:
            return ""
        after = [place for other, found in places.items() if other > index for place in found]
        return text[max(places[index]) + 1 : min(after, default=len(text))]

    # ---- answers by marks of our own

    def _traced(self, conversation: Conversation, text: str) -> tuple[Span, ...]:
        """The span of each answer, in order."""
        marked = places = None
        for position in (at_last, at_middle, at_first):
            marked = Marked(conversation, position)
            places = self._found(marked, text)
            if places is not None and all(index in places for index in conversation.answers):
                break
        else:
            raise unfollowable("an answer that is cut, changed or left out")
        return Spans(self, marked, places, text).all()

    def _places(self, conversation: Conversation, text: str, position: Position) -> Places:
        places = self._found(Marked(conversation, position), text)
        if places is None:
            raise unfollowable("a text that is cut or changed")
        return places

    def _found(self, marked: Marked, text: str) -> Places | None:
        """Where in `text` the marked character of each message stands; None where marks change more than themselves."""
        try:
            plain, places = marked.strip(self.text(marked.conversation))
        except Unrenderable:
            return None
        return places if plain == text else None

    # ---- answers by the template's marks, or the last alone

    def _narrowed(self, conversation: Conversation, text: str, spans: tuple[Span, ...] | None) -> Rendered:
        """The spans that the template marks, each with the end of its turn and without what the server writes."""
        opening, closing = Marked.free(conversation, 2)
        rendered = self.template.marked(
            conversation.messages, opening, closing, tools=conversation.tools, thinking=conversation.thinks
        )
        plain, found = without(rendered, {opening: 0, closing: 1})
        if plain != text or len(found.get(0, ())) != len(found.get(1, ())):
            raise unfollowable("generation marks that change the text")
        marked, answers = list(zip(found.get(0, ()), found.get(1, ()), strict=True)), conversation.answers
        if spans is None and len(marked) != len(answers) and answers[0] < conversation.num_prompt:
            raise unfollowable("marks of which nobody can tell whether they are a prompt's")
        result, of = [], []
        for place, (start, end) in enumerate(marked):
            number = _covering(spans, start, end) if spans else place if len(marked) == len(answers) else None
            if spans and number is not None:
                start = max(start, spans[number][0])
            result.append((start, self._marked_end(text, start, end)))
            of.append(-1 if number is None else answers[number])
        return Rendered(text, tuple(result), tuple(of))

    def _marked_end(self, text: str, start: int, end: int) -> int:
        """The end of a marked span: that of the turn, which some templates leave outside, without blanks behind it."""
        inside = [match.end() for match in self.ends.finditer(text, start, end)]
        if inside:
            return inside[-1]
        behind = re.compile(r"\s*").match(text, end).end()
        if match := self.ends.match(text, behind):
            return match.end()
        raise unfollowable("generation marks without the end of the turn")

    def _last_turn(self, conversation: Conversation, text: str) -> Rendered:
        """The last answer, where the server's prompt for it is how the text begins."""
        last = len(conversation.messages) - 1
        if conversation.ends_with_answer and last > 0:
            prompt = self.text(conversation.first(last), prompt=True)
            end = self.ends.search(text, len(prompt))
            if text.startswith(prompt) and end:
                span = (len(prompt), end.end())
                return Rendered(text, (span,), (last,), is_last_only=len(conversation.answers) > 1)
        raise unfollowable("an answer that is cut, changed or left out")


def _covering(spans: Sequence[Span], start: int, end: int) -> int | None:
    """The last span that begins before `end` and ends behind `start`."""
    number = bisect.bisect_left([span[0] for span in spans], end) - 1
    return number if number >= 0 and spans[number][1] > start else None


def _example(with_call: bool, turns: int = 1) -> Conversation:
    call = {"type": "function", "id": "call00001", "function": {"name": "look", "arguments": {}}}
    answer = {"role": ANSWERING, "content": "" if with_call else "word"}
    if with_call:
        answer["tool_calls"] = [call]
    look = {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}}
    messages = [{"role": "user", "content": "word"}, answer] * turns
    return Conversation(tuple(messages), [{"type": "function", "function": look}] if with_call else None, 1)
