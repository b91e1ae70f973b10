"""A task that every machine has: from a function's docstring in the standard library to its qualified name.

One conversation a public function or method whose docstring has 20 to 300 characters before its first blank line. It is
asked by the module or class, the description and the parameters; the answer is the qualified name. `group` is the
top-level package or module, so that what is held out is of modules that were never trained on. Left out besides what
`stdlib` leaves out: tests, IDLE, and what only spells other modules (encodings, lib2to3).
"""

import ast
import json
import sys
import warnings
from collections.abc import Callable, Iterator

from training.data.intake import Batch
from training.data.stdlib import StandardLibrary

_LEFT_OUT = {"tests", "idlelib", "lib2to3", "turtledemo", "encodings"}
_SHORTEST, _LONGEST = 20, 300


class Docstrings(StandardLibrary):
    """Functions and their docstrings, in the order of the files and of the functions in them."""

    kind = "stdlib-docstrings"

    def __init__(self):
        super().__init__()
        self.label, self.argument = f"{self.label}-docstrings", "--docstrings"
        self.declared_form = self.form = "messages"

    def batches(self, number: int, name: str | None, max_line_bytes: int, on_bytes: Callable) -> Iterator[Batch]:
        lines, any_size = [], sys.maxsize  # the limit is a record's, and a file holds many
        for batch in super().batches(number, name, any_size, on_bytes):
            for path, data, _ in batch.data:
                lines += [json.dumps(one, ensure_ascii=False).encode() for one in conversations(path, data)]
        yield Batch(number, str(self.folder), 1, b"\n".join(lines) + b"\n", self.form, name)


def conversations(path: str, source: bytes) -> Iterator[dict]:
    """The conversations of one file of the library; none of a file that does not parse."""
    parts = path.removesuffix(".py").split("/")
    if _LEFT_OUT & set(parts):
        return
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    seen = set()
    for owner, function in _functions(tree, ".".join(parts)):
        described = " ".join((ast.get_docstring(function) or "").split("\n\n")[0].split())
        asked = (owner, described)
        if function.name.startswith("_") or not _SHORTEST <= len(described) <= _LONGEST or asked in seen:
            continue
        seen.add(asked)
        names = [one.arg for one in function.args.args if one.arg not in ("self", "cls")]
        kind = "function" if owner == ".".join(parts) else "method"
        asked_for = ", ".join(names) or "none"
        question = f"Which {kind} of {owner} is described here?\n{described}\nIts parameters: {asked_for}"
        yield {
            "messages": [
                {"role": "user", "content": question},
                {"role": "assistant", "content": f"{owner}.{function.name}"},
            ],
            "group": parts[0],
        }  # fmt: skip


def _functions(node: ast.Module | ast.ClassDef, owner: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    for child in node.body:
        if isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{owner}.{child.name}")
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield owner, child
