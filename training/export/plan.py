"""What a GGUF will be, told from shapes before a byte is written: the type of every tensor, and the file's size.

Owns the rules by which the pinned converter and quantiser choose types: a row that a type's blocks do not divide falls
back to another type. The file's size is held against the plan afterwards, so that a rule which has changed is seen.
Source: llama.cpp `conversion/base.py`, `prepare_tensors`; `src/llama-quant.cpp`, `llama_tensor_get_type_impl` and
`tensor_type_fallback`.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from math import prod

from training.export.checkpoint import Checkpoint
from training.llamacpp import convert
from training.llamacpp.convert import OUTTYPES
from training.llamacpp.quantize import K_QUANTS

QUANTS = (*OUTTYPES, *K_QUANTS)
_DEFAULT = {"Q4_K_M": "Q4_K", "Q5_K_M": "Q5_K", "Q6_K": "Q6_K"}
_FALLBACK = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
_ALIGNMENT = 32
_LAYER = re.compile(r"blk\.(\d+)\.")
_VALUE_BYTES, _HEADER_BYTES = 12, 3000  # a text's length and type; keys and numbers of a language model's header


@dataclass(frozen=True)
class Plan:
    """The types by the names that tensors have in the file, those that fell back, and the bytes of the whole file."""

    quant: str
    types: dict[str, str]
    fallbacks: dict[str, str]
    num_bytes: int

    @property
    def counts(self) -> dict[str, int]:
        """How many tensors have each type."""
        return dict(sorted(Counter(self.types.values()).items()))

    def text(self) -> str:
        """The plan in a line: types by number, and how many tensors are not of the type that was asked for."""
        told = ", ".join(f"{kind} x {count}" for kind, count in self.counts.items())
        if not self.fallbacks:
            return told
        instead = Counter(self.fallbacks.values())
        told_instead = ", ".join(f"{count} as {kind}" for kind, count in sorted(instead.items()))
        return f"{told}; {len(self.fallbacks)} rows that the blocks do not divide: {told_instead}"


def make(checkpoint: Checkpoint, quant: str, architecture: str) -> Plan:
    """The plan of one file."""
    shapes = _gguf_shapes(checkpoint, architecture)
    is_tied = "output.weight" not in shapes
    types, fallbacks = {}, {}
    for name, shape in shapes.items():
        types[name], fell = _type(name, shape, quant, checkpoint.num_layers, is_tied)
        if fell:
            fallbacks[name] = types[name]
    data = sum(_padded(num_bytes(shapes[name], kind)) for name, kind in types.items())
    return Plan(quant, types, fallbacks, data + _metadata_bytes(checkpoint, list(shapes)))


def _gguf_shapes(checkpoint: Checkpoint, architecture: str) -> dict[str, tuple[int, ...]]:
    """The shapes by the names in the file, rows last as in the weights' own files."""
    names = convert.tensor_names(architecture, checkpoint.num_layers)
    found = {}
    for name, shape in checkpoint.shapes.items():
        is_second = name == "lm_head.weight" and checkpoint.config.get("tie_word_embeddings") and _ties(architecture)
        if (mapped := names.get_name(name, try_suffixes=(".weight", ".bias"))) and not is_second:
            found[mapped] = tuple(shape)
    return found


def _ties(architecture: str) -> bool:
    """Families whose converter never writes a tied head that the weights hold twice."""
    return architecture.startswith("gemma")


def _type(name: str, shape: tuple[int, ...], quant: str, num_layers: int, is_tied: bool) -> tuple[str, bool]:
    if len(shape) < 2 or name.endswith("_norm.weight") or quant == "F32":
        return "F32", False
    wanted = _wanted(name, shape, quant, num_layers, is_tied)
    if _divides(shape[-1], wanted):
        return wanted, quant in K_QUANTS and not _divides(shape[-1], _DEFAULT[quant])
    instead = _FALLBACK.get(wanted, "F16")
    return (instead if _divides(shape[-1], instead) else "F16"), True


def _wanted(name: str, shape: tuple[int, ...], quant: str, num_layers: int, is_tied: bool) -> str:
    """What the quantiser would take where every row fits (llama_tensor_get_type_impl)."""
    if quant not in K_QUANTS:
        return quant
    default = _DEFAULT[quant]
    if name == "output.weight" or (is_tied and name == "token_embd.weight"):
        return "Q6_K" if _divides(shape[-1], default) else "Q8_0"
    layer = _LAYER.match(name)
    is_sensitive = name.endswith(("attn_v.weight", "attn_qkv.weight", "ffn_down.weight"))
    if quant != "Q6_K" and layer and is_sensitive and _more_bits(int(layer[1]), num_layers):
        return "Q6_K"
    return default


def _more_bits(layer: int, num_layers: int) -> bool:
    eighth = num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2


def _divides(width: int, kind: str) -> bool:
    return width % _sizes(kind)[0] == 0


def _sizes(kind: str) -> tuple[int, int]:
    import gguf

    return gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]


def num_bytes(shape: tuple[int, ...], kind: str) -> int:
    """The bytes of a tensor of a type."""
    block, block_bytes = _sizes(kind)
    return prod(shape) // block * block_bytes


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _metadata_bytes(checkpoint: Checkpoint, names: list[str]) -> int:
    """The header: the vocabulary as it is written, merges, the template, and an entry a tensor."""
    model = checkpoint.tokenizer_json.get("model", {})
    texts = [*model.get("vocab", {}), *(one["content"] for one in checkpoint.tokenizer_json.get("added_tokens", []))]
    merges = [one if isinstance(one, str) else " ".join(one) for one in model.get("merges", [])]
    entries = sum(8 + len(text.encode()) for text in [*texts, *merges])
    tensors = sum(8 + len(name) + 4 + 16 + 4 + 8 for name in names)
    template = len((checkpoint.chat_template or "").encode())
    return _HEADER_BYTES + _VALUE_BYTES + entries + 4 * checkpoint.config["vocab_size"] + template + tensors
