"""The folder of a name, `$DATA_ROOT/models/trained/<name>/`, and what is in the way there.

Whatever is exported under a name, in any format, lies in this one folder, and one command at a time works in it. A
folder that is empty behind a command goes with it, and so does what a killed one has left.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from training.core import files, paths, store
from training.core.errors import UserError


def folder_of(name: str) -> Path:
    """Where everything of a name lies. Raises UserError for what is no name."""
    return paths.roots().trained / store.check_name(name, "model")


@contextmanager
def hold(name: str) -> Iterator[None]:
    """Let one command at a time export under a name."""
    folder = folder_of(name)
    with store.exclusive(folder / "any", "a model"):
        files.remove_leftovers(folder, is_held=True)
        yield


def taken(
    target: Path, found: str, *, expected: str = "nothing, or the same bytes", forcible: bool = True
) -> UserError:
    """The refusal of what would take the place of another model; `forcible` where the command knows --force."""
    instead = ", or with --force to replace it," if forcible else ""
    return UserError(
        "another model has this name", where=target, found=found, expected=expected,
        next_command=f"the same command with another --name{instead} in ARGS",
    )  # fmt: skip
