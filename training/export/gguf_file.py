"""What a GGUF file holds: its hashes, its types, and the few facts that are compared and recorded.

`tensor_sha256` is over name, type, shape and bytes of every tensor in the file's order, so it stays when only the
metadata changes. The header is read once, and both hashes come from one reading. Source: llama.cpp `gguf-py`, GGUF
version 3.
"""

import hashlib
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path

from training.core import files
from training.llamacpp import gguf_header
from training.llamacpp.gguf_header import Header, Tensor

_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True)
class GgufFile:
    """The facts of one file.

    `tensor_types` counts tensors by type, `values` are the header's own, `rope_factors` the numbers of the tensors that
    stretch rope, by name.
    """

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
    values: dict[str, object]
    tensor_names: frozenset[str]
    rope_factors: dict[str, tuple[float, ...]]


def inspect(path: Path) -> GgufFile:
    """Read a file once and return its facts. Raises IntegrityError where it is no GGUF."""
    header = gguf_header.read(path)
    values, architecture = header.values, header.values.get("general.architecture")
    return GgufFile(
        **_facts(path, header),
        architecture=architecture,
        vocab_size=len(values.get("tokenizer.ggml.tokens", ())),
        context_length=values.get(f"{architecture}.context_length"),
        pre_tokenizer=values.get("tokenizer.ggml.pre"),
        add_bos=values.get("tokenizer.ggml.add_bos_token"),
        bos_id=values.get("tokenizer.ggml.bos_token_id"),
        eos_id=values.get("tokenizer.ggml.eos_token_id"),
        chat_template=values.get("tokenizer.chat_template"),
        values=values,
        tensor_names=frozenset(tensor.name for tensor in header.tensors),
        rope_factors={one.name: _numbers(path, one) for one in header.tensors if one.name.startswith("rope_")},
    )


def _numbers(path: Path, tensor: Tensor) -> tuple[float, ...]:
    """The values of a small tensor in F32; those of another type are none that llama.cpp reads."""
    if tensor.kind != "F32":
        return ()
    with open(path, "rb") as file:
        file.seek(tensor.begin)
        data = file.read(tensor.num_bytes)
    return struct.unpack(f"<{len(data) // 4}f", data)


def tensors_of(path: Path) -> dict:
    """What of any GGUF's tensors a manifest holds: hashes, bytes, how many of each type, parameters."""
    return _facts(path, gguf_header.read(path))


def _facts(path: Path, header: Header) -> dict:
    sha256, tensor_sha256 = _hashes(path, header)
    return {
        "sha256": sha256, "tensor_sha256": tensor_sha256, "bytes": path.stat().st_size,
        "tensor_types": dict(sorted(header.tensor_types.items())),
        "parameters": sum(prod(tensor.shape) for tensor in header.tensors),
    }  # fmt: skip


def _hashes(path: Path, header: Header) -> tuple[str, str]:
    whole, data = hashlib.sha256(), hashlib.sha256()
    with open(path, "rb") as file:

        def feed(count: int, *digests: "hashlib._Hash") -> None:
            while count > 0 and (block := file.read(min(count, _CHUNK_BYTES))):
                for digest in digests:
                    digest.update(block)
                count -= len(block)

        for tensor in sorted(header.tensors, key=lambda tensor: tensor.begin):
            feed(tensor.begin - file.tell(), whole)
            data.update(files.canonical_json([tensor.name, tensor.kind, tensor.shape]) + b"\n")
            feed(tensor.num_bytes, whole, data)
        feed(path.stat().st_size - file.tell(), whole)
    return whole.hexdigest(), data.hexdigest()
