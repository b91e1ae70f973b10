"""Private characters in a conversation's messages, by which a render shows where each message's text went.

Owns where marks go and how they are taken out again; what the places mean is `chat`'s. A mark goes inside a text,
beside a character that is no blank, so that trimming and looking at a text's beginning or end change nothing.
"""

import re
from collections.abc import Callable
from dataclasses import replace

from training.data.conversation import Conversation
from training.tokenizer.template import Unrenderable

_PRIVATE = re.compile("[\U000f0000-\U000ffffd\U00100000-\U0010fffd]")
_PLANES = (range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))

Position = Callable[[str], int]
Places = dict[int, list[int]]


class Marked:
    """A conversation with one private character in each message, put before a character that no template looks at.

    Args:
        position: of a text, the index before which its mark goes.
    """

    def __init__(self, conversation: Conversation, position: Position):
        self._plain, self._position = conversation, position
        self._marks = self.free(conversation, len(conversation.messages))
        self._number = {mark: index for index, mark in enumerate(self._marks)}
        messages = [self._with_mark(one, mark) for one, mark in zip(conversation.messages, self._marks, strict=True)]
        self.conversation = replace(conversation, messages=tuple(messages))

    @staticmethod
    def free(conversation: Conversation, count: int) -> list[str]:
        """Private characters that the conversation does not use."""
        used = {one for _, text, _ in conversation.texts() for one in _PRIVATE.findall(text)}
        free = [chr(code) for plane in _PLANES for code in plane[: count + len(used)] if chr(code) not in used]
        if len(free) < count:
            raise Unrenderable(
                "a conversation leaves no private character free", found=f"{count} messages", expected="fewer"
            )
        return free[:count]

    def _with_mark(self, message: dict, mark: str) -> dict:
        """A message with its mark in its content (where it has none, its thought) and in the name of its last call."""
        message = dict(message)
        for key in ("content", "reasoning_content"):
            if isinstance(message.get(key), str) and message[key].strip():
                message[key] = insert(message[key], mark, self._position)
                break
        if calls := message.get("tool_calls"):
            call = dict(calls[-1])
            called = dict(call["function"]) if "function" in call else call
            called["name"] = insert(called["name"], mark, self._position)
            message["tool_calls"] = [*calls[:-1], {**call, "function": called} if "function" in call else called]
        return message

    def before(self, index: int) -> Conversation:
        """The marked messages before one of them."""
        return self.conversation.first(index)

    def strip(self, rendered: str) -> tuple[str, Places]:
        """A render without the marks, and where in it the character behind each message's marks stands."""
        return without(rendered, self._number)

    def first_place(self, index: int, mark: int, text: str) -> int:
        """Where a message's own text begins at the latest."""
        core = (self._plain.messages[index].get("content") or "").strip()
        head = core[: self._position(core)] if core else ""
        return mark - len(head) if head and text.endswith(head, 0, mark) else mark


def at_last(text: str) -> int:
    return len(text) - 1


def at_middle(text: str) -> int:
    return len(text) // 2


def at_start(text: str) -> int:
    return 0


def at_first(text: str) -> int:
    return min(1, len(text) - 1)


def insert(text: str, mark: str, position: Position) -> str:
    """A text with a mark inside it, before the character of its core that `position` names."""
    core = text.strip()
    place = text.index(core) + position(core)
    return text[:place] + mark + text[place:]


def without(rendered: str, numbers: dict[str, int]) -> tuple[str, Places]:
    """A text without marks, and the places in it where each of them stood."""
    places: Places = {}
    parts, position, removed = [], 0, 0
    for match in _PRIVATE.finditer(rendered):
        if match[0] in numbers:
            places.setdefault(numbers[match[0]], []).append(match.start() - removed)
            parts.append(rendered[position : match.start()])
            position, removed = match.end(), removed + 1
    return "".join([*parts, rendered[position:]]), places
