"""Text encoded pre-token by pre-token: the very ids of the library, on odd text of every kind."""

import json
import random
import re
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from training.tokenizer import encoder as encoders
from training.tokenizer import huggingface, pretokenizers
from training.tokenizer.encoder import Encoder
from training.tokenizer.ids import NASTY
from training.tokenizer.splitter import Splitter

_ODD = [
    " ", "  ", "\n", "\r\n", "\t", "'s", "'LL", "'", "'\u017f", "1", "23", "456", "a", "Ab", "é", "e\u0301", "你", "👍",
    "!", "((", "/", "\u2028", "\xa0", "\u0660", "Ⅷ", "½", "\U0001d7d8", "\U00020000", "\x85", "\x1c", "\0", "<|bos|>",
]  # fmt: skip


def odd_text(draw: random.Random) -> str:
    """Blanks, contractions and digits in any order, and any character that UTF-8 can hold."""
    ranges = [range(0x80), range(0x3000), range(0xD800), range(0xE000, 0x110000), range(0x1D000, 0x1F000)]
    return "".join(
        draw.choice(_ODD) if draw.random() < 0.7 else chr(draw.choice(draw.choice(ranges)))
        for _ in range(draw.randrange(80))
    )


def of_library(path: Path, specials: frozenset[str], texts: list[str]) -> list[list[int]]:
    library = huggingface.open_library(path, specials)
    return [one.ids for one in library.encode_batch(texts, add_special_tokens=False)]


def ids(encoder: Encoder, text: str) -> list[int]:
    return np.frombuffer(encoder.encode(text), "<u2").tolist()


@pytest.fixture
def make_encoder(make_tokenizer):
    """A function that gives an encoder, its file and its specials for a pre-tokenizer's name."""

    def make(name: str, texts: list[str] | None = None) -> tuple[Encoder, Path, frozenset[str]]:
        tokenizer = make_tokenizer(texts, pre_tokenizer=name, vocab_size=900)
        specials = frozenset(tokenizer.specials)
        path = tokenizer.folder / "tokenizer.json"
        return Encoder(path, tokenizer.dtype, specials), path, specials

    return make


@pytest.mark.parametrize("name", pretokenizers.CONFIGURATIONS)
def test_odd_text_has_the_librarys_ids(make_encoder, name: str):
    draw = random.Random(11)
    texts = [*NASTY, *(odd_text(draw) for _ in range(1500))]
    encoder, path, specials = make_encoder(name, texts[:400])
    assert [ids(encoder, text) for text in texts] == of_library(path, specials, texts)


def test_added_tokens_are_found_as_the_library_finds_them(make_encoder):
    """Also one inside another, two that touch, and blanks beside them."""
    _, path, specials = make_encoder("llama-bpe")
    document = json.loads(path.read_text())
    first = max(document["model"]["vocab"].values()) + 1
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    for number, text in enumerate(("kilo", "kilowatt", "watt hour", " x ")):
        document["added_tokens"].append({"id": first + number, "content": text, **flags})
    path.write_text(json.dumps(document))
    draw = random.Random(5)
    parts = ["kilo", "watt", " hour", " x", " ", "12", "\n", *specials]
    texts = ["".join(draw.choices(parts, k=draw.randrange(12))) for _ in range(2000)]
    for plain in (frozenset(), specials):
        encoder = Encoder(path, np.dtype("<u2"), plain)
        assert [ids(encoder, text) for text in texts] == of_library(path, plain, texts)


@pytest.mark.parametrize("name", pretokenizers.CONFIGURATIONS)
def test_every_name_has_a_splitter(name: str):
    splitter = Splitter.of(pretokenizers.CONFIGURATIONS[name])
    text = "a👍 \U00020000 \U0001d7d8\U0001d167"  # a symbol, a letter, a number and a mark beyond U+FFFF
    assert "".join(piece for pieces in splitter.pieces(text) for piece in pieces) == text


@pytest.mark.parametrize("name", pretokenizers.CONFIGURATIONS)
def test_no_character_below_the_surrogates_is_cut_in_another_way(name: str):
    """Each character of the first plane after a letter, a digit, a blank and an apostrophe."""
    splitter, library = Splitter.of(pretokenizers.CONFIGURATIONS[name]), pretokenizers.build(name)
    points = [*range(0xD800), *range(0xE000, 0x10000)]
    for start in range(0, len(points), 4096):
        text = "".join(f"a{c}1{c} {c}'{c}" for c in map(chr, points[start : start + 4096]))
        found = [piece for pieces in splitter.pieces(text) for piece in pieces]
        assert found == [text[begin:end] for _, (begin, end) in library.pre_tokenize_str(text)]


@pytest.mark.slow
def test_the_whole_standard_library_has_the_librarys_ids(make_encoder):
    paths = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    paths = [path for path in paths if "site-packages" not in path.parts]
    for name in pretokenizers.CONFIGURATIONS:
        texts = [path.read_text(errors="replace") for path in paths[:: 1 if name == "llama-bpe" else 9]]
        encoder, path, specials = make_encoder(name, texts[::50])
        library = huggingface.open_library(path, specials)
        for start in range(0, len(texts), 50):
            part = texts[start : start + 50]
            expected = library.encode_batch_fast(part, add_special_tokens=False)
            assert [encoder.encode(text) for text in part] == [np.array(one.ids, "<u2").tobytes() for one in expected]


def test_a_long_text_is_encoded_in_parts_with_the_same_ids(make_encoder):
    for name in ("llama-bpe", "smollm", "deepseek-v3"):
        encoder, path, specials = make_encoder(name)
        text = "value = 12345  # don't 你好\r\n" * 42_000 + "x" * 3000 + " " * 3000
        assert len(text) > 1 << 20
        assert [ids(encoder, text)] == of_library(path, specials, [text])


def test_the_table_stays_within_its_limit(make_encoder, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(encoders, "_TABLE_BYTES", 30_000)
    encoder, path, specials = make_encoder("qwen2")
    texts = [f"word{chr(97 + i % 26)}{chr(97 + i // 26 % 26)} {i}" * 3 for i in range(2000)]
    assert [ids(encoder, text) for text in texts] == of_library(path, specials, texts)
    assert encoder._table_bytes < 60_000 and len(encoder._table) < 300


@pytest.mark.parametrize(
    "pre_tokenizer",
    [
        {"type": "Split", "pattern": {"Regex": r"(?<=a)\w+"}, "behavior": "Isolated", "invert": False},
        {"type": "Split", "pattern": {"Regex": r"\p{L}+"}, "behavior": "Removed", "invert": False},
        {"type": "Split", "pattern": {"Regex": r"[^\S]+"}, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        {"type": "Whitespace"},
    ],
)
def test_what_is_not_known_has_no_splitter(pre_tokenizer: dict):
    assert Splitter.of(pre_tokenizer) is None


def test_what_lies_between_matches_is_kept():
    pattern = {"type": "Split", "pattern": {"Regex": r"\p{L}{1,2}"}, "behavior": "Isolated", "invert": False}
    for text in ("a b12abc", "", "  ", "12 " * 600_000 + "abc"):
        pieces = [piece for pieces in Splitter.of(pattern).pieces(text) for piece in pieces]
        assert pieces == re.findall(r"[a-z]{1,2}|[^a-z]+", text)


def test_a_lone_surrogate_is_an_error(make_encoder):
    encoder, *_ = make_encoder("llama-bpe")
    with pytest.raises(TypeError):
        encoder.encode("a \ud800 b")
