"""A GGUF file that is about to be served: its place, its bytes, its header, and its manifest.

Invariants: nothing is served whose path leaves `$DATA_ROOT/models`; what a manifest says of a file is held against the
file itself, the quant type against the GGUF header. The signature (inode, size, time of change) tells without reading
whether a file is still the one that was hashed.
"""

from dataclasses import dataclass
from pathlib import Path

from training.calculator.serving_fit import Served
from training.core import files, paths
from training.core.errors import IntegrityError
from training.core.progress import Progress
from training.llamacpp import gguf_header
from training.serving.settings import service_command

_NEEDED = (
    "name", "bytes", "sha256", "quant_type", "architecture", "parameters", "vocab_size", "tokenizer", "fingerprint",
)  # fmt: skip

_EXPORT_AGAIN = "make export-gguf CHECKPOINT=latest ARGS=--force"


@dataclass(frozen=True)
class ModelFile:
    """A checked file. `header` is what `read_header` returns."""

    path: Path
    sha256: str
    signature: dict
    header: dict
    manifest: dict | None

    def memory_bytes(self, ctx_size: int) -> int:
        """What a server of it needs at least: the file, and the keys and values of `ctx_size` tokens."""
        return self.signature["bytes"] + ctx_size * self.header["cache_bytes_per_token"]

    @property
    def served(self) -> Served:
        """By what its memory in service is reckoned."""
        return served(self.header, self.signature["bytes"])


def check(path: Path, *, manifest_required: bool, service: str) -> ModelFile:
    """Read the header, hash the file and hold both against the manifest beside it; `service` is what it is for.

    Raises IntegrityError where the file is no GGUF, a required manifest is missing, or they disagree.
    """
    manifest = _manifest(path, manifest_required, service)
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


def _manifest(path: Path, required: bool, service: str) -> dict | None:
    place = paths.gguf_manifest(path)
    if not place.is_file() and not required:
        return None
    if not place.is_file():
        unproved = service_command("serve-start", service, MODEL=paths.container_path(path))
        raise IntegrityError(
            "the model has no manifest, so nothing says what it should be",
            where=path,
            found=f"no {place.name} beside it",
            expected=f"the manifest that export writes with every file; {unproved} serves it unproved",
            next_command=_EXPORT_AGAIN,
        )
    from training.export import manifest

    read = manifest.read(path)
    if missing := [part for part in _NEEDED if part not in read]:
        raise IntegrityError(
            "the manifest is not whole",
            where=place,
            found=f"no {', '.join(missing)}",
            expected="every part that export writes",
            next_command=_EXPORT_AGAIN,
        )
    return read


def _compare(path: Path, what: str, found: object, expected: object) -> None:
    if found != expected:
        raise IntegrityError(
            f"the model's {what} is not what its manifest says",
            where=path,
            found=found,
            expected=expected,
            next_command=_EXPORT_AGAIN,
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
    header = gguf_header.read(path)
    try:
        quant_type = header.quant_type
        architecture = header.value("general.architecture")
        context_length = int(header.value(f"{architecture}.context_length"))
    except (KeyError, ValueError, TypeError) as error:
        raise IntegrityError(
            "not the GGUF file of a language model", where=path, found=str(error).strip("'\""),
            expected="file type, architecture and context length", next_command=_EXPORT_AGAIN,
        ) from error  # fmt: skip
    return {
        "architecture": architecture,
        "quant_type": quant_type,
        "context_length": context_length,
        "tensor_types": header.tensor_types,
        "cache_bytes_per_token": _cache_bytes_per_token(header, architecture),
        "vocab_size": len(header.values.get("tokenizer.ggml.tokens", ())),
        "inner_size": _largest(header.values.get(f"{architecture}.feed_forward_length", 0)),
    }


def served(header: dict, file_bytes: int) -> Served:
    """The figures of a header by which its memory in service is reckoned."""
    names = ("cache_bytes_per_token", "vocab_size", "inner_size", "context_length")
    return Served(file_bytes, *(header[name] for name in names))


def _largest(value: object) -> int:
    return max(value, default=0) if isinstance(value, list) else int(value)


def _cache_bytes_per_token(header: gguf_header.Header, architecture: str) -> int:
    """Keys and values of one token in all layers, 2 bytes each (llama.cpp's default cache is f16); 0 where unsaid."""

    def number(name: str) -> int:
        return _largest(header.values.get(f"{architecture}.{name}", 0))

    heads = number("attention.head_count")
    width = number("attention.key_length") or (number("embedding_length") // heads if heads else 0)
    return number("block_count") * (number("attention.head_count_kv") or heads) * width * 2 * 2
