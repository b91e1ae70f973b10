"""Nodes of YAML read by a schema: the schema, not YAML, decides whether `1e-4` is a number and `no` is text.

Owns types and unknown keys; `training.recipe.checking` holds the finished values against ranges and choices.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from training.core.errors import TrainyardError, UserError
from training.recipe import schema as schemas
from training.recipe.strict_yaml import Items, Mapping, Node, Scalar

_NUMBER = re.compile(r"[-+]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")
_NULLS = ("", "~", "null")
_BOOLEANS = {"true": True, "false": False}
_WORDS = {
    "integer": "a whole number",
    "number": "a finite number such as 1e-4 or 0.1",
    "boolean": "true or false",
    "string": "text",
    "null": "null",
    "array": "a list such as [a, b]",
    "object": "a section of keys",
}


class _NotThis(ValueError):
    """A scalar that is not of the wanted type; the text says what would be."""


@dataclass(frozen=True)
class Origin:
    """Where a value came from: a line of a file, the schema's default, or the command line."""

    kind: str  # "file" | "default" | "command line"
    file: Path | None = None
    line: int | None = None

    def __str__(self) -> str:
        return f"{show(self.file)}:{self.line}" if self.kind == "file" else self.kind


def show(path: Path) -> str:
    """A file's name in messages: relative to the current folder where it lies below."""
    path = Path(path).absolute()
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


@dataclass
class Reading:
    """Values of one source (sections as nested dicts), the origin of each leaf, what was wrong, and at which keys."""

    values: dict = field(default_factory=dict)
    origins: dict[str, Origin] = field(default_factory=dict)
    problems: list[TrainyardError] = field(default_factory=list)
    bad_keys: set[str] = field(default_factory=set)


class Reader:
    """Reads nodes by a schema; a wrong value is left out, its key is noted, and reading goes on."""

    def __init__(self, schema: dict, origin_of_line: Callable[[int], Origin]):
        self.schema = schema
        self.origin_of_line = origin_of_line
        self.reading = Reading()

    def read(self, root: Node | None) -> Reading:
        """Read a whole document."""
        if isinstance(root, Mapping):
            self.reading.values = self._section(root, self.schema, "")
        else:
            where = self.origin_of_line(getattr(root, "line", 1))
            self.reading.problems.append(UserError("no keys", where=where, found=_shown(root), expected="key: value"))
        return self.reading

    def value(self, node: Node, schema: dict, key: str, line: int) -> object:
        """Read one key's value and return it; None, with the key in `bad_keys`, where it is wrong."""
        types = schemas.types(schema)
        if isinstance(node, Mapping) and "object" in types:
            return self._section(node, schema, key)
        try:
            if isinstance(node, Items) and "array" in types:
                value = [_item(item, schema["items"]) for item in node.items]
            elif isinstance(node, Scalar):
                value = read_scalar(node, types)
            else:
                raise _NotThis(_expected(types))
        except _NotThis as error:
            where = self.origin_of_line(line)
            self._problem(
                UserError(f"{key} is of the wrong type", where=where, found=_shown(node) or "nothing", expected=error),
                key,
            )
            return None
        self.reading.origins[key] = self.origin_of_line(line)
        return value

    def _section(self, node: Mapping, schema: dict, key: str) -> dict:
        values = {}
        for name, child in node.entries.items():
            dotted, line = f"{key}.{name}" if key else name, node.lines[name]
            part = schema.get("properties", {}).get(name) or schema.get("additionalProperties")
            if not part:
                self._problem(unknown_key(self.schema, dotted, self.origin_of_line(line)), dotted)
                continue
            value = self.value(child, part, dotted, line)
            if dotted not in self.reading.bad_keys:
                values[name] = value
        return values

    def _problem(self, problem: UserError, key: str) -> None:
        self.reading.problems.append(problem)
        self.reading.bad_keys.add(key)


def unknown_key(schema: dict, dotted: str, where: object) -> UserError:
    """The error of a key that the schema does not know, with the nearest one that it does."""
    near = schemas.nearest(schema, dotted)
    return UserError(f"unknown key {dotted}", where=where, expected=f"perhaps {near}" if near else None)


def _shown(node: Node | None) -> str:
    """A node as a message shows it."""
    if isinstance(node, Scalar):
        return node.text if node.plain else f"{node.text!r}"
    return "nothing" if node is None else "a section" if isinstance(node, Mapping) else "a list"


def _item(node: Node, schema: dict) -> object:
    if not isinstance(node, Scalar):
        raise _NotThis("a list of plain values")
    try:
        return read_scalar(node, schemas.types(schema))
    except _NotThis as error:
        raise _NotThis(f"a list of values that are each {error}, not {_shown(node)}") from None


def read_scalar(node: Scalar, types: list[str]) -> object:
    """A scalar as the first of the allowed types that its text is; quoted text is text only."""
    if not node.plain:
        if "string" in types:
            return node.text
        raise _NotThis(f"{_expected(types)} (without quotes)")
    if "null" in types and node.text in _NULLS:
        return None
    if "boolean" in types and node.text in _BOOLEANS:
        return _BOOLEANS[node.text]
    if ("integer" in types or "number" in types) and _NUMBER.fullmatch(node.text):
        return _number(node.text, types)
    if "string" in types and node.text not in _NULLS:
        return node.text
    raise _NotThis(_expected(types))


def _number(text: str, types: list[str]) -> int | float:
    number = float(text)
    if not math.isfinite(number):
        raise _NotThis(_WORDS["number"])
    whole = number.is_integer() and abs(number) < 2**53
    if "integer" in types and whole and ("number" not in types or re.fullmatch("[-+]?[0-9]+", text)):
        return int(number)
    if "number" not in types:
        raise _NotThis(_WORDS["integer"])
    return number


def _expected(types: list[str]) -> str:
    return " or ".join(_WORDS[name] for name in types)
