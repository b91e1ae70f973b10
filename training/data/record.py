"""One record: its three forms, the rules that it is held to, and the one spelling in which it is kept.

Owns what a record may hold; knows no file. Checking gives every reason at once. Forms: `{"text"}`, `{"messages"}`,
`{"prompt", "completion"}`, each with optional `id`, `source`, `group`, `date`, `split`, `metadata`.
"""

import datetime
import hashlib
import json
import re
import reprlib
from collections.abc import Callable
from dataclasses import dataclass

FORMS: dict[str, tuple[str, ...]] = {
    "text": ("text",),
    "messages": ("messages",),
    "prompt-completion": ("prompt", "completion"),
}
ROLES = ("system", "user", "assistant", "tool")
EXPLICIT_SPLITS = ("train", "validation", "test")
DIGEST_BYTES = 16

_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}([T ].*)?")
_encoder = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
_FORM_KEYS = {key for keys in FORMS.values() for key in keys}


@dataclass(frozen=True, slots=True)
class Record:
    """A valid record.

    Args:
        line: its canonical JSON, UTF-8, without a line end.
        content_digest: of the form's own fields, which decides whether two records are duplicates.
        text_bytes: UTF-8 bytes of its texts together.
        group, split, day: for the split; None where the record does not say. `day` is `YYYY-MM-DD`.
    """

    line: bytes
    content_digest: bytes
    text_bytes: int
    group: str | None
    split: str | None
    day: str | None


def is_date(text: str) -> bool:
    """Whether a text is `YYYY-MM-DD`, alone or with an ISO 8601 time behind it."""
    try:
        return bool(_DATE.fullmatch(text) and datetime.datetime.fromisoformat(text))
    except ValueError:
        return False


def shown(value: object) -> str:
    """A value as messages show it: short, and with what no terminal prints escaped."""
    shortener = reprlib.Repr()
    shortener.maxstring = 60
    return shortener.repr(value)


def form_of(value: object) -> str | None:
    """Recognise a record's form by its keys; None where there is none, or more than one."""
    keys = set(value) & _FORM_KEYS if isinstance(value, dict) else set()
    return next((form for form, wanted in FORMS.items() if keys == set(wanted)), None)


def texts(value: dict) -> list[str]:
    """The texts of a valid record, in order."""
    if "text" in value:
        return [value["text"]]
    if "messages" in value:
        return [message["content"] for message in value["messages"]]
    return [value["prompt"], value["completion"]]


def problems(value: object, form: str) -> list[str]:
    """Every reason why a parsed record is not a valid one of this form; empty where it is."""
    if not isinstance(value, dict):
        return [f"the line holds {_kind(value)}, not an object"]
    wanted = FORMS[form]
    here = f"(records of this file have the form {form!r})"
    reasons = [f"key {key!r} is missing {here}" for key in wanted if key not in value]
    for key, field in value.items():
        if key in wanted:
            reasons += _messages_problems(field) if key == "messages" else _text_problems(key, field)
        elif key in _OPTIONAL:
            reasons += _OPTIONAL[key](key, field)
        elif key in _FORM_KEYS:
            reasons.append(f"key {shown(key)} is of another form {here}")
        else:
            reasons.append(f"unknown key {shown(key)} (what is not {', '.join(_OPTIONAL)} belongs under metadata)")
    return reasons


def build(value: dict, form: str) -> Record:
    """Make the record of a valid value. Raises ValueError for a lone surrogate or a number that JSON cannot hold."""
    line = canonical(value)
    content = value["text"].encode() if form == "text" else canonical([value[key] for key in FORMS[form]])
    date = value.get("date")
    return Record(
        line=line,
        content_digest=hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest(),
        text_bytes=len(content) if form == "text" else sum(len(text.encode()) for text in texts(value)),
        group=value.get("group") or value.get("source"),
        split=value.get("split"),
        day=date[:10] if date else None,
    )


def canonical(value: object) -> bytes:
    """The one spelling of a value: UTF-8 without spaces. Raises ValueError as `build` does."""
    return _encoder.encode(value).encode()


# ---- rules, each giving the reasons against one field


def _text_problems(key: str, value: object) -> list[str]:
    if not isinstance(value, str):
        return [f"{key!r} is {_kind(value)}, not text"]
    return [] if value.strip() else [f"{key!r} is empty"]


def _messages_problems(value: object) -> list[str]:
    if not isinstance(value, list):
        return [f"'messages' is {_kind(value)}, not a list"]
    reasons = [] if value else ["'messages' is empty"]
    for index, message in enumerate(value):
        where = f"messages[{index}]"
        if not isinstance(message, dict):
            reasons.append(f"{where} is {_kind(message)}, not an object")
            continue
        if message.get("role") not in ROLES:
            reasons.append(f"{where} has the role {shown(message.get('role'))}, not one of {', '.join(ROLES)}")
        reasons += [f"{where}: {reason}" for reason in _text_problems("content", message.get("content"))]
    return reasons


def _date_problems(key: str, value: object) -> list[str]:
    if isinstance(value, str) and is_date(value):
        return []
    return [f"{key!r} is {shown(value)}, not a date like 2026-11-29 or 2026-11-29T21:43:00Z"]


def _split_problems(key: str, value: object) -> list[str]:
    return [] if value in EXPLICIT_SPLITS else [f"{key!r} is {shown(value)}, not one of {', '.join(EXPLICIT_SPLITS)}"]


def _metadata_problems(key: str, value: object) -> list[str]:
    return [] if isinstance(value, dict) else [f"{key!r} is {_kind(value)}, not an object"]


_OPTIONAL: dict[str, Callable[[str, object], list[str]]] = {
    "id": _text_problems,
    "source": _text_problems,
    "group": _text_problems,
    "date": _date_problems,
    "split": _split_problems,
    "metadata": _metadata_problems,
}


def _kind(value: object) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    names = {str: "text", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return names[type(value)]
