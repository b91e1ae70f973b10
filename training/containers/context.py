"""What an image is made of: the files that its build sees, and their hash.

A build sees a folder laid out here and nothing else of the checkout. `sources_sha256` is over the files' names and
bytes (the wheels stand in the lock file by their hashes); as a label it tells an image of other sources.
"""

import hashlib
import os
import shutil
from pathlib import Path

from training.containers import wheelhouse
from training.core import files
from training.core.paths import REPOSITORY
from training.llamacpp import pin as pins
from training.llamacpp import source

DOCKER = REPOSITORY / "docker"
_SERVER_PACKAGES = ("xllamacpp",)
_PROGRAM = ("training", "recipes", "pyproject.toml")
_SCRIPTS = ("llama-serve.sh", "llama-healthy.sh")

Contents = dict[str, Path | bytes]


def contents(image: str, lock: Path) -> Contents:
    """The files that an image is built from, by their names in its context, wheels apart."""
    return _CONTENTS[image](lock)


def _system(lock: Path) -> Contents:
    return {"Dockerfile": DOCKER / "system.Dockerfile"}


def _compiler(lock: Path) -> Contents:
    return {"Dockerfile": DOCKER / "compiler.Dockerfile"}


def _train(lock: Path) -> Contents:
    found: Contents = {"Dockerfile": DOCKER / "train.Dockerfile", "packages.lock": lock}
    return found | _tree(REPOSITORY, _PROGRAM, "trainyard")


def _export(lock: Path) -> Contents:
    folder = source.require_source()
    found: Contents = {"Dockerfile": DOCKER / "export.Dockerfile"}
    return found | _tree(folder, tuple(path.name for path in folder.iterdir()), "llama.cpp")


def _llama_cpu(lock: Path) -> Contents:
    return _llama_cuda(lock) | {
        "packages.lock": wheelhouse.excerpt(lock, _SERVER_PACKAGES).encode(),
        "server_main.py": REPOSITORY / "training" / "llamacpp" / "server_main.py",
        "llama-cpu.sh": DOCKER / "llama-cpu.sh",
    }


def _llama_cuda(lock: Path) -> Contents:
    return {"Dockerfile": DOCKER / "llama.Dockerfile"} | {name: DOCKER / name for name in _SCRIPTS}


_CONTENTS = {
    "system": _system, "compiler": _compiler, "train": _train, "export": _export, "llama-cpu": _llama_cpu,
    "llama-cuda": _llama_cuda,
}  # fmt: skip


def _tree(root: Path, parts: tuple[str, ...], under: str) -> Contents:
    found = []
    for part in parts:
        place = root / part
        found += [place] if place.is_file() else sorted(path for path in place.rglob("*") if path.is_file())
    kept = (path for path in found if "__pycache__" not in path.parts)
    return {f"{under}/{path.relative_to(root).as_posix()}": path for path in kept}


def sources_sha256(image: str, lock: Path) -> str:
    """The hash over the names and bytes of what an image is made of, and over the pin for what carries llama.cpp."""
    if image == "export":  # its source is named by the pin, and may not be on this machine
        own = {"Dockerfile": DOCKER / "export.Dockerfile", "pin": pins.PIN_FILE}
    else:
        own = contents(image, lock)
    return files.sha256_json([[name, hashlib.sha256(_bytes(own[name])).hexdigest()] for name in sorted(own)])


def _bytes(part: Path | bytes) -> bytes:
    return part if isinstance(part, bytes) else part.read_bytes()


def lay_out(image: str, lock: Path, wheels: Path | None, folder: Path) -> None:
    """Lay the build's files out in an empty folder, with modes that do not depend on the umask; wheels by hard link."""
    for name, part in contents(image, lock).items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(part, bytes):
            target.write_bytes(part)
        else:
            shutil.copyfile(part, target)
        executable = name.endswith(".sh") or (isinstance(part, Path) and part.stat().st_mode & 0o100)
        target.chmod(0o755 if executable else 0o644)
    for place in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
        place.chmod(0o755)
    if wheels is not None:
        _lay_out_wheels(wheels, (folder / "packages.lock").read_text(), folder / "wheels")


def _lay_out_wheels(wheels: Path, lock: str, folder: Path) -> None:
    folder.mkdir(mode=0o755)
    wanted = {line.partition("==")[0].replace("-", "_").lower() for line in lock.splitlines() if "==" in line}
    for wheel in wheels.glob("*.whl"):
        if wheel.name.partition("-")[0].replace(".", "_").lower() not in wanted:
            continue
        try:
            os.link(wheel, folder / wheel.name)
        except OSError:  # another file system
            shutil.copyfile(wheel, folder / wheel.name)
