"""One record: its three forms and the one spelling in which it is kept.

Owns what a record is made of; what makes one bad is `rules`'. Knows no file. Forms: `{"text"}`, `{"messages"}` (with
optional `tools`), `{"prompt", "completion"}`, each with optional `id`, `source`, `group`, `date`, `split`, `metadata`.
"""

import hashlib
import json
import reprlib
from dataclasses import dataclass

FORMS: dict[str, tuple[str, ...]] = {
    "text": ("text",),
    "messages": ("messages",),
    "prompt-completion": ("prompt", "completion"),
}
EXPLICIT_SPLITS = ("train", "validation", "test")
DIGEST_BYTES = 16

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
    """The texts of a valid record, in order; a turn that only calls tools has none."""
    if "text" in value:
        return [value["text"]]
    if "messages" in value:
        return [message["content"] for message in value["messages"] if message.get("content")]
    return [value["prompt"], value["completion"]]


def own_texts(value: dict) -> list[str]:
    """The texts that are a record's own: without the system's turn, which whole data sets have in common."""
    if "messages" in value:
        value = {"messages": [message for message in value["messages"] if message["role"] != "system"]}
    return texts(value)


def field(value: dict, name: str) -> str | None:
    """A named field as text, the record's own or one of its metadata; None where it has none."""
    found = value.get(name, value.get("metadata", {}).get(name))
    return found if found is None or isinstance(found, str) else canonical(found).decode()


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
