"""What of a record its chat template leaves out of the text: tools, calls, thoughts, names, the system's turn, others.

Owns finding it. A private character goes into each part that a template may print, and what does not show in the render
is left out. Where that changes more than itself (the template looks at the part), the part's own text is looked for. A
record of plain turns that all stand in the text, one behind another, is not rendered again.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from training.data.conversation import THOUGHT_END, Conversation
from training.data.marks import Marked, at_middle, insert
from training.tokenizer.template import REASONING_KEYS, Unrenderable

if TYPE_CHECKING:
    from training.data.chat import Renderer

KINDS = {
    "tools": "tools", "tool_calls": "tool calls", "reasoning": "thoughts", "names": "names",
    "system": "system's turn", "turns": "turns",
}  # fmt: skip
"""What can be left out, and in words."""
_THOUGHT_START = "<think>"


@dataclass(frozen=True)
class Part:
    """A text of a record that a template may print; `message` is the number of its message, None for a tool's."""

    kind: str
    message: int | None
    text: str


def left_out(renderer: Renderer, conversation: Conversation, text: str) -> list[Part]:
    """The parts of a conversation that are not in its render."""
    parts: list[Part] = []
    _each(conversation, lambda part: parts.append(part) or part.text)
    if _stand_in_order(parts, text):
        return []
    missing = _without_mark(renderer, conversation, parts, text)
    return [part for part in parts if not _stands(part.text, text)] if missing is None else missing


def _stand_in_order(parts: list[Part], text: str) -> bool:
    """Whether there are plain turns alone, each behind the one before it."""
    place = 0
    for part in parts:
        place = text.find(part.text.strip(), place) if part.kind in ("system", "turns") else -1
        if place < 0:
            return False
        place += len(part.text.strip())
    return True


def _without_mark(renderer: Renderer, conversation: Conversation, parts: list[Part], text: str) -> list[Part] | None:
    """The parts whose marks are not in the render; None where marks change more than themselves."""
    try:
        marks = Marked.free(conversation, len(parts))
        numbered = iter(marks)
        rendered = renderer.text(_each(conversation, lambda part: insert(part.text, next(numbered), at_middle)))
    except Unrenderable:
        return None
    if rendered.translate(dict.fromkeys(map(ord, marks))) != text:
        return None
    shown = set(rendered)  # a conversation has thousands of marks, and its text is long
    return [part for part, mark in zip(parts, marks, strict=True) if mark not in shown]


def _stands(part: str, text: str) -> bool:
    core = part.strip()
    return core in text or json.dumps(core, ensure_ascii=False)[1:-1] in text


def _each(conversation: Conversation, change: Callable[[Part], str]) -> Conversation:
    """The conversation with each part of it as `change` gives it, which is called in one order always."""

    def changed(kind: str, number: int | None, value: object) -> object:
        return change(Part(kind, number, value)) if isinstance(value, str) and value.strip() else value

    messages = tuple(_message(message, number, changed) for number, message in enumerate(conversation.messages))
    return replace(conversation, messages=messages, tools=conversation.tools and _tools(conversation.tools, changed))


def _message(message: dict, number: int, changed: Callable) -> dict:
    result, content = dict(message), message.get("content")
    if "name" in message:
        result["name"] = changed("names", number, message["name"])
    if "reasoning_content" in message:
        thought = changed("reasoning", number, message["reasoning_content"])
        result |= {key: thought for key in REASONING_KEYS if key in message}
    if isinstance(content, str):
        before, end, said = content.rpartition(THOUGHT_END)
        opened, start, thought = before.partition(_THOUGHT_START) if end else ("", "", "")
        thought = thought if start else before
        kind = "system" if message["role"] == "system" else "turns"
        result["content"] = "".join(
            [opened if start else "", start, changed("reasoning", number, thought), end, changed(kind, number, said)]
        )
    if "tool_calls" in message:
        result["tool_calls"] = [_call(call, number, changed) for call in message["tool_calls"]]
    return result


def _call(call: dict, number: int, changed: Callable) -> dict:
    """A call with its name changed, and its arguments: the text, or the first of their names."""
    function = dict(call["function"])
    function["name"] = changed("tool_calls", number, function["name"])
    arguments = function.get("arguments")
    if isinstance(arguments, dict):
        names = list(arguments)
        values = [*(changed("tool_calls", number, name) for name in names[:1]), *names[1:]]
        function["arguments"] = dict(zip(values, arguments.values(), strict=True))
    elif isinstance(arguments, str):
        function["arguments"] = changed("tool_calls", number, arguments)
    return {**call, "function": function}


def _tools(tools: list[dict], changed: Callable) -> list[dict]:
    result = []
    for tool in tools:
        function = dict(tool["function"])
        for key in ("name", "description"):
            if key in function:
                function[key] = changed("tools", None, function[key])
        result.append({**tool, "function": function})
    return result
