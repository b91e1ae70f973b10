"""A recipe told to people: each resolved key with its origin and meaning, and the table of all keys."""

from __future__ import annotations

import json
from collections.abc import Iterator

from training.recipe import schema as schemas
from training.recipe.load import Resolved


def rows(resolved: Resolved) -> Iterator[dict]:
    """Each leaf of a resolved recipe: `{"key", "value", "origin", "description"}`, in the schema's order."""
    for key, part in schemas.leaves(schemas.recipe_schema()):
        value = resolved.values
        for name in key.split("."):
            value = value.get(name, ...) if isinstance(value, dict) else ...
        if value is not ...:
            origin = str(resolved.origins.get(key, "default"))
            yield {"key": key, "value": value, "origin": origin, "description": part["description"]}


def table() -> str:
    """Every key of the schema as a Markdown table, a section each."""
    lines = ["# The keys of a recipe", "", schemas.recipe_schema()["description"]]
    section = None
    for key, part in schemas.leaves(schemas.recipe_schema()):
        top = key.partition(".")[0] if "." in key else ""
        if top != section:
            section = top
            lines += ["", *_heading(top), "| key | value | default | meaning |", "|---|---|---|---|"]
        default = json.dumps(part["default"]) if "default" in part else ""
        lines.append(f"| `{key}` | {_allowed(part)} | {default} | {part['description']} |")
    return "\n".join(lines) + "\n"


def _heading(section: str) -> list[str]:
    if not section:
        return []
    part = schemas.recipe_schema()["properties"][section]
    methods = part.get("x-methods")
    only = f" Only with method {' or '.join(methods)}." if methods else ""
    return [f"## {section}", "", f"{part['description']}{only}", ""]


def _allowed(part: dict) -> str:
    """The values that a key takes, in a few words."""
    choices = part.get("enum") or part.get("then", {}).get("enum", [])
    others = [name for name in schemas.types(part) if name != "string" or not choices]
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    limits = ", ".join(f"{sign} {part[word]:g}" for word, sign in signs.items() if word in part)
    words = [*choices, *(f"{name} {limits}".strip() if name in ("integer", "number") else name for name in others)]
    return part.get("x-expected") or " or ".join(words)
