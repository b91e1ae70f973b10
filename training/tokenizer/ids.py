"""Token ids of a tokenizer against those of a running server: any difference is an error.

A wrong split rule shows only on digits, contractions, newlines and blanks, and only where the vocabulary has merges
across the rule's boundary; so the strings here are nasty on purpose, and real lines go with them.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from training.core.errors import RunError
from training.llamacpp.client import Client

if TYPE_CHECKING:
    import tokenizers

NASTY = (
    "", " ", "  ", "    four", "a  b   c    d", "trailing   ", "\t", "\tone\t\ttwo", " \t mixed \t ",
    "\n", "\n\n\n", "line\r\nline\r\n\r\nend", "a \n  b\n\n    c\n", "\r",
    "1234567", "1 12 123 1234 12345 123456", "3.14159", "1,000,000.00", "0x1F4A9 2026-11-29T21:53:00", "x1y22z333",
    "don't we'll I've they're it's I'm he'd", "DON'T WE'LL I'VE IT'S", "'tis 'quoted' ''double''",
    "👍", "👍🏽 👩‍👩‍👧‍👦 🏳️‍🌈", "a👍b 👍 c",
    "caf\u00e9 \u00c5ngstr\u00f6m na\u00efve", "cafe\u0301 A\u030angstro\u0308m nai\u0308ve", "\u0301",
    "漢字とかなの文。", "你好，世界！123", "한국어 문장", "Привет, мир", "สวัสดีชาวโลก", "مرحبا ١٢٣", "हिन्दी",
    "a\u2028b\u2029c", "a\u00a0b\u00a0\u00a0c", "\u200bzero\u200dwidth", "\ufeffbom", "½ ² Ⅷ ﬁ",
    "x=1;y+=2 # z", "((((]]]]}}}}", "!!!???...---===", "http://localhost:8080/a?b=c&d=%20",
    "<|not_a_token|>", "snake_case CamelCase",
)  # fmt: skip
NAME_THE_CAUSE = "make export-gguf CHECKPOINT=latest ARGS=--force"
"""What to run where a server reads a prompt otherwise than training did."""


def strings_of(encoder: "tokenizers.Tokenizer") -> list[str]:
    """The nasty strings, and each special token alone, inside a word, and between blanks."""
    specials = [token.content for token in encoder.get_added_tokens_decoder().values()]
    around = [text for token in specials for text in (token, f"a{token}b", f" {token}\n{token}")]
    return [*NASTY, *around]


def check(client: Client, encoder: "tokenizers.Tokenizer", lines: list[str], pre_tokenizer: str) -> dict:
    """Compare the ids of every string. Returns the counts; raises RunError at the first that differs."""
    nasty = strings_of(encoder)
    for text in [*nasty, *lines]:
        expected = encoder.encode(text).ids
        served = client.tokenize(text, add_special=True, parse_special=True)
        if served != expected:
            raise _difference(text, expected, served, encoder, pre_tokenizer)
    return {"nasty_strings": len(nasty), "lines": len(lines), "different": 0}


def first_difference(ids: Sequence[int], others: Sequence[int]) -> int:
    """The first position at which two sequences differ; where one is the other's beginning, its length."""
    pairs = enumerate(zip(ids, others, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(ids), len(others)))


def _difference(
    text: str, expected: list[int], served: list[int], encoder: "tokenizers.Tokenizer", pre_tokenizer: str
) -> RunError:
    position = first_difference(expected, served)
    return RunError(
        "the server splits text into other tokens than the tokenizer does",
        where=f"{text[:120]!r}, token {position}",
        found=f"{_shown(served, position, encoder)}; likely cause: {_cause(expected, served, encoder, pre_tokenizer)}",
        expected=_shown(expected, position, encoder),
    )


def _shown(ids: list[int], position: int, encoder: "tokenizers.Tokenizer") -> str:
    part = ids[position : position + 4]
    return f"{part} {[encoder.id_to_token(number) for number in part]} of {len(ids)}"


def _cause(expected: list[int], served: list[int], encoder: "tokenizers.Tokenizer", pre_tokenizer: str) -> str:
    if served[1:] == expected or expected[1:] == served:
        return "the add-BOS flag"
    specials = set(encoder.get_added_tokens_decoder())
    if [number for number in expected if number in specials] != [number for number in served if number in specials]:
        return "a special token that is no control token in the GGUF"
    if encoder.normalizer is not None:
        return "the tokenizer's normalizer, which llama.cpp does not apply"
    return f"the pre-tokenizer's name {pre_tokenizer!r} is not that of the tokenizer's split rule"
