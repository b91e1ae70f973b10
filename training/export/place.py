"""The folder of a name, `$DATA_ROOT/models/trained/<name>/`, and what is in the way there.

Whatever is exported under a name, in any format, lies in this one folder, and one command at a time works in it. A
folder that is empty behind a command goes with it, and so does what a killed one has left.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from training.core import files, paths, store
from training.core.errors import UserError
from training.core.report import again

_READY = ".ready"


def folder_of(name: str) -> Path:
    """Where everything of a name lies. Raises UserError for what is no name."""
    return paths.roots().trained / store.check_name(name, "model")


@contextmanager
def hold(name: str) -> Iterator[None]:
    """Let one command at a time export under a name."""
    folder = folder_of(name)
    with store.exclusive(folder, "a model"):
        files.remove_leftovers(folder, is_held=True)
        _settle(folder)
        yield


def publish(made: Sequence[Path], gguf: Path) -> None:
    """Move files to where `gguf` is to lie, its manifest as the last.

    They go through one folder beside it, which gets its name in one step: until then the old files stand, from then on
    the new ones, and a command that is killed on the way is finished by the next one under the name.
    """
    ready = made[0].with_name("ready")
    ready.mkdir()
    for path in made:
        files.fsync_path(path)
        os.replace(path, ready / path.name)
    files.fsync_path(ready)
    os.rename(ready, gguf.with_name(f".{gguf.name}{_READY}"))
    files.fsync_path(gguf.parent)
    _settle(gguf.parent)


def _settle(folder: Path) -> None:
    """Move what is ready to its place: at no moment does a manifest stand beside other bytes than its own."""
    for ready in folder.glob(f".*{_READY}"):
        gguf = folder / ready.name.removeprefix(".").removesuffix(_READY)
        manifest = paths.gguf_manifest(gguf).name
        if (ready / gguf.name).is_file():
            (folder / manifest).unlink(missing_ok=True)
        for path in sorted(ready.iterdir(), key=lambda path: (path.name == manifest, path.name != gguf.name)):
            os.replace(path, folder / path.name)
            files.fsync_path(folder)
        ready.rmdir()


def taken(
    target: Path, found: str, *, expected: str = "nothing, or the same bytes", forcible: bool = True
) -> UserError:
    """The refusal of what would take the place of another model; `forcible` where the command knows --force."""
    return UserError(
        "another model has this name", where=target, found=found,
        expected=expected + ("; --force replaces it" if forcible else ""),
        next_command=again("--name", f"{target.parent.name}-2"),
    )  # fmt: skip
