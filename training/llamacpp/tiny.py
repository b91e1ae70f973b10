"""A tiny random GGUF of the Llama family, written without any converter: what a server is tried with.

Its vocabulary is the 256 bytes and five special tokens, or one that is given. The same seed gives the same bytes.
Source: ggml `docs/gguf.md`; llama.cpp `src/llama-arch.cpp` for the names.
"""

from dataclasses import dataclass
from pathlib import Path

SPECIALS = ("<|bos|>", "<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>")
BOS_ID, EOS_ID, PAD_ID = 256, 257, 258
VOCAB_SIZE = 256 + len(SPECIALS)


def byte_letters() -> list[str]:
    """The letter that byte-level BPE writes for each byte (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


@dataclass(frozen=True)
class Vocabulary:
    """What a GGUF says of its tokenizer.

    Args:
        tokens: the text of each id, bytes as letters.
        types: the name of each id's type in `gguf.TokenType`.
        merges: pairs in their order, "a b".
        pre: llama.cpp's name of the pre-tokenizer.
        bos, eos, pad: ids; None writes none.
    """

    tokens: list[str]
    types: list[str]
    merges: list[str]
    pre: str
    bos: int | None
    eos: int
    pad: int | None
    add_bos: bool


def _own_vocabulary() -> Vocabulary:
    letters = byte_letters()
    types = ["NORMAL"] * 256 + ["CONTROL"] * len(SPECIALS)
    merges = [f"{letters[32]} {letters[32]}"]
    return Vocabulary([*letters, *SPECIALS], types, merges, "llama-bpe", BOS_ID, EOS_ID, PAD_ID, add_bos=True)


def write(
    path: Path,
    *,
    seed: int,
    width: int = 64,
    layers: int = 1,
    leave_out: str | None = None,
    template: str | None = None,
    vocabulary: Vocabulary | None = None,
) -> Path:
    """Write random F16 weights; `leave_out` names a tensor that is missing, so that no server can load the file."""
    import gguf
    import numpy as np

    random = np.random.default_rng(seed)
    heads, inner, vocabulary = 4, 2 * width, vocabulary or _own_vocabulary()
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("tiny")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_context_length(256)
    writer.add_embedding_length(width)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(width // heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(vocabulary.tokens))
    _write_vocabulary(writer, vocabulary)
    if template is not None:
        writer.add_chat_template(template)

    def add(name: str, *shape: int) -> None:
        values = np.ones(shape, np.float32) if len(shape) == 1 else 0.2 * random.standard_normal(shape)
        if name != leave_out:
            writer.add_tensor(name, values.astype(np.float32 if len(shape) == 1 else np.float16))

    add("token_embd.weight", len(vocabulary.tokens), width)
    for layer in range(layers):
        add(f"blk.{layer}.attn_norm.weight", width)
        add(f"blk.{layer}.ffn_norm.weight", width)
        for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add(f"blk.{layer}.{part}.weight", width, width)
        add(f"blk.{layer}.ffn_gate.weight", inner, width)
        add(f"blk.{layer}.ffn_up.weight", inner, width)
        add(f"blk.{layer}.ffn_down.weight", width, inner)
    add("output_norm.weight", width)
    add("output.weight", len(vocabulary.tokens), width)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_vocabulary(writer, vocabulary: Vocabulary) -> None:
    import gguf

    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types([gguf.TokenType[name] for name in vocabulary.types])
    writer.add_token_merges(vocabulary.merges)
    if vocabulary.bos is not None:
        writer.add_bos_token_id(vocabulary.bos)
    writer.add_eos_token_id(vocabulary.eos)
    if vocabulary.pad is not None:
        writer.add_pad_token_id(vocabulary.pad)
    writer.add_add_bos_token(vocabulary.add_bos)


def parameters(width: int = 64, layers: int = 1) -> int:
    """How many weights `write` makes."""
    inner = 2 * width
    return 2 * VOCAB_SIZE * width + width + layers * (2 * width + 4 * width * width + 3 * width * inner)
