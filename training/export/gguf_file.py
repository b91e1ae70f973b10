"""What a GGUF file holds: its hashes, its types, and the few facts that are compared and recorded.

`tensor_sha256` is over name, type, shape and bytes of every tensor in the file's order, so it stays when only the
metadata changes. Both hashes come from one reading. Source: llama.cpp `gguf-py`, GGUF version 3.
"""

import hashlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from training.core import files
from training.core.errors import IntegrityError
from training.llamacpp import gguf_header

_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True)
class GgufFile:
    """The facts of one file; `tensor_types` counts tensors by type."""

    sha256: str
    tensor_sha256: str
    bytes: int
    architecture: str
    vocab_size: int
    context_length: int
    parameters: int
    tensor_types: dict[str, int]
    pre_tokenizer: str | None
    add_bos: bool | None
    bos_id: int | None
    eos_id: int | None
    chat_template: str | None
    has_output: bool
    tensor_names: frozenset[str]


def inspect(path: Path) -> GgufFile:
    """Read a file once and return its facts. Raises IntegrityError where it is no GGUF."""
    import gguf

    gguf_header.read(path)  # the package would believe any count
    try:
        reader = gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError, OSError) as error:
        raise IntegrityError("not a GGUF file", where=path, found=error or type(error).__name__) from error

    def value(key: str):
        field = reader.get_field(key)
        return None if field is None else field.contents()

    architecture = value("general.architecture")
    sha256, tensor_sha256 = _hashes(path, reader.tensors)
    return GgufFile(
        sha256=sha256,
        tensor_sha256=tensor_sha256,
        bytes=path.stat().st_size,
        architecture=architecture,
        vocab_size=len(reader.get_field("tokenizer.ggml.tokens").data),
        context_length=value(f"{architecture}.context_length"),
        parameters=sum(int(tensor.n_elements) for tensor in reader.tensors),
        tensor_types=dict(sorted(Counter(tensor.tensor_type.name for tensor in reader.tensors).items())),
        pre_tokenizer=value("tokenizer.ggml.pre"),
        add_bos=value("tokenizer.ggml.add_bos_token"),
        bos_id=value("tokenizer.ggml.bos_token_id"),
        eos_id=value("tokenizer.ggml.eos_token_id"),
        chat_template=value("tokenizer.chat_template"),
        has_output=any(tensor.name == "output.weight" for tensor in reader.tensors),
        tensor_names=frozenset(tensor.name for tensor in reader.tensors),
    )


def tensors_of(path: Path) -> dict:
    """What of any GGUF's tensors a manifest holds: hashes, bytes, how many of each type, parameters."""
    import gguf

    gguf_header.read(path)
    tensors = gguf.GGUFReader(path).tensors
    sha256, tensor_sha256 = _hashes(path, tensors)
    return {
        "sha256": sha256, "tensor_sha256": tensor_sha256, "bytes": path.stat().st_size,
        "tensor_types": dict(sorted(Counter(tensor.tensor_type.name for tensor in tensors).items())),
        "parameters": sum(int(tensor.n_elements) for tensor in tensors),
    }  # fmt: skip


def _hashes(path: Path, tensors: list) -> tuple[str, str]:
    whole, data = hashlib.sha256(), hashlib.sha256()
    with open(path, "rb") as file:

        def feed(count: int, *digests: "hashlib._Hash") -> None:
            while count > 0 and (block := file.read(min(count, _CHUNK_BYTES))):
                for digest in digests:
                    digest.update(block)
                count -= len(block)

        for tensor in sorted(tensors, key=lambda tensor: tensor.data_offset):
            feed(int(tensor.data_offset) - file.tell(), whole)
            shape = [int(size) for size in tensor.shape]
            data.update(files.canonical_json([tensor.name, tensor.tensor_type.name, shape]) + b"\n")
            feed(int(tensor.n_bytes), whole, data)
        feed(path.stat().st_size - file.tell(), whole)
    return whole.hexdigest(), data.hexdigest()
