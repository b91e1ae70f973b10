"""The champion: the model that `champion.gguf` links to, and how the link is moved so that no crash loses anything.

A change is written down first (`champion.journal.json`: the entry and what the link is to be), then the link is
replaced in one step, then the entry is appended to the history, then the journal goes. Whatever ends a change, the next
command finishes it or takes it back: where the link points to the new model the change has happened.
"""

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from training.core import files, locks, paths
from training.core.errors import IntegrityError, UserError
from training.core.report import again
from training.rounds import history

_VARIABLES = ("LLAMA_GPU_MODEL", "LLAMA_CPU_MODEL")


def link() -> Path:
    return paths.roots().models / "champion.gguf"


def _journal() -> Path:
    return paths.roots().serving / "champion.journal.json"


@contextlib.contextmanager
def changing(what: str) -> Iterator[None]:
    """Hold the championship while the block runs, an unfinished change finished first.

    Raises MachineError, naming the holder, where another change runs.
    """
    lock = paths.roots().serving / "champion.lock"
    with locks.hold(lock, what, wait_seconds=0, resource="the champion"):
        recover()
        yield


def recover() -> None:
    """Finish a change that was cut off, or forget it where the link was not moved yet."""
    if not _journal().exists():
        return
    document = files.read_json(_journal())
    if _target() == document["target"]:
        history.append(document["entry"])
    _forget()


def _forget() -> None:
    _journal().unlink(missing_ok=True)
    files.fsync_path(_journal().parent)


def _target() -> str | None:
    return os.readlink(link()) if link().is_symlink() else None


def move(model: Path, entry: dict) -> None:
    """Let the link name a model and write the entry into the history; the caller holds `changing`."""
    target = os.path.relpath(model.resolve(), link().parent.resolve())
    files.write_json(_journal(), {"schema": 1, "kind": "champion-journal", "target": target, "entry": entry})
    temporary = link().with_name(f".champion.{os.getpid()}.{secrets.token_hex(4)}.partial")
    with files.disk_errors(link()):
        temporary.symlink_to(target)
        try:
            os.replace(temporary, link())
        finally:
            temporary.unlink(missing_ok=True)
        files.fsync_path(link().parent)
    history.append(entry)
    _forget()


def current() -> dict | None:
    """The history's last entry, held against the link and the file; None where there was no champion yet.

    Raises IntegrityError where the link was moved by somebody else, or the champion's file is gone or has changed.
    """
    entries = history.read()
    if not entries:
        if link().exists() or link().is_symlink():
            raise IntegrityError(
                "champion.gguf is there and no history tells how", where=link(), found=_target() or "a file",
                expected="a link that promotion made", next_command=f"mv {link()} {link()}.old",
            )  # fmt: skip
        return None
    entry = entries[-1]
    model = paths.model_path(entry["model"])
    if _target() is None or link().resolve() != model:
        raise IntegrityError(
            "champion.gguf is not the champion of the history", where=link(), found=_target() or "no link",
            expected=entry["model"], next_command="make rollback",
        )  # fmt: skip
    require_file(entry, "make rollback" if history.before(entries) else None)
    return entry


def require_file(entry: dict, next_command: str | None) -> Path:
    """The file of an entry, its bytes verified. Raises IntegrityError where it is gone or changed."""
    model = paths.model_path(entry["model"])
    if not model.is_file():
        raise IntegrityError(
            "the champion's file is gone", where=model, found="nothing",
            expected=f"sha256 {files.short(entry['sha256_model'])}, as a copy may have it",
            next_command=next_command,
        )  # fmt: skip
    if files.sha256_file(model) != entry["sha256_model"]:
        raise IntegrityError(
            "the champion's file has changed", where=model, found="other bytes",
            expected=f"sha256 {files.short(entry['sha256_model'])}, as a copy may have it",
            next_command=next_command,
        )  # fmt: skip
    return model


def require_replaceable(path: Path) -> None:
    """Raise UserError where a file is the champion's, or that of the one that rollback would return to."""
    entries = history.read()
    needed = {"the champion": entries[-1] if entries else None, "what rollback returns to": history.before(entries)}
    for what, entry in needed.items():
        if entry and paths.model_path(entry["model"]) == path.resolve():
            raise UserError(
                f"the file cannot be replaced: it is {what}", where=path,
                found=f"entry {entry['number']} of {history.path().name}", expected="another name for another model",
                next_command=again("--name", f"{path.parent.name}-2"),
            )  # fmt: skip


def require_link_is_served() -> None:
    """Raise UserError where a variable of `.env` or of the environment hides the link from the service."""
    for name in _VARIABLES:
        value, in_file = paths.setting(name, ""), not os.environ.get(name)
        if not value or value == str(paths.CONTAINER_MODELS / link().name):
            continue
        where = ".env" if in_file else "the environment"
        raise UserError(
            "the service would not serve the champion: a variable names another model", where=where,
            found=f"{name}={value}", expected=f"no {name}, so that compose.yaml's {link().name} counts",
            next_command=f"sed -i '/^{name}=/d' .env" if in_file else f"unset {name}",
        )  # fmt: skip
