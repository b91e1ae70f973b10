"""One record: its forms and the one spelling in which it is kept.

Owns what a record is made of; what makes one bad is `rules`'. Knows no file. Forms: `{"text"}`, `{"messages"}`, and
`{"prompt", "completion"}` as two texts or as messages, each with optional `id`, `source`, `group`, `date`, `split`,
`metadata`, and `tools` beside messages.
"""

import hashlib
import json
import reprlib
from collections.abc import Iterator
from dataclasses import dataclass

FORMS: dict[str, tuple[str, ...]] = {
    "text": ("text",),
    "messages": ("messages",),
    "prompt-completion": ("prompt", "completion"),
    "prompt-messages": ("prompt", "completion"),
}
OF_MESSAGES = ("messages", "prompt-messages")
"""Forms whose records are conversations: a prompt of messages is one with its completion, messages or a text."""
EXPLICIT_SPLITS = ("train", "validation", "test")
DIGEST_BYTES = 16

_encoder = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
_PARTS = tuple(dict.fromkeys(key for keys in FORMS.values() for key in keys))
_FORM_KEYS = set(_PARTS)


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


def shown(value: object) -> str:
    """A value as messages show it: short, and with what no terminal prints escaped."""
    shortener = reprlib.Repr()
    shortener.maxstring = 60
    return shortener.repr(value)


def as_id(value: object) -> object:
    """An id as it is kept: an integer, which published data often has, as its decimal text; all else as it is."""
    return str(value) if type(value) is int else value


def form_of(value: object) -> str | None:
    """Recognise a record's form by its keys; None where there is none, or more than one."""
    keys = set(value) & _FORM_KEYS if isinstance(value, dict) else set()
    if "prompt" in keys and isinstance(value["prompt"], list):
        keys -= set(FORMS["prompt-messages"])
        return None if keys or "completion" not in value else "prompt-messages"
    return next((form for form, wanted in FORMS.items() if keys == set(wanted)), None)


def texts(value: dict, *, without_role: str | None = None) -> list[str]:
    """The texts of a valid record, in order: of a turn what it says, what it thinks, and the tools that it calls."""
    found = []
    for part in (value[key] for key in _PARTS if key in value):
        turns = [{"content": part}] if isinstance(part, str) else part
        found += [text for turn in turns if turn.get("role", "") != without_role for text in _said(turn)]
    return found


def own_texts(value: dict) -> list[str]:
    """The texts that are a record's own: without the system's turn, which whole data sets have in common."""
    return texts(value, without_role="system")


def _said(turn: dict) -> Iterator[str]:
    for key in ("reasoning_content", "thinking", "content"):
        if turn.get(key):
            yield turn[key]
    for call in turn.get("tool_calls", ()):
        arguments = call["function"]["arguments"]
        yield call["function"]["name"]
        yield arguments if isinstance(arguments, str) else canonical(arguments).decode()


def field(value: dict, name: str) -> str | None:
    """A named field as text, the record's own or one of its metadata; None where it has none."""
    found = value.get(name, value.get("metadata", {}).get(name))
    return found if found is None or isinstance(found, str) else canonical(found).decode()


def field_names(value: dict) -> list[str]:
    """The names that `field` knows of a record, but for what is said in it."""
    own = [name for name in value if name not in _FORM_KEYS and name not in ("metadata", "tools")]
    return own + [name for name in value.get("metadata", {}) if name not in value]


def build(value: dict, form: str, source: str | None = None) -> Record:
    """Make the record of a valid value.

    Args:
        source: written into a record that names none; it groups nothing.

    Raises ValueError for a lone surrogate or a number that JSON cannot hold.
    """
    group = value.get("group") or value.get("source")
    if source and "source" not in value:
        value = {**value, "source": source}
    date = value.get("date")
    if "id" in value:
        value = {**value, "id": as_id(value["id"])}
    content = _content(value, form)
    return Record(
        line=canonical(value),
        content_digest=hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest(),
        text_bytes=len(content) if form == "text" else sum(len(text.encode()) for text in texts(value)),
        group=group,
        split=value.get("split"),
        day=date[:10] if date else None,
    )


def _content(value: dict, form: str) -> bytes:
    if form == "text":
        return value["text"].encode()
    parts = [value[key] for key in FORMS[form]]
    return canonical([*parts, value["tools"]] if "tools" in value else parts)


def canonical(value: object) -> bytes:
    """The one spelling of a value: UTF-8 without spaces. Raises ValueError as `build` does."""
    return _encoder.encode(value).encode()
