"""The tokenizer inside a GGUF file, written out as a Hugging Face folder: vocabulary, merges, roles, chat template.

Owns what llama.cpp's types of tokens mean in a `tokenizer.json`. Byte-level BPE alone; the weights are not read.
Source: llama.cpp `gguf-py/gguf/constants.py` (keys, `TokenType`).
"""

from pathlib import Path

from training.core import files, paths, store
from training.core.errors import IntegrityError, UserError
from training.llamacpp import gguf_header
from training.tokenizer import huggingface, pretokenizers
from training.tokenizer.huggingface import CONFIG, ROLES, TEMPLATE, TOKENIZER

_BYTE_LEVEL_BPE = "gpt2"
_KIND = "vocabulary"
_TOKENS, _MERGES = "tokenizer.ggml.tokens", "tokenizer.ggml.merges"
_ROLE_KEYS = {
    "bos": "tokenizer.ggml.bos_token_id", "eos": "tokenizer.ggml.eos_token_id", "pad": "tokenizer.ggml.padding_token_id"
}  # fmt: skip
_ADD_BOS = "tokenizer.ggml.add_bos_token"


def to_folder(gguf: Path, folder: Path) -> Path:
    """Write the tokenizer's files into an existing folder, and return it.

    Raises IntegrityError for a file that is no whole GGUF, UserError where its tokenizer is not known here.
    """
    for name, text in _texts(gguf).items():
        files.write_text(folder / name, text)
    return folder


def unpacked(gguf: Path) -> Path:
    """The folder of a file's tokenizer, kept in the cache by its content's hash. Raises as `to_folder`."""
    texts = _texts(gguf)
    folder = paths.roots().cache / "vocabularies" / files.short(files.sha256_json(texts))
    if not store.reusable(folder, _KIND):
        with files.atomic_folder(folder) as partial:
            for name, text in texts.items():
                files.write_text(partial / name, text)
            files.write_manifest(partial, _KIND, {})
    return folder


def _texts(gguf: Path) -> dict[str, str]:
    """The files of the tokenizer, by name."""
    values = gguf_header.read(gguf).values
    _require_known(gguf, values)
    tokens, merges, types = values[_TOKENS], values[_MERGES], _types(gguf)
    _require_whole(gguf, values, tokens, types)
    pre_tokenizer = values["tokenizer.ggml.pre"]
    config = {f"{role}_token": _text(tokens, values.get(_ROLE_KEYS[role])) for role in ROLES}
    add_bos = bool(values.get(_ADD_BOS, False))
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
    config |= {"add_bos_token": add_bos, "clean_up_tokenization_spaces": False}
    texts = {TOKENIZER: files.json_text(document), CONFIG: files.json_text(config)}
    template = values.get("tokenizer.chat_template")
    return texts | ({TEMPLATE: template} if template else {})


def _require_known(gguf: Path, values: dict) -> None:
    kind, pre_tokenizer = values.get("tokenizer.ggml.model"), values.get("tokenizer.ggml.pre")
    missing = [key for key in (_TOKENS, _MERGES) if not isinstance(values.get(key), list)]
    if kind != _BYTE_LEVEL_BPE or pre_tokenizer not in pretokenizers.CONFIGURATIONS or missing:
        without = f", without {' and '.join(missing)}" if missing else ""
        raise UserError(
            "the file's tokenizer is not known here", where=gguf,
            found=f"model {kind!r}, pre-tokenizer {pre_tokenizer!r}{without}",
            expected=f"model {_BYTE_LEVEL_BPE!r} with one of {', '.join(pretokenizers.CONFIGURATIONS)}",
        )  # fmt: skip


def _require_whole(gguf: Path, values: dict, tokens: list[str], types: list[str]) -> None:
    """Raise IntegrityError where the lists do not fit each other, or a role's id is none of theirs."""
    problems = []
    if len(set(tokens)) < len(tokens):
        problems.append(f"{len(tokens)} tokens of {len(set(tokens))} texts")
    if len(types) != len(tokens):
        problems.append(f"{len(types)} types for {len(tokens)} tokens")
    problems += [f"{key} {values[key]}" for key in _ROLE_KEYS.values() if values.get(key, 0) not in range(len(tokens))]
    if values.get(_ADD_BOS) and _ROLE_KEYS["bos"] not in values:
        problems.append(f"{_ADD_BOS} without a BOS")
    if problems:
        raise IntegrityError(
            "the tokenizer in the file contradicts itself", where=gguf, found="; ".join(problems),
            expected="tokens that differ, a type for each, and ids that are among them",
        )  # fmt: skip


def _types(gguf: Path) -> list[str]:
    """The name of each token's type, which our reader of headers passes over."""
    from gguf import GGUFReader, TokenType

    names = {int(kind): kind.name for kind in TokenType}
    field = GGUFReader(gguf).get_field("tokenizer.ggml.token_type")
    return [names.get(number, "UNKNOWN") for number in field.contents()] if field else []


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
