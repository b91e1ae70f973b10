"""A GGUF file that is about to be served: its place, its bytes, its header, and its manifest.

Invariants: nothing is served whose path leaves `$DATA_ROOT/models`; what a manifest says of a file is held against the
file itself, the quant type against the GGUF header. The signature (inode, size, time of change) tells without reading
whether a file is still the one that was hashed.
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from training.core import files, paths
from training.core.errors import IntegrityError, UserError
from training.core.progress import Progress

_NEEDED = (
    "name", "bytes", "sha256", "quant_type", "architecture", "parameters", "vocab_size", "tokenizer", "fingerprint",
)  # fmt: skip


@dataclass(frozen=True)
class ModelFile:
    """A checked file. `header` is `{"architecture", "quant_type", "context_length", "tensor_types"}`."""

    path: Path
    sha256: str
    signature: dict
    header: dict
    manifest: dict | None

    @property
    def name(self) -> str:
        return self.path.stem


def resolve(text: str) -> Path:
    """The host's file of a model named by host or container path. Raises UserError."""
    path = paths.model_path(text)
    if not path.is_file():
        there = sorted(str(p.relative_to(paths.roots().models.resolve())) for p in _models())
        raise UserError(
            "no such model file",
            where=path,
            found="a folder" if path.is_dir() else f"nothing; there are: {', '.join(there[:8]) or 'none yet'}",
            expected="a .gguf file under $DATA_ROOT/models, by its host path or as /app/models/...",
            next_command="make export-gguf CHECKPOINT=RUN",
        )
    return path


def _models() -> list[Path]:
    return list(paths.roots().models.resolve().rglob("*.gguf"))


def check(path: Path, *, manifest_required: bool) -> ModelFile:
    """Read the header, hash the file and hold both against the manifest beside it.

    Raises IntegrityError where the file is no GGUF, a required manifest is missing, or they disagree.
    """
    manifest = _manifest(path, manifest_required)
    header = read_header(path)
    before = signature(path)
    if manifest:
        _compare(path, "bytes", before["bytes"], manifest["bytes"])
    digest = hash_with_bar(path)
    if signature(path) != before:
        raise IntegrityError("the file changed while it was hashed", where=path, expected="a file that stays as it is")
    if manifest:
        _compare(path, "sha256", digest, manifest["sha256"])
        _compare(path, "quant type", header["quant_type"], manifest["quant_type"])
        _compare(path, "architecture", header["architecture"], manifest["architecture"])
    return ModelFile(path, digest, before, header, manifest)


def _manifest(path: Path, required: bool) -> dict | None:
    place = path.with_suffix(".manifest.json")
    if not place.is_file() and not required:
        return None
    if not place.is_file():
        raise IntegrityError(
            "the model has no manifest, so nothing says what it should be",
            where=path,
            found=f"no {place.name} beside it",
            expected="the manifest that export writes with every file",
            next_command=f"make export-gguf CHECKPOINT=RUN, or make serve-start MODEL={path} to serve it unproved",
        )
    from training.export import manifest

    read = manifest.read(path)
    if missing := [part for part in _NEEDED if part not in read]:
        raise IntegrityError(
            "the manifest is not whole",
            where=place,
            found=f"no {', '.join(missing)}",
            expected="every part that export writes",
            next_command="export it again: make export-gguf CHECKPOINT=RUN",
        )
    return read


def _compare(path: Path, what: str, found: object, expected: object) -> None:
    if found != expected:
        raise IntegrityError(
            f"the model's {what} is not what its manifest says",
            where=path,
            found=found,
            expected=expected,
            next_command="export it again: make export-gguf CHECKPOINT=RUN",
        )


def signature(path: Path) -> dict:
    """What changes when a file is replaced or written, without reading it."""
    stat = path.stat()
    return {"inode": stat.st_ino, "bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns}


def hash_with_bar(path: Path) -> str:
    """The sha256 of a file, read at the disk's speed with a bar."""
    with Progress("hashing the model", path.stat().st_size, "B") as progress:
        return files.sha256_file(path, progress.advance)


def read_header(path: Path) -> dict:
    """What the GGUF header itself says. Raises IntegrityError where it cannot be read or the file is cut short."""
    import gguf

    try:
        reader = gguf.GGUFReader(path)
        file_type = gguf.LlamaFileType(_field(reader, "general.file_type")).name
        architecture = _field(reader, "general.architecture")
        context_length = _field(reader, f"{architecture}.context_length")
    except Exception as error:  # the reader raises whatever numpy or struct does on bytes that are no GGUF
        raise IntegrityError(
            "not a whole GGUF file", where=path, found=f"{type(error).__name__}: {error}", expected="a GGUF file",
            next_command="export it again: make export-gguf CHECKPOINT=RUN",
        ) from error  # fmt: skip
    return {
        "architecture": architecture,
        "quant_type": file_type.removeprefix("MOSTLY_").removeprefix("ALL_"),
        "context_length": int(context_length),
        "tensor_types": dict(Counter(tensor.tensor_type.name for tensor in reader.tensors)),
    }


def _field(reader: object, name: str) -> object:
    field = reader.get_field(name)
    if field is None:
        raise ValueError(f"{name} is not in the header")
    return field.contents()
