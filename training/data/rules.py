"""The rules that a record is held to: each has a name, by which what breaks it is counted, and says why in words.

Owns the fields' rules; what the line that holds a record must be is `jsonl`'s. Checking gives every reason at once.
Conversations take the Hugging Face message form: `tool_calls`, `tool_call_id`, `name`, `reasoning_content` and
`thinking` beside `role` and `content`, and the record's own `tools`.
"""

import datetime
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from training.data import record
from training.data.record import shown

RULES = {
    "not_utf8": "the bytes are no UTF-8",
    "not_json": "the line is no JSON object that ends where the line ends",
    "several_objects": "more than one object on a line",
    "bad_number": "NaN, Infinity, or a number that JSON cannot hold",
    "duplicate_key": "a key stands twice in one object",
    "half_surrogate": "half of a surrogate pair, which UTF-8 cannot hold",
    "nested_too_deep": "lists and objects within each other, more than 64 deep",
    "too_long": "a longer line than --max-record",
    "damaged": "a packed file of a folder of text that is damaged or cut short",
    "no_object": "the line holds something that is no object",
    "no_form": "the record has none of the forms",
    "missing_key": "a key of the source's form is missing",
    "other_form": "a key of another form than the source's",
    "unknown_key": "a key that no record has; what is one's own belongs under metadata",
    "wrong_type": "a field of another type than its key has",
    "empty": "a text with nothing in it",
    "long_name": "an id, source, group or name of more than 1,024 characters",
    "bad_date": "no date like 2026-11-29, alone or with a time",
    "bad_split": "a split that is none of train, validation, test",
    "bad_role": "a role that is none of system, user, assistant, tool",
    "wrong_order": "turns in an order that no conversation has",
    "empty_turn": "a turn without content, and without a tool call",
    "too_many_turns": "more than 4,096 turns",
    "bad_tool": "a tool, or a call of one, that is not in the Hugging Face form",
    "control_string": "a chat template's control string inside a turn's content",
}
OF_LINES = frozenset(list(RULES)[: list(RULES).index("no_object")])
"""Rules of JSON and of lines: what breaks one of them is no JSON object alone on its line."""
ROLES = ("system", "user", "assistant", "tool")
MAX_DEPTH = 64
MAX_TURNS = 4096
MAX_NAME_CHARACTERS = 1024

CONTROL = re.compile(
    r"<\|(?:im_(?:start|end|sep)|endoftext|endofprompt|begin_of_text|end_of_text|start_header_id|end_header_id|eot_id"
    r"|eom_id|python_tag|start|end|message|channel|return|call|system|user|assistant|observation|tool)\|>"
    r"|<(?:start|end)_of_turn>|\[/?INST\]|<</?SYS>>"
)
"""Control strings of the usual templates; `supervised` holds those of the template in use against every record."""

_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}([T ].*)?")
_FORM_KEYS = {key for keys in record.FORMS.values() for key in keys}


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a record is refused: the rule, and what was found, in words."""

    rule: str
    text: str


def is_date(text: str) -> bool:
    """Whether a text is `YYYY-MM-DD`, alone or with an ISO 8601 time behind it."""
    try:
        return bool(_DATE.fullmatch(text) and datetime.datetime.fromisoformat(text))
    except ValueError:
        return False


def is_day(text: str) -> bool:
    """Whether a text is `YYYY-MM-DD`, without a time."""
    return len(text) == len("YYYY-MM-DD") and is_date(text)


def reasons(value: object, form: str | None) -> list[Reason]:
    """Every reason why a parsed value is no valid record of a form (None: of none yet); empty where it is."""
    if not isinstance(value, dict):
        kind = _kind(value)
        held = "" if kind in ("null", "true", "false") else f" ({shown(value)})"
        return [Reason("no_object", f"the line holds {kind}, not an object{held}")]
    if form is None:
        return [_no_form(value)]
    return list(_record_reasons(value, form))


def _no_form(value: dict) -> Reason:
    shapes = dict.fromkeys(record.FORMS.values())
    forms = " or ".join("{" + ", ".join(f'"{key}"' for key in keys) + "}" for keys in shapes)
    keys = ", ".join(map(shown, value)) or "none"
    return Reason("no_form", f"the record has none of the forms {forms}: its keys are {keys}")


def _record_reasons(value: dict, form: str) -> Iterator[Reason]:
    here = f"(records of this source have the form {form!r})"
    for key in record.FORMS[form]:
        if key not in value:
            yield Reason("missing_key", f"key {key!r} is missing {here}")
    for key, field in value.items():
        if key in record.FORMS[form]:
            yield from _part(key, value, form)
        elif key in _OPTIONAL and (key != "tools" or form in record.OF_MESSAGES):
            yield from _OPTIONAL[key](key, field)
        elif key in _FORM_KEYS or key == "tools":
            yield Reason("other_form", f"key {shown(key)} is of another form {here}")
        else:
            known = ", ".join(name for name in _OPTIONAL if name != "tools")
            yield Reason("unknown_key", f"unknown key {shown(key)} (what is not {known} belongs under metadata)")


# ---- one field each


def _text(key: str, value: object) -> Iterator[Reason]:
    if not isinstance(value, str):
        yield Reason("wrong_type", f"{key!r} is {_kind(value)}, not text")
    elif not value.strip():
        yield Reason("empty", f"{key!r} is empty")


def _name(key: str, value: object) -> Iterator[Reason]:
    yield from _text(key, value)
    if isinstance(value, str) and len(value) > MAX_NAME_CHARACTERS:
        yield Reason("long_name", f"{key!r} has {len(value)} characters")


def _id(key: str, value: object) -> Iterator[Reason]:
    yield from _name(key, record.as_id(value))


def _date(key: str, value: object) -> Iterator[Reason]:
    if not (isinstance(value, str) and is_date(value)):
        yield Reason("bad_date", f"{key!r} is {shown(value)}, not a date like 2026-11-29 or 2026-11-29T21:43:00Z")


def _split(key: str, value: object) -> Iterator[Reason]:
    if value not in record.EXPLICIT_SPLITS:
        yield Reason("bad_split", f"{key!r} is {shown(value)}, not one of {', '.join(record.EXPLICIT_SPLITS)}")


def _metadata(key: str, value: object) -> Iterator[Reason]:
    if not isinstance(value, dict):
        yield Reason("wrong_type", f"{key!r} is {_kind(value)}, not an object")


def _tools(key: str, value: object) -> Iterator[Reason]:
    if not isinstance(value, list) or not value:
        yield Reason("bad_tool", f"{key!r} is {'empty' if value == [] else _kind(value)}, not a list of tools")
        return
    for index, tool in enumerate(value):
        yield from _function(f"tools[{index}]", tool, {"description": str, "parameters": dict, "return": dict})


_OPTIONAL: dict[str, Callable[[str, object], Iterator[Reason]]] = {
    "id": _id,
    "source": _name,
    "group": _name,
    "date": _date,
    "split": _split,
    "metadata": _metadata,
    "tools": _tools,
}


# ---- conversations


def _part(key: str, value: dict, form: str) -> Iterator[Reason]:
    """One of the form's own fields; a completion is held to what its prompt's messages leave to say."""
    if form == "prompt-completion" and key == "completion" and isinstance(value[key], list):
        yield Reason("wrong_type", f"{key!r} is a list, and 'prompt' is not: messages go with a prompt of messages")
    elif form not in record.OF_MESSAGES:
        yield from _text(key, value[key])
    elif key != "completion":
        yield from _turns(key, value[key], [])
    else:
        before = value.get("prompt") if isinstance(value.get("prompt"), list) else []
        if isinstance(value[key], str):
            yield from _text(key, value[key])
            if before:
                yield from _order(key, _last(before), {"role": "assistant"}, is_first=False)
        else:
            yield from _turns(key, value[key], before)


def _turns(key: str, value: object, before: list) -> Iterator[Reason]:
    """Messages, and how they follow those before them; what a completion says first is the assistant's."""
    if not isinstance(value, list):
        yield Reason("wrong_type", f"{key!r} is {_kind(value)}, not a list of messages")
        return
    if not value:
        yield Reason("empty", f"{key!r} is empty")
    if (count := len(before) + len(value)) > MAX_TURNS:
        yield Reason("too_many_turns", f"{key!r} ends with turn {count}")
        return
    last, is_first = _last(before), not before
    for index, message in enumerate(value):
        where = f"{key}[{index}]"
        if not isinstance(message, dict):
            yield Reason("wrong_type", f"{where} is {_kind(message)}, not an object")
            message = {}
        else:
            yield from _message(where, message)
            if key == "completion" and index == 0 and message.get("role") != "assistant":
                yield Reason("wrong_order", f"{where}: a completion begins with the assistant")
            else:
                yield from _order(where, last, message, is_first=is_first)
        last, is_first = message, False


def _last(messages: list) -> dict:
    return messages[-1] if messages and isinstance(messages[-1], dict) else {}


def _message(where: str, message: dict) -> Iterator[Reason]:
    role = message.get("role")
    if role not in ROLES:
        yield Reason("bad_role", f"{where} has the role {shown(role)}, not one of {', '.join(ROLES)}")
    calls = "tool_calls" in message
    if "content" in message and not (message["content"] is None and calls):
        yield from _content(f"{where}: 'content'", message["content"], may_be_empty=calls or role == "tool")
    elif not calls:
        yield Reason("missing_key", f"{where}: key 'content' is missing")
    for key, value in message.items():
        if key in ("role", "content"):
            continue
        if key not in _TURN:
            yield Reason("unknown_key", f"{where}: unknown key {shown(key)}")
        elif role in ROLES and role not in _TURN[key]:
            yield Reason("bad_role", f"{where}: a turn of the role {role!r} has no {key!r}")
        elif key == "tool_calls":
            yield from _calls(where, value)
        elif key in _THOUGHTS:
            yield from _content(f"{where}: {key!r}", value, may_be_empty=True)
        else:
            yield from _name(f"{where}: {key}", value)


_THOUGHTS = ("reasoning_content", "thinking")
_TURN = {
    "tool_calls": ("assistant",), "reasoning_content": ("assistant",), "thinking": ("assistant",),
    "tool_call_id": ("tool",), "name": ROLES,
}  # fmt: skip


def _content(what: str, value: object, may_be_empty: bool) -> Iterator[Reason]:
    if not isinstance(value, str):
        yield Reason("wrong_type", f"{what} is {_kind(value)}, not text")
        return
    if not (may_be_empty or value.strip()):
        yield Reason("empty_turn", f"{what} is empty")
    if ("<" in value or "[" in value) and (found := CONTROL.search(value)):
        yield Reason("control_string", f"{what} holds the control string {found[0]!r} at {found.start() + 1}")


def _order(where: str, before: dict, message: dict, is_first: bool) -> Iterator[Reason]:
    role, last = message.get("role"), before.get("role")
    if role == "system" and not is_first:
        yield Reason("wrong_order", f"{where}: the system speaks first or never")
    elif role in ("assistant", "tool") and (is_first or last == "system"):
        yield Reason("wrong_order", f"{where}: a conversation begins with the user, not with the role {role!r}")
    elif role in ("user", "assistant") and role == last:
        yield Reason("wrong_order", f"{where}: two turns of the role {role!r} in a row")
    elif role == "tool" and last not in ("assistant", "tool"):
        yield Reason("wrong_order", f"{where}: a tool answers the assistant, and no turn of the role {last!r}")
    elif role != "tool" and before.get("tool_calls"):
        yield Reason("wrong_order", f"{where}: the tool calls before it have no answer")


def _calls(where: str, value: object) -> Iterator[Reason]:
    if not isinstance(value, list) or not value:
        yield Reason("bad_tool", f"{where}: 'tool_calls' is {'empty' if value == [] else _kind(value)}, not a list")
        return
    for index, call in enumerate(value):
        place = f"{where}.tool_calls[{index}]"
        yield from _function(place, call, {"arguments": (dict, str)}, needed="arguments")
        if isinstance(call, dict) and not isinstance(call.get("id", ""), str):
            yield Reason("bad_tool", f"{place}: 'id' is {_kind(call['id'])}, not text")


def _function(where: str, value: object, fields: dict, needed: str | None = None) -> Iterator[Reason]:
    """`{"type": "function", "function": {"name": text, ...}}`, the one form that every template knows."""
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or value.get("type", "function") != "function":
        yield Reason("bad_tool", f'{where} is not {{"type": "function", "function": {{"name": ...}}}}')
        return
    if not (isinstance(function.get("name"), str) and function["name"].strip()):
        yield Reason("bad_tool", f"{where}: the function has no name")
    if needed and needed not in function:
        yield Reason("bad_tool", f"{where}: the function has no {needed!r}")
    for key, types in fields.items():
        if key in function and not isinstance(function[key], types):
            yield Reason("bad_tool", f"{where}: {key!r} is {_kind(function[key])}")
    for key in sorted(set(function) - {"name", "strict", *fields}):
        yield Reason("bad_tool", f"{where}: unknown key {shown(key)} of a function")


def _kind(value: object) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    names = {str: "text", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return names[type(value)]
