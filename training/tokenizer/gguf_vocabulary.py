"""The tokenizer inside a GGUF file, written out as a Hugging Face folder: vocabulary, merges, roles, chat template.

Owns what llama.cpp's types of tokens mean in a `tokenizer.json`. Byte-level BPE alone; the weights are not read.
Source: llama.cpp `gguf-py/gguf/constants.py` (keys, `TokenType`).
"""

from pathlib import Path

from training.core import files
from training.core.errors import UserError
from training.llamacpp import gguf_header
from training.tokenizer import huggingface, pretokenizers
from training.tokenizer.huggingface import CONFIG, ROLES, TEMPLATE, TOKENIZER

_BYTE_LEVEL_BPE = "gpt2"


def to_folder(gguf: Path, folder: Path) -> Path:
    """Write the tokenizer's files into an existing folder, and return it.

    Raises IntegrityError for a file that is no whole GGUF, UserError where its tokenizer is not known here.
    """
    values = gguf_header.read(gguf).values
    _require_known(gguf, values)
    tokens, merges, types = values["tokenizer.ggml.tokens"], values["tokenizer.ggml.merges"], _types(gguf)
    pre_tokenizer = values["tokenizer.ggml.pre"]
    config = {f"{role}_token": _text(tokens, values.get(_ROLE_KEYS[role])) for role in ROLES}
    add_bos = bool(values.get("tokenizer.ggml.add_bos_token", False))
    document = {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None,
        "added_tokens": _added(tokens, types),
        "pre_tokenizer": pretokenizers.CONFIGURATIONS[pre_tokenizer],
        "post_processor": _bos_in_front(tokens, config["bos_token"]) if add_bos else None,
        "decoder": pretokenizers.byte_level(use_regex=False),
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
            "ignore_merges": pretokenizers.ignores_merges(pre_tokenizer),
            "vocab": {token: number for number, token in enumerate(tokens)}, "merges": merges,
        },
    }  # fmt: skip
    files.write_json(folder / TOKENIZER, document)
    files.write_json(folder / CONFIG, config | {"add_bos_token": add_bos, "clean_up_tokenization_spaces": False})
    if template := values.get("tokenizer.chat_template"):
        files.write_text(folder / TEMPLATE, template)
    return folder


_ROLE_KEYS = {
    "bos": "tokenizer.ggml.bos_token_id", "eos": "tokenizer.ggml.eos_token_id", "pad": "tokenizer.ggml.padding_token_id"
}  # fmt: skip


def _require_known(gguf: Path, values: dict) -> None:
    kind, pre_tokenizer = values.get("tokenizer.ggml.model"), values.get("tokenizer.ggml.pre")
    if kind != _BYTE_LEVEL_BPE or pre_tokenizer not in pretokenizers.CONFIGURATIONS:
        raise UserError(
            "the file's tokenizer is not known here", where=gguf,
            found=f"model {kind!r}, pre-tokenizer {pre_tokenizer!r}",
            expected=f"model {_BYTE_LEVEL_BPE!r} with one of {', '.join(pretokenizers.CONFIGURATIONS)}",
        )  # fmt: skip


def _types(gguf: Path) -> list[str]:
    from gguf import GGUFReader, TokenType

    field = GGUFReader(gguf).get_field("tokenizer.ggml.token_type")
    return [TokenType(number).name for number in field.contents()]


def _added(tokens: list[str], types: list[str]) -> list[dict]:
    kinds = {"CONTROL": True, "USER_DEFINED": False}
    return [
        huggingface.added_token(number, tokens[number], special=kinds[kind])
        for number, kind in enumerate(types)
        if kind in kinds
    ]


def _text(tokens: list[str], number: int | None) -> str | None:
    return None if number is None else tokens[number]


def _bos_in_front(tokens: list[str], bos: str) -> dict:
    first, then = {"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    last = {"Sequence": {"id": "B", "type_id": 0}}
    return {
        "type": "TemplateProcessing", "single": [first, then], "pair": [first, then, last],
        "special_tokens": {bos: {"id": bos, "ids": [tokens.index(bos)], "tokens": [bos]}},
    }  # fmt: skip
