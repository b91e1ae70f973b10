"""The manifest beside a GGUF: what the file is, where it came from, and how it was proved.

`<name>-<QUANT>.manifest.json` is written last, so a GGUF without one is not finished. It holds no path of this
machine. `verify` is the one place where a file's bytes are held against it.
"""

from pathlib import Path

from training.core import files, paths
from training.core.errors import IntegrityError

KIND, ADAPTER_KIND = "gguf", "gguf-adapter"
_EXPORT = "make export-gguf CHECKPOINT=latest ARGS=--force"
path_of = paths.gguf_manifest


def read(gguf: Path) -> dict:
    """Read the manifest of a file. Raises IntegrityError where there is none, or it is another file's."""
    path = path_of(gguf)
    if not path.is_file():
        raise IntegrityError(
            "the model has no manifest",
            where=path,
            found="no such file",
            expected="the manifest that an export writes last",
            next_command=_EXPORT,
        )
    manifest = files.read_json(path)
    if manifest.get("kind") not in (KIND, ADAPTER_KIND) or manifest.get("file") != gguf.name:
        raise IntegrityError(
            "the manifest is another file's", where=path, expected=f"kind {KIND}, file {gguf.name}",
            found=f"kind {manifest.get('kind')}, file {manifest.get('file')}", next_command=_EXPORT,
        )  # fmt: skip
    return manifest


def verify(gguf: Path) -> dict:
    """Hold a file's bytes against its manifest and return it. Raises IntegrityError where they differ."""
    manifest = read(gguf)
    try:
        files.verify_file(gguf, manifest)
    except IntegrityError as error:
        error.next_command = _EXPORT
        raise
    return manifest
