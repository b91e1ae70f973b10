"""The schema as an object: where it is read, how a dotted key finds its part, what a wrong key probably meant.

The words are JSON Schema 2020-12. Of our own annotations `x-also` (what other tools call the key) and `x-expected` (a
pattern in people's words) are a key's. The methods are those of the files `training/objectives/<plugin>.schema.json`:
each says in `x-methods` which it brings and, where it has properties, is the section of its name, which only they have.
What else the other rooms must know of a method it says there too: `x-takes` (sections of other methods that these may
have), `x-models` (the keys of `model` that they begin from), `x-stream` (whether they read texts as a stream, all of it
trained), `x-nf4` (by method, whether the base is in NF4; else it may be beneath an adapter) and `x-loss-bytes` (of a
logit, at the loss's backward pass).
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from training.core import paths

_HERE = Path(__file__).parent
_FRAGMENTS = paths.REPOSITORY / "training" / "objectives"
_SUFFIX = ".schema.json"


@cache
def recipe_schema() -> dict:
    """The whole schema of a recipe, the methods' own sections included."""
    schema = json.loads((_HERE / "schema.json").read_text())
    known = {}
    for name, fragment in _fragments().items():
        known |= fragment["x-methods"]
        if "properties" in fragment:
            schema["properties"][name] = fragment
    told = "; ".join(f"{name}: {meaning}" for name, meaning in known.items())
    method = schema["properties"]["method"]
    method |= {"description": f"{method['description']} {told}.", "enum": list(known)}
    return schema


@cache
def plugins() -> dict[str, str]:
    """The plugin of `training.objectives` that brings each method."""
    return {method: name for name, fragment in _fragments().items() for method in fragment["x-methods"]}


def may_have(method: str, section: str) -> bool:
    """Whether a method may have a section that belongs to other methods."""
    return section in _said(method, "x-takes", ())


def begins_from(method: str) -> list[str]:
    """The keys of `model`, one of which a recipe of the method names."""
    return _said(method, "x-models", ["base", "config"])


def reads_stream(method: str) -> bool:
    """Whether a method reads texts as a stream that is packed, every token of it trained, and no records."""
    return _said(method, "x-stream", False)


def nf4(method: str) -> bool | None:
    """Whether a method's base is in NF4; None where it may be, beneath an adapter."""
    return _said(method, "x-nf4", {}).get(method)


def loss_bytes(method: str) -> int:
    """Bytes of a logit that the loss's own tensors take as its backward pass ends: cross-entropy's where nothing is
    said."""
    return _said(method, "x-loss-bytes", 12)


def _said(method: str, word: str, otherwise: object) -> object:
    """What a method's plugin says of it in its fragment."""
    return _fragments().get(plugins().get(method), {}).get(word, otherwise)


@cache
def _fragments() -> dict[str, dict]:
    paths_by_name = {path.name.removesuffix(_SUFFIX): path for path in sorted(_FRAGMENTS.glob(f"*{_SUFFIX}"))}
    return {name: json.loads(path.read_text()) for name, path in paths_by_name.items()}


def types(schema: dict) -> list[str]:
    """The types that a part of the schema allows."""
    found = schema.get("type", [])
    return [found] if isinstance(found, str) else list(found)


def leaves(schema: dict, prefix: str = "") -> Iterator[tuple[str, dict]]:
    """Every key that holds a value, dotted, in the schema's order."""
    for name, part in schema.get("properties", {}).items():
        key = f"{prefix}{name}"
        if "properties" in part:
            yield from leaves(part, f"{key}.")
        else:
            yield key, part


def part_of(schema: dict, dotted: str) -> dict | None:
    """The schema of a dotted key, or None where there is no such key."""
    for name in dotted.split("."):
        schema = schema.get("properties", {}).get(name)
        if schema is None:
            return None
    return schema


def nearest(schema: dict, dotted: str) -> str | None:
    """The known key that a wrong one probably meant, with what others call it where that is what was typed.

    First the keys beside it, then the same last word elsewhere, then the words of other tools, all by spelling.
    """
    parent, _, name = dotted.rpartition(".")
    beside = part_of(schema, parent) if parent else schema
    siblings = {word: f"{parent}.{word}" if parent else word for word in (beside or {}).get("properties", {})}
    elsewhere = {key.rpartition(".")[2]: key for key, _ in leaves(schema)}
    foreign = {word: f"{key} (elsewhere {word})" for key, part in leaves(schema) for word in part.get("x-also", ())}
    for known in (siblings, elsewhere, foreign):
        if name in known:
            return known[name]
    for known in (siblings, elsewhere, foreign):
        if near := difflib.get_close_matches(name, known, 1, cutoff=0.75):
            return known[near[0]]
    return None
