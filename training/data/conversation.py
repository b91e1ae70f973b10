"""A record as a conversation: messages as templates take them, where its prompt ends, and all its texts.

Owns what a record says; knows no template. Of a prompt and a completion in messages, the completion's answers are what
is trained.
"""

import bisect
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, replace
from functools import cached_property

from training.tokenizer.template import REASONING_KEYS, normalised

ANSWERING = "assistant"
OBSERVING = ("tool", "user")
THOUGHT_END = "</think>"


@dataclass(frozen=True)
class Conversation:
    """Messages and what goes with them.

    Args:
        messages: as templates take them.
        tools: the record's own; None where it has none.
        num_prompt: messages before the first that is a completion.
        is_pair: the record has them as `prompt` and `completion`.
    """

    messages: tuple[dict, ...]
    tools: list[dict] | None
    num_prompt: int
    is_pair: bool = False

    @cached_property
    def answers(self) -> tuple[int, ...]:
        """Which messages an assistant says."""
        return tuple(index for index, message in enumerate(self.messages) if message["role"] == ANSWERING)

    @cached_property
    def thinks(self) -> bool:
        """Whether an assistant's message holds a thought, so that thinking is not to be switched off."""
        said = [self.messages[index] for index in self.answers]
        return any(one.get("reasoning_content") or THOUGHT_END in (one.get("content") or "") for one in said)

    @property
    def mixes(self) -> bool:
        """Whether more than one answer is said, or a tool speaks: what a loss on answers alone tells apart (T15)."""
        return len(self.answers) > 1 or any(message["role"] == "tool" for message in self.messages)

    @property
    def ends_with_answer(self) -> bool:
        return bool(self.answers) and self.answers[-1] == len(self.messages) - 1

    def place(self, index: int) -> str:
        """A message's place in its record."""
        if not self.is_pair:
            return f"messages[{index}]"
        return f"prompt[{index}]" if index < self.num_prompt else f"completion[{index - self.num_prompt}]"

    def cut(self, texts: Mapping[int, str], gone: Set[int]) -> "Conversation":
        """The same with other contents of some messages, which then think nothing, and without some."""
        kept = [index for index in range(len(self.messages)) if index not in gone]
        messages = tuple(
            _replaced(self.messages[index], texts[index]) if index in texts else self.messages[index] for index in kept
        )
        return replace(self, messages=messages, num_prompt=bisect.bisect_left(kept, self.num_prompt))

    def first(self, count: int) -> "Conversation":
        """The same with its first messages alone."""
        return replace(self, messages=self.messages[:count])

    def texts(self) -> Iterator[tuple[str, str, bool]]:
        """Yield every text that a template may print, its place, and whether an assistant says it."""
        for index, message in enumerate(self.messages):
            for place, text in _texts(message, self.place(index)):
                yield place, text, message["role"] == ANSWERING
        for place, text in _texts(self.tools or [], "tools"):
            yield place, text, False


def of_record(value: dict) -> Conversation | None:
    """The conversation that a valid record holds; None where it holds plain texts."""
    if "messages" in value:
        messages = normalised(value["messages"])
        first = next((index for index, one in enumerate(messages) if one["role"] == ANSWERING), len(messages))
        return Conversation(tuple(messages), value.get("tools"), first)
    if "prompt" in value and not isinstance(value["prompt"], str):
        completion = value["completion"]
        said = [{"role": ANSWERING, "content": completion}] if isinstance(completion, str) else completion
        messages = normalised([*value["prompt"], *said])
        return Conversation(tuple(messages), value.get("tools"), len(value["prompt"]), is_pair=True)
    return None


def _replaced(message: dict, content: str) -> dict:
    return {key: value for key, value in message.items() if key not in REASONING_KEYS} | {"content": content}


def _texts(value: object, place: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield place, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield place, key
            yield from _texts(item, f"{place}.{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _texts(item, f"{place}[{index}]")
