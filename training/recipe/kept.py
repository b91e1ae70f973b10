"""A resolved recipe as a run keeps it: a recipe file again, with each value's origin as a comment."""

import json
from pathlib import Path

from training.core import files
from training.recipe.load import Resolved


def write(resolved: Resolved, path: Path) -> None:
    """Write `recipe.yaml`; `training.recipe.load.load` reads it back to the same values and the same hash."""
    files.write_text(path, "\n".join(_lines(resolved.values, resolved, "")) + "\n")


def _lines(values: dict, resolved: Resolved, prefix: str) -> list[str]:
    lines = []
    for name, value in values.items():
        key = f"{prefix}{name}"
        indent = "  " * prefix.count(".")
        if isinstance(value, dict) and value:
            lines += [f"{indent}{name}:", *_lines(value, resolved, f"{key}.")]
            continue
        # JSON is YAML, and spells every value in one way.
        text = json.dumps(value, ensure_ascii=False)
        lines.append(f"{indent}{name}: {text}  # {resolved.origins.get(key, 'default')}")
    return lines
