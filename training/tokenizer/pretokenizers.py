"""The pre-tokenizers that llama.cpp and Hugging Face's `tokenizers` both know, by llama.cpp's name.

Owns the equality: a name stands here only with the configuration that splits every text as llama.cpp's case of that
name does. Owns no vocabulary. llama.cpp applies no normalizer to byte-level BPE, so a tokenizer with one has no name.
The patterns are facts of llama.cpp, src/llama-vocab.cpp (commit 0c1e57098), which export proves by comparing ids. On
all code points below U+20000 the ids are equal but for the 80 (smollm: 93) numbers that the newest Unicode versions
added, where the two libraries' tables differ.
"""

import json

from training.core.errors import IntegrityError, UserError

DEFAULT = "llama-bpe"

_CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
# The same as model makers spell it; under (?i:...) an apostrophe before U+017F (long s) also counts.
_CONTRACTIONS_OF_MAKERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
_MARKED_WORDS = r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PUNCTUATED_WORDS = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def byte_level(*, use_regex: bool) -> dict:
    """The library's ByteLevel with nothing put in front, as a pre-tokenizer or a decoder."""
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _split_then_bytes(*patterns: str) -> dict:
    splits = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in patterns
    ]
    return {"type": "Sequence", "pretokenizers": [*splits, byte_level(use_regex=False)]}


def _words(digits: str, contractions: str = _CONTRACTIONS) -> dict:
    return _split_then_bytes(contractions + _WORDS + digits + _REST)


_DIGITS_ALONE = {"type": "Digits", "individual_digits": True}

# llama.cpp's name -> the pre_tokenizer of tokenizer.json
CONFIGURATIONS: dict[str, dict] = {
    "llama-bpe": _words(r"\p{N}{1,3}"),
    "dbrx": _words(r"\p{N}{1,3}"),
    "qwen2": _words(r"\p{N}"),
    "qwen35": _split_then_bytes(_CONTRACTIONS + _MARKED_WORDS),
    "smollm": {"type": "Sequence", "pretokenizers": [_DIGITS_ALONE, byte_level(use_regex=True)]},
    "gpt-2": byte_level(use_regex=True),
    "deepseek-v3": _split_then_bytes(r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", _PUNCTUATED_WORDS),
}
_ALSO_SPELLED = {
    "llama-bpe": _words(r"\p{N}{1,3}", _CONTRACTIONS_OF_MAKERS),
    "dbrx": _words(r"\p{N}{1,3}", _CONTRACTIONS_OF_MAKERS),
    "qwen2": _words(r"\p{N}", _CONTRACTIONS_OF_MAKERS),
    "qwen35": _split_then_bytes(_CONTRACTIONS_OF_MAKERS + _MARKED_WORDS),
}


def check_name(name: str) -> str:
    """Return a known name. Raises UserError listing the known ones."""
    if name not in CONFIGURATIONS:
        raise UserError("no such pre-tokenizer", found=repr(name), expected="one of " + ", ".join(CONFIGURATIONS))
    return name


def ignores_merges(name: str) -> bool:
    """Whether a pre-token that is itself in the vocabulary is taken whole, as llama.cpp does under this name."""
    return name == "llama-bpe"


def build(name: str):
    """Build the `tokenizers` pre-tokenizer of a llama.cpp name. Raises UserError for an unknown one."""
    from tokenizers import Tokenizer, models

    # The library has no constructor from a configuration but that of a whole tokenizer.
    empty = json.loads(Tokenizer(models.BPE()).to_str())
    return Tokenizer.from_str(json.dumps(empty | {"pre_tokenizer": CONFIGURATIONS[check_name(name)]})).pre_tokenizer


def name_of(tokenizer_json: dict) -> str:
    """Return llama.cpp's name for a `tokenizer.json`. Raises IntegrityError where the configuration is no known one."""
    model, normalizer = tokenizer_json.get("model") or {}, tokenizer_json.get("normalizer")
    configuration = _without_offsets(tokenizer_json.get("pre_tokenizer"))
    spellings = {name: [CONFIGURATIONS[name], _ALSO_SPELLED.get(name, CONFIGURATIONS[name])] for name in CONFIGURATIONS}
    named = [name for name, known in spellings.items() if configuration in map(_without_offsets, known)]
    problems = {name: _model_problems(name, model, normalizer) for name in named}
    for name in named:
        if not problems[name]:
            return name
    if named:
        raise IntegrityError(
            f"the tokenizer splits text as {named[0]} does, but llama.cpp would give other ids",
            found="; ".join(problems[named[0]]),
            expected="byte-level BPE without normalizer or with NFC, merges ignored under llama-bpe alone",
        )
    raise IntegrityError(
        "the tokenizer's pre-tokenizer is none that llama.cpp is known to have",
        found=configuration,
        expected="the configuration of " + ", ".join(CONFIGURATIONS),
    )


def _without_offsets(configuration: object) -> object:
    """A configuration without `trim_offsets`, which changes offsets and never ids."""
    if isinstance(configuration, dict):
        return {key: _without_offsets(value) for key, value in configuration.items() if key != "trim_offsets"}
    if isinstance(configuration, list):
        return [_without_offsets(value) for value in configuration]
    return configuration


def is_nfc(normalizer: object) -> bool:
    """Whether a normalizer is NFC, or none at all in other words. Opening a tokenizer drops it."""
    if isinstance(normalizer, dict) and normalizer.get("type") == "Sequence":
        return all(map(is_nfc, normalizer.get("normalizers", ["unknown"])))
    return normalizer is None or normalizer == {"type": "NFC"}


def _model_problems(name: str, model: dict, normalizer: object) -> list[str]:
    problems = []
    if model.get("type") != "BPE":
        problems.append(f"model.type is {model.get('type')}")
    if bool(model.get("ignore_merges")) != ignores_merges(name):
        problems.append(f"model.ignore_merges is {model.get('ignore_merges')}")
    if model.get("byte_fallback"):
        problems.append("model.byte_fallback is on")
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            problems.append(f"model.{key} is {model[key]!r}")
    if not is_nfc(normalizer):
        problems.append(f"there is a normalizer, {normalizer}")
    return problems
