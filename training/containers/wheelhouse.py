"""The folder of wheels that the images are filled from, so that they are built without a network.

pip fetches it here, on the host: indexes, mirrors, credentials and certificates are the machine's own and enter no
build. Each wheel is held against the lock file's hashes, here and again inside the build.
"""

import logging
import os
import re
import subprocess
import sys
from pathlib import Path

from training.core import files, locks, paths
from training.core.errors import IntegrityError, MachineError, UserError

_logger = logging.getLogger(__name__)
_COMPLETE = "complete.json"
_ERROR_LINES = 6


def lock_path(name: str) -> Path:
    """A lock file by its name, `cpu` or `cuda`. Raises UserError."""
    path = paths.REPOSITORY / "docker" / f"{name}.lock"
    if not path.is_file():
        known = ", ".join(sorted(lock.stem for lock in path.parent.glob("*.lock")))
        raise UserError("no such lock file", where="--lock", found=name, expected=known)
    return path


def excerpt(lock: Path, packages: tuple[str, ...]) -> str:
    """The lock file's entries of some packages, with their hashes."""
    entries = re.findall(r"^(?![\s#])(?:.*\\\n)*.*\n?", lock.read_text(), flags=re.M)
    wanted = [entry for entry in entries if entry.partition("==")[0] in packages]
    if len(wanted) != len(packages):
        raise IntegrityError("the lock file lacks a package", where=lock, expected=", ".join(packages))
    return "".join(wanted)


def default_folder(lock: Path) -> Path:
    """Where the wheels of a lock file lie, or would lie, in the machine's cache."""
    return paths.roots().cache / "wheels" / f"{lock.stem}-{files.short(files.sha256_file(lock))}"


def ensure(lock: Path, folder: Path | None = None) -> Path:
    """The folder with every wheel of the lock file, fetched where it is not complete; `folder` None takes the cache."""
    folder = folder or default_folder(lock)
    digest = files.sha256_file(lock)
    if is_complete(folder, digest):  # before the lock: a complete folder may be on a medium that cannot be written
        return folder
    with locks.hold(folder.parent / "wheels.lock", "make wheelhouse", resource="the folder of wheels"):
        if not is_complete(folder, digest):
            _download(lock, folder)
            files.write_json(folder / _COMPLETE, {"lock_sha256": digest})
    return folder


def is_complete(folder: Path, lock_sha256: str) -> bool:
    """Whether a folder was filled for a lock file and still has its wheels."""
    mark = folder / _COMPLETE
    return mark.is_file() and files.read_json(mark)["lock_sha256"] == lock_sha256 and any(folder.glob("*.whl"))


def _download(lock: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--require-hashes", "--only-binary", ":all:", "--no-deps"]
    command += ["--requirement", str(lock), "--dest", str(folder), "--disable-pip-version-check", "--quiet"]
    certificate = paths.setting("EXTRA_CA", "")
    environment = os.environ | ({"PIP_CERT": certificate} if certificate else {})
    _logger.info("fetching the wheels of %s with pip", lock.name)
    result = subprocess.run(command, env=environment, stdout=2, stderr=subprocess.PIPE, text=True, errors="replace")
    if result.returncode != 0:
        lines = "\n".join(result.stderr.strip().splitlines()[-_ERROR_LINES:])
        kind = IntegrityError if "DO NOT MATCH THE HASHES" in result.stderr else MachineError
        raise kind(
            "the wheels could not be fetched",
            where=f"pip download -r docker/{lock.name}",
            found=lines,
            expected="its packages with their hashes; README.md, 'If the set-up fails', names pip's settings",
            next_command="make wheelhouse",
        )
