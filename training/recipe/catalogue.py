"""The recipes that come with the repository: names, headers, and a copy to start from."""

from __future__ import annotations

import contextlib
import difflib
import itertools
import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from training.core import files, paths, store
from training.core.errors import TrainyardError, UserError
from training.recipe import bases
from training.recipe.load import load

FOLDER = paths.REPOSITORY / "recipes"


@dataclass(frozen=True)
class Entry:
    """One recipe of the folder: named by its path without the ending, told by the first line of its header."""

    name: str
    path: Path
    summary: str

    @property
    def shown(self) -> str:
        """The path as commands take it."""
        return str(self.path.relative_to(paths.REPOSITORY))


def entries(folder: Path = FOLDER) -> Iterator[Entry]:
    """Every recipe below the folder, by name; the file of bases is none."""
    for path in sorted(path for path in folder.rglob("*.yaml") if path.is_file()):
        if path != bases.FILE and not _is_other(path):
            name = str(path.relative_to(folder).with_suffix(""))
            yield Entry(name, path, path.read_text(errors="replace").partition("\n")[0].removeprefix("#").strip())


def _is_other(path: Path) -> bool:
    """Whether a YAML file beside the recipes is something else: a recipe says its method or extends one."""
    lines = path.read_text(errors="replace").splitlines()
    return not any(line.startswith(("method:", "extends:")) for line in lines)


def find(name: str) -> Entry:
    """The recipe of a name, a last part of one, or a path. Raises UserError with the nearest name."""
    known = list(entries())
    for entry in known:
        if name in (entry.name, entry.path.stem, entry.path.name) or Path(name).absolute() == entry.path:
            return entry
    near = difflib.get_close_matches(
        name, [one for entry in known for one in (entry.name, entry.path.stem)], 1, cutoff=0.4
    )
    expected = f"perhaps {near[0]}" if near else ", ".join(entry.name for entry in known)
    raise UserError(f"no recipe {name}", found=name, expected=expected, next_command="make recipe")


def copy(name: str, target: Path) -> Path:
    """Copy a recipe to a file or into a folder; the copy has the name of its file, and extends the same recipe.

    Raises UserError where something is there already.
    """
    entry = find(name)
    target = target / entry.path.name if target.is_dir() or str(target).endswith("/") else target
    if target.exists():
        raise UserError(
            "something is there already", where=target, found="a folder" if target.is_dir() else "a file",
            expected="a new name", next_command=f'make recipe ARGS="copy {name} {_free(target)}"',
        )  # fmt: skip
    files.write_text(target, _own(entry.path, target))
    return target


def _free(target: Path) -> Path:
    """The next name like a target's that nothing has: `mine-2.yaml`."""
    numbered = (target.with_stem(f"{target.stem}-{number}") for number in itertools.count(2))
    return next(path for path in numbered if not path.exists())


def on_base(name: str) -> list[Entry]:
    """The valid recipes whose model starts from a base, those of LoRA first, as they fit the smallest machine."""
    named = []
    for entry in entries():
        with contextlib.suppress(TrainyardError):  # what is wrong with a recipe is `check`'s to tell
            recipe = load(entry.path).recipe
            if recipe.model.base == name:
                named.append((recipe.method != "lora", entry.name, entry))
    return [entry for *_, entry in sorted(named)]


def _own(source: Path, target: Path) -> str:
    """A recipe's text with its file's name, in its commands too, and with the files that it names found from there."""
    text = source.read_text()
    text = re.sub(r"^name:.*$", f"name: {_name_of(target)}", text, count=1, flags=re.M)
    commands = r"^(#.*\b(?:CONFIG=|explain ))[^\s\"]+"
    text = re.sub(commands, lambda line: line[1] + shlex.quote(str(target)), text, flags=re.M)

    def moved(match: re.Match) -> str:
        return match[1] + os.path.relpath(source.parent / match[2], target.absolute().parent)

    return re.sub(r"^((?:extends:|model:.*\bconfig:)\s*)([^\s,}#'\"]+)", moved, text, flags=re.M)


def _name_of(target: Path) -> str:
    return store.name_from(target.stem.lower().lstrip("._-"))
