"""A recipe resolved: files and their `extends`, the command line, defaults, all errors at once, every value's origin.

The last word wins: defaults, then the recipe extended (depth first), then the recipe, then the command line. Sections
merge, values and lists replace, and `null` takes a value back. Nothing outside this module reads a recipe's file.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

from training.core import files, paths, report
from training.core.errors import Problems, TrainyardError, UserError
from training.recipe import rules
from training.recipe import schema as schemas
from training.recipe.checking import violations
from training.recipe.model import Recipe
from training.recipe.reading import Origin, Reader, Reading, show, unknown_key
from training.recipe.strict_yaml import Scalar, parse

_DEFAULT = Origin("default")
_COMMAND_LINE = Origin("command line")
_OLD_FOLDER = Path("training/recipes")
_MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class Resolved:
    """A recipe and how it came about; `values` is plain and complete, nulls included."""

    recipe: Recipe
    values: dict
    origins: dict[str, Origin]  # of each leaf
    path: Path
    sha256: str

    @classmethod
    def from_values(cls, values: dict, path: Path = Path("recipe.yaml")) -> Resolved:
        """Rebuild a recipe from values that were resolved before, such as a run folder's. Raises Problems."""
        origins = {key: _DEFAULT for key, _ in schemas.leaves(schemas.recipe_schema())}
        return _resolve(Reading(deepcopy(values), origins), path)

    def changed(self, values: dict[str, object], origin: Origin) -> Resolved:
        """The recipe with other values at some dotted keys, which came from `origin`. Raises Problems."""
        reading = Reading(deepcopy(self.values), dict(self.origins))
        for key, value in values.items():
            _merge(reading, Reading(_nested(key, value), {key: origin}))
        return _resolve(reading, self.path)


def load(path: Path, overrides: Sequence[str] = ()) -> Resolved:
    """Read and resolve a recipe; `overrides` are `dotted.key=value`. Raises Problems with everything that is wrong."""
    path = Path(path)
    reading = _read_chain(path.absolute(), ())
    _merge(reading, _read_overrides(overrides))
    return _resolve(reading, path)


# ---- files


def _read_chain(path: Path, chain: tuple[Path, ...]) -> Reading:
    """Read a file on top of the one that it extends."""
    reading = _read_file(path)
    base = reading.values.pop("extends", None)
    origin = reading.origins.pop("extends", None)
    if base is None:
        return reading
    chain = (*chain, path.resolve())
    try:
        target = _resolved(path.parent / base)
        if target in chain:
            round_trip = " -> ".join(show(step) for step in (*chain, target))
            raise UserError("recipes extend each other in a circle", where=origin, found=round_trip)
        below = _read_chain(target, chain)
    except UserError as error:
        reading.problems.append(UserError(error.what, where=origin, found=error.found or base, expected=error.expected))
        reading.bad_keys |= _every_key()
        return reading
    _merge(below, reading)
    return below


def _resolved(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, ValueError) as error:  # a null byte, a circle of links
        raise UserError("not a file's name", found=repr(str(path)[:80])) from error


def _read_file(path: Path) -> Reading:
    _require_file(path)
    with files.disk_errors(path):
        data = path.read_bytes()
    if len(data) > _MAX_BYTES:
        raise UserError("too large for a recipe", where=show(path), found=f"{len(data)} bytes", expected="under 1 MiB")
    root, problems = parse(data, show(path))
    reader = Reader(schemas.recipe_schema(), lambda line: Origin("file", path, line))
    if root is None and problems:
        reader.reading.problems = problems
        reader.reading.bad_keys = _every_key()
        return reader.reading
    reading = reader.read(root)
    reading.problems = problems + reading.problems
    return reading


def _every_key() -> set[str]:
    """All sections: of a file that could not be read nothing is known, so nothing is called missing."""
    return set(schemas.recipe_schema()["properties"])


def _require_file(path: Path) -> None:
    try:
        if path.is_file():
            return
    except (OSError, ValueError) as error:  # a name that is too long, or holds a null byte
        raise UserError("not a file's name", where=repr(str(path)[:80]), found=error) from error
    expected, command = "a recipe's file; `make recipe` lists those that exist", "make recipe"
    if path.is_relative_to(paths.REPOSITORY / _OLD_FOLDER) or str(_OLD_FOLDER) in str(path):
        moved = Path("recipes") / str(path).partition(f"{_OLD_FOLDER}/")[2]
        if (paths.REPOSITORY / moved).is_file():
            expected = f"{moved}: recipes lie in recipes/"
            command = _same_command(moved)
    found = "a folder" if path.is_dir() else "nothing"
    raise UserError("no such recipe", where=show(path), found=found, expected=expected, next_command=command)


def _same_command(moved: Path) -> str:
    """The command as it was typed, with the recipe's new place in it."""
    words = report.command_line(sys.argv[1:]).split()
    old = [word for word in words if str(_OLD_FOLDER) in word]
    if not old:
        return f"make memfit CONFIG={moved}"
    name = old[0].rpartition("=")[0]
    return " ".join(
        f"{name}={moved}" if word == old[0] and name else str(moved) if word == old[0] else word for word in words
    )


# ---- the command line


def _read_overrides(overrides: Sequence[str]) -> Reading:
    schema, total = schemas.recipe_schema(), Reading()
    for text in overrides:
        key, equals, value = text.partition("=")
        part = schemas.part_of(schema, key) if equals and key != "extends" else None
        where = f"command line: {text}"
        if not equals:
            total.problems.append(UserError("not an override", where=where, expected="dotted.key=value"))
        elif part is None:
            total.problems.append(unknown_key(schema, key, where))
            total.bad_keys.add(key)
        else:
            reading = _read_override(schema, part, key, value, where)
            for twice in sorted(total.origins.keys() & reading.origins.keys()):
                reading.problems.append(UserError(f"{twice} is given twice", where=where, expected="each key once"))
            _merge(total, reading)
    return total


def _read_override(schema: dict, part: dict, key: str, text: str, where: str) -> Reading:
    node, problems = parse(text, where)
    reader = Reader(schema, lambda _: _COMMAND_LINE)
    reader.reading.problems = problems
    if node is None and problems:
        reader.reading.bad_keys.add(key)
        return reader.reading
    value = reader.value(node or Scalar("", True, 1), part, key, 1)
    for problem in reader.reading.problems:
        problem.where = where
    if key not in reader.reading.bad_keys:
        reader.reading.values = _nested(key, value)
    return reader.reading


def _nested(dotted: str, value: object) -> dict:
    for name in reversed(dotted.split(".")):
        value = {name: value}
    return value


# ---- merging and defaults


def _merge(below: Reading, above: Reading) -> None:
    """Lay one reading over another, in place."""
    _merge_values(below.values, above.values, "", below.origins)
    below.origins |= above.origins
    below.problems += above.problems
    below.bad_keys |= above.bad_keys


def _merge_values(below: dict, above: dict, prefix: str, origins: dict[str, Origin]) -> None:
    for name, value in above.items():
        if isinstance(value, dict) and isinstance(below.get(name), dict):
            _merge_values(below[name], value, f"{prefix}{name}.", origins)
            continue
        for key in [key for key in origins if key == f"{prefix}{name}" or key.startswith(f"{prefix}{name}.")]:
            del origins[key]
        below[name] = value


def _fill(values: dict, schema: dict, method: str | None, prefix: str, origins: dict[str, Origin]) -> dict:
    """The values with every default in place, in the schema's order."""
    filled = {}
    for name, part in schema["properties"].items():
        key, methods = f"{prefix}{name}", part.get("x-methods")
        is_section = "properties" in part and "null" not in schemas.types(part)
        given = values.get(name)
        if key == "extends" or (methods and method not in methods and name not in values):
            continue
        if isinstance(given, dict) or (is_section and given is None):
            filled[name] = _fill(given or {}, part, method, f"{key}.", origins)
        elif name in values:
            filled[name] = given
        elif "default" in part:
            filled[name] = _as_read(part["default"], schemas.types(part))
            origins.setdefault(key, _DEFAULT)
    return filled


def _as_read(default: object, types: list[str]) -> object:
    """A default as a file that spells it is read: a number is one with a point, so that both have one hash."""
    is_number = isinstance(default, int) and not isinstance(default, bool) and "integer" not in types
    return float(default) if is_number else deepcopy(default)


def _resolve(reading: Reading, path: Path) -> Resolved:
    schema = schemas.recipe_schema()
    unread = {name: value for name, value in reading.values.items() if name not in schema["properties"]}
    values = _fill(reading.values, schema, reading.values.get("method"), "", reading.origins) | unread

    def where(key: str) -> str:
        inside = (origin for name, origin in reading.origins.items() if name == key or name.startswith(f"{key}."))
        origin = next((origin for origin in inside if origin is not _DEFAULT), show(path))
        return f"{origin}: {key}"

    broken = violations(values, schema, where)
    problems: list[TrainyardError] = list(reading.problems)
    problems += [error for key, error in broken.items() if not any(rules.touches(key, bad) for bad in reading.bad_keys)]
    problems += rules.broken(values, reading.origins, where, reading.bad_keys | broken.keys())
    if problems:
        raise Problems(f"{show(path)} is no valid recipe", problems, next_command="make recipe ARGS=schema")
    recipe = Recipe.build(values, rules.config_path(values, reading.origins))
    return Resolved(recipe, values, reading.origins, path, files.sha256_json(values))
