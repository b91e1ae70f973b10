"""Artifacts by name and hash, `<root>/<name>/<hash12>/`: what a reference means, and when a folder can be reused.

Owns no content: datasets and tokenizers both lie this way. A folder without its manifest does not exist for this
module. `newest` goes by the manifest's time on disk, since no time stands inside a manifest.
"""

import contextlib
import logging
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from training.core import files, locks, paths
from training.core.errors import IntegrityError, UserError

_logger = logging.getLogger(__name__)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def check_name(name: str, what: str) -> str:
    """Return a name that is safe as a folder's. Raises UserError."""
    if not _NAME.fullmatch(name):
        raise UserError(
            f"not a name for a {what}",
            found=repr(name),
            expected="letters, digits, '.', '_' and '-', at most 64, a letter or digit first",
        )
    return name


def name_from(text: str) -> str:
    """The nearest name to a file's stem: `my data (1)` gives `my-data-1`."""
    return re.sub(r"[^A-Za-z0-9._]+", "-", text).strip("-._")[:64] or "data"


def reference(folder: Path) -> str:
    """`name@hash12` of a folder under its root."""
    return f"{folder.parent.name}@{folder.name}"


def reference_to(named: dict) -> str:
    """`name@hash12` of an artifact by what manifests and recipes say of it, `{"name", "hash"}`."""
    return f"{named['name']}@{files.short(named['hash'])}"


def complete_folders(parent: Path) -> list[Path]:
    """The complete artifacts directly under a folder, the newest last."""
    manifests = [path for path in parent.glob(f"[!.]*/{files.MANIFEST}") if path.is_file()]
    return [path.parent for path in sorted(manifests, key=lambda path: (path.stat().st_mtime_ns, str(path)))]


def find(text: str, root: Path) -> Path | None:
    """The folder that `name@hash`, `name` (its newest) or a folder's path means; None where there is none.

    The hash may be shortened; it is the folder's, or the `hash` that its manifest holds.
    """
    if "@" not in text and (Path(text) / files.MANIFEST).is_file():
        return Path(text).absolute()
    name, _, digits = text.partition("@")
    matching = [folder for folder in _named(name, root) if not digits or _has_hash(folder, digits.lower())]
    return matching[-1] if matching else None


def resolve(text: str, root: Path, kind: str, make_command: str) -> Path:
    """What `find` finds. Raises UserError listing what there is, with `make_command` as the way to get one."""
    if folder := find(text, root):
        return folder
    raise UserError(
        f"no such {kind}", where=root, found=f"{text!r}; {there(text, root)}",
        expected=f"name@hash, a name, or the path of a {kind}'s folder", next_command=make_command,
    )  # fmt: skip


def there(text: str, root: Path) -> str:
    """What there is of a reference's name, else every name: `there are: small@0123456789ab`."""
    names = sorted(path.name for path in root.glob("[!.]*") if complete_folders(path))
    of_name = [reference(folder) for folder in _named(text.partition("@")[0], root)]
    return "there are: " + (", ".join(of_name or names) or "none yet")


def _named(name: str, root: Path) -> list[Path]:
    return complete_folders(root / name) if _NAME.fullmatch(name) else []


def _has_hash(folder: Path, digits: str) -> bool:
    if folder.name.startswith(files.short(digits)):
        return True
    return files.read_json(folder / files.MANIFEST).get("hash", "").startswith(digits)


@contextlib.contextmanager
def exclusive(parent: Path, kind: str) -> Iterator[None]:
    """Let one process at a time make what lies in a folder; a failed first one leaves no empty folder behind."""
    lock, resource = parent.with_name(f".{parent.name}.lock"), paths.for_people(parent)
    with files.disk_errors(parent), locks.hold(lock, f"making {kind}", resource=resource):
        files.remove_leftovers(parent)  # also where nothing is made, since all is there
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                parent.rmdir()  # only ever removes an empty one


def reusable(folder: Path, kind: str) -> bool:
    """Whether a folder is complete and every byte is what its manifest says.

    A damaged one is removed with a warning, since the same inputs make it again.
    """
    if not (folder / files.MANIFEST).is_file():
        return False
    try:
        files.verify_manifest(folder, kind)
        return True
    except IntegrityError as error:
        _logger.warning("%s %s is damaged and is made again: %s", kind, reference(folder), error)
        shutil.rmtree(folder)
        return False
