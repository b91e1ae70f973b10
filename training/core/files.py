"""Files that are either the old ones or the new ones, and the hashes that say which.

Invariants: nothing is written in place; a temporary sibling is flushed to disk and renamed once; a folder's
`manifest.json` is written last, so a folder without one is incomplete. JSON is read strictly (no duplicate keys,
no NaN). This module knows bytes and folders, not what they mean.
"""

import contextlib
import ctypes
import errno
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from training.core.errors import IntegrityError, MachineError, UserError
from training.core.units import format_bytes

MANIFEST = "manifest.json"
_TEMPORARY = ".partial"
_CHUNK_BYTES = 4 << 20
_NOTHING_BYTES = 1 << 20
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
SHORT_HASH_DIGITS = 12


# ---- hashes


def sha256_file(path: Path, on_bytes: Callable[[int], object] | None = None) -> str:
    """Hash a file's bytes in 4 MiB reads; `on_bytes(n)` is called after each, for a progress bar."""
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        buffer = bytearray(_CHUNK_BYTES)
        view = memoryview(buffer)
        while count := file.readinto(buffer):
            digest.update(view[:count])
            if on_bytes:
                on_bytes(count)
    return digest.hexdigest()


def canonical_json(value: object) -> bytes:
    """The one spelling of a JSON value that is hashed: sorted keys, no spaces, UTF-8, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def sha256_json(value: object) -> str:
    """Hash a JSON value by its canonical spelling."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def sealed(document: dict) -> dict:
    """The document with `sha256`, the hash over everything in it but itself."""
    body = {key: value for key, value in document.items() if key != "sha256"}
    return body | {"sha256": sha256_json(body)}


def is_sealed(document: dict) -> bool:
    """Whether a document is what `sealed` made of it."""
    return document.get("sha256") == sealed(document)["sha256"]


def sha256_together(hashes: dict[str, str]) -> str:
    """One hash for files by their names: the only file's own, else that of all of them."""
    return next(iter(hashes.values())) if len(hashes) == 1 else sha256_json(hashes)


def short(digest: str) -> str:
    """The first 12 digits of a hash: the length of every folder name and report line."""
    return digest[:SHORT_HASH_DIGITS]


def file_record(path: Path) -> dict:
    """`{"sha256", "bytes"}` of a file, as manifests hold it."""
    return {"sha256": sha256_file(path), "bytes": path.stat().st_size}


# ---- reading


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"duplicate key {key!r}")
            seen.add(key)
    return result


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


def parse_json(text: str | bytes) -> object:
    """Parse JSON strictly. Raises ValueError on a duplicate key, NaN, Infinity or anything malformed."""
    return json.loads(text, object_pairs_hook=_no_duplicates, parse_constant=_no_constant)


def read_json(path: Path) -> dict:
    """Read one of our own JSON files. Raises IntegrityError where it is missing, empty or malformed."""
    try:
        if path.exists() and not path.is_file():  # a pipe or a device would be read for ever
            raise ValueError("no plain file")
        value = parse_json(path.read_bytes())
        if not isinstance(value, dict):
            raise ValueError(f"a {type(value).__name__} and not an object")
        return value
    except FileNotFoundError:
        raise IntegrityError("a file is missing", where=path, found="nothing", expected="a JSON document") from None
    except (ValueError, RecursionError, IsADirectoryError) as error:
        raise IntegrityError("a JSON file is damaged", where=path, found=error, expected="a JSON object") from error


# ---- writing


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn 'no space', 'read-only' and 'not permitted' into a MachineError that names the place."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _disk_full(path) from error
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise MachineError("the place cannot be written", where=path, found=error.strerror) from error
        raise


def _disk_full(path: Path) -> MachineError:
    return MachineError(
        "the disk is full; nothing that was there before has been touched",
        where=path,
        found=f"{format_bytes(free_bytes(path))} free",
        expected="room for the new file beside the old one",
        next_command="df -h",
    )


def refuse_full_disk(path: Path) -> None:
    """Raise MachineError where nothing is free: why a program of others has failed, whatever its last lines say."""
    if free_bytes(path) < _NOTHING_BYTES:
        raise _disk_full(path)


def require_space(path: Path, needed_bytes: int, what: str) -> None:
    """Raise MachineError when the file system of `path` has less than `needed_bytes` free."""
    free = free_bytes(path)
    if free < needed_bytes:
        raise MachineError(
            f"not enough disk space for {what}",
            where=path,
            found=f"{format_bytes(free)} free",
            expected=f"at least {format_bytes(needed_bytes)}",
            next_command="df -h",
        )


def free_bytes(path: Path) -> int:
    """Bytes that are free where a path lies, or would lie."""
    return shutil.disk_usage(existing_parent(path)).free


def existing_parent(path: Path) -> Path:
    """A path itself where it exists, else the nearest folder above it that does."""
    path = Path(path).absolute()
    while not path.exists():
        path = path.parent
    return path


def _temporary_sibling(target: Path) -> Path:
    return target.with_name(f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}{_TEMPORARY}")


def fsync_path(path: Path) -> None:
    """Flush a file's or a folder's entry to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def atomic_path(target: Path) -> Iterator[Path]:
    """Yield a temporary path beside `target`; flush and rename it on success, remove it on any failure.

    Raises UserError where something stands there that is no plain file: a rename would take a device's place.
    """
    if target.exists() and not target.is_file():
        raise UserError(
            "the place is taken by something that is no file", where=target,
            found="a folder" if target.is_dir() else "a device or a pipe", expected="a new name, or a file to replace",
        )  # fmt: skip
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary_sibling(target)
    try:
        with disk_errors(target):
            yield temporary
            fsync_path(temporary)
            os.replace(temporary, target)
            fsync_path(target.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_bytes(target: Path, data: bytes) -> None:
    """Replace a file's content in one step."""
    with atomic_path(target) as temporary:
        temporary.write_bytes(data)


def write_text(target: Path, text: str) -> None:
    """Replace a file's content in one step, UTF-8 with LF."""
    write_bytes(target, text.encode())


def json_text(value: object) -> str:
    """JSON as files and stdout hold it: indented for people, keys in the order given."""
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def write_json(target: Path, value: object) -> None:
    """Replace a JSON file in one step."""
    write_text(target, json_text(value))


@contextlib.contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Yield a temporary folder beside `target`; flush everything in it and rename it once on success.

    Where `target` already exists as a complete folder (it has a manifest) the new one is discarded: folders are
    named by their content. An incomplete one in the way is removed.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(target.parent)
    temporary = _temporary_sibling(target)
    temporary.mkdir()
    try:
        with disk_errors(target):
            yield temporary
            for path in [*temporary.rglob("*"), temporary]:
                fsync_path(path)
            if target.exists():
                if (target / MANIFEST).exists():
                    return
                shutil.rmtree(target)
            os.rename(temporary, target)
            fsync_path(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def replace_folder(new: Path, target: Path) -> None:
    """Flush a folder and give it its place in one step; what was there before stands where `new` was.

    On a file system that cannot exchange two names it takes two steps. Source: renameat2(2).
    """
    for path in [*new.rglob("*"), new]:
        fsync_path(path)
    if target.exists() and not _exchange(new, target):
        target.rename(new.with_name(f"{new.name}.old"))
    if not target.exists():
        new.rename(target)
    fsync_path(target.parent)


def _exchange(one: Path, other: Path) -> bool:
    """Let two paths change places; False where the file system or the C library cannot."""
    library = ctypes.CDLL(None, use_errno=True)
    names = (_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other))
    if not hasattr(library, "renameat2"):
        return False
    if library.renameat2(*names, _RENAME_EXCHANGE) == 0:
        return True
    if (number := ctypes.get_errno()) in (errno.EINVAL, errno.ENOSYS):
        return False
    raise OSError(number, os.strerror(number), str(other))


@contextlib.contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """Yield a folder for work in progress, which goes when the block ends, or with the next one after a crash."""
    parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(parent)
    folder = _temporary_sibling(parent / "work")
    folder.mkdir()
    try:
        with disk_errors(parent):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_leftovers(folder: Path, *, is_held: bool = False) -> None:
    """Remove the temporary files and folders of processes that no longer run.

    Args:
        is_held: the caller holds the lock that whoever writes there holds, so all of them are left over: a container's
            process ids say nothing here.
    """
    for path in folder.glob(f".*{_TEMPORARY}"):
        owner = path.name.rsplit(".", 3)[1]
        if is_held or (owner.isdigit() and not Path(f"/proc/{owner}").exists()):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


# ---- manifests


def write_manifest(
    folder: Path, kind: str, body: dict, names: Iterable[str] | None = None, *, known: dict[str, dict] | None = None
) -> dict:
    """Write `manifest.json` over the files of a folder (`names`, else all of them) and return it.

    The manifest is `{"schema": 1, "kind": kind, **body, "files": {name: {"sha256", "bytes"}}}`; the records of `known`
    stand in it as they are, so that a large file is hashed once.
    """
    if names is None:
        names = (str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    known = known or {}
    files = {name: known.get(name) or file_record(folder / name) for name in sorted(names) if name != MANIFEST}
    manifest = {"schema": 1, "kind": kind, **body, "files": files}
    write_json(folder / MANIFEST, manifest)
    return manifest


def read_manifest(folder: Path, kind: str) -> dict:
    """Read a folder's manifest. Raises IntegrityError where there is none or it is of another kind."""
    if not (folder / MANIFEST).is_file():
        raise IntegrityError(
            f"not a complete {kind}",
            where=folder,
            found="no manifest.json" if folder.exists() else "no such folder",
            expected=f"the manifest that is written last into every {kind}",
        )
    manifest = read_json(folder / MANIFEST)
    if manifest.get("kind") != kind:
        raise IntegrityError("a folder of another kind", where=folder, found=manifest.get("kind"), expected=kind)
    return manifest


def verify_manifest(folder: Path, kind: str) -> dict:
    """Read a folder's manifest and hash every file in it. Raises IntegrityError naming the first that differs."""
    manifest = read_manifest(folder, kind)
    for name, record in manifest["files"].items():
        verify_file(folder / name, record)
    return manifest


def verify_file(path: Path, record: dict) -> None:
    """Hold a file against `{"sha256", "bytes"}`; sizes are compared first. Raises IntegrityError."""
    if not path.is_file():
        raise IntegrityError("a file is missing", where=path, found="nothing", expected=f"{record['bytes']} bytes")
    size = path.stat().st_size
    if size != record["bytes"]:
        raise IntegrityError(
            "a file has another size", where=path, found=f"{size} bytes", expected=f"{record['bytes']} bytes"
        )
    require_digest(path, sha256_file(path), record)


def require_digest(path: Path, digest: str, record: dict) -> None:
    """Hold a hash that was taken of a file against its record. Raises IntegrityError."""
    if digest != record["sha256"]:
        raise IntegrityError(
            "a file's bytes have changed",
            where=path,
            found=f"sha256 {short(digest)}",
            expected=f"sha256 {short(record['sha256'])}",
        )
