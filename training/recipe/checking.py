"""Finished values held against the schema's ranges, choices and patterns, every violation in people's words."""

from __future__ import annotations

from collections.abc import Callable

from training.core.errors import UserError

_LIMITS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "more than {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "less than {}",
    "minItems": "at least {} items",
    "maxItems": "at most {} items",
    "minLength": "some text",
    "uniqueItems": "each item once",
}


def violations(values: dict, schema: dict, where: Callable[[str], object]) -> dict[str, UserError]:
    """Check values and return one error for each key that breaks the schema; `where(key)` names a key's origin."""
    import jsonschema

    found: dict[str, UserError] = {}
    for error in jsonschema.Draft202012Validator(schema).iter_errors(values):
        path = [str(part) for part in error.absolute_path if not isinstance(part, int)]
        if error.validator == "required":
            for name in error.validator_value:
                if name not in error.instance:
                    key = ".".join([*path, name])
                    found.setdefault(key, UserError(f"{key} is missing", where=where(key)))
            continue
        key = ".".join(path)
        found.setdefault(key, _in_words(key, error, where(key)))
    return found


def _in_words(key: str, error: object, where: object) -> UserError:
    keyword, limit = error.validator, error.validator_value
    if keyword == "enum":
        expected = "one of " + ", ".join(str(choice) for choice in limit)
    elif keyword == "pattern":
        expected = error.schema.get("x-expected", f"text like {limit}")
    elif keyword == "type":
        expected = limit if isinstance(limit, str) else " or ".join(limit)
    elif keyword == "additionalProperties":
        return UserError(f"unknown key in {key or 'the recipe'}", where=where, found=error.message)
    else:
        expected = _LIMITS[keyword].format(limit) if keyword in _LIMITS else error.message
    return UserError(f"{key} cannot be {error.instance!r}", where=where, expected=expected)
