"""The comparison of ids, against servers that are only pretended."""

import pytest
from tokenizers import Tokenizer

from tests.export.tiny_checkpoint import train_tokenizer
from training.core.errors import RunError
from training.tokenizer import ids


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(folder)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


class _Server:
    """Answers as the tokenizer does, changed by `spoil(text, ids)`."""

    def __init__(self, encoder: Tokenizer, spoil=lambda text, found: found):
        self._encoder, self._spoil = encoder, spoil

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        assert add_special and parse_special
        return self._spoil(text, self._encoder.encode(text).ids)


def test_the_vocabulary_has_merges_across_digits(encoder: Tokenizer):
    assert any(token.isdigit() and len(token) == 3 for token in encoder.get_vocab())


def test_equal_ids_are_counted(encoder: Tokenizer):
    counts = ids.check(_Server(encoder), encoder, ["a line", "1234"], "llama-bpe")
    assert counts == {"nasty_strings": len(ids.NASTY) + 3 * 5, "lines": 2, "different": 0}


def test_the_nasty_strings_hold_what_was_promised(encoder: Tokenizer):
    strings = ids.strings_of(encoder)
    wanted = ["", "1234567", "don't", "  ", "\t", "\r\n", "\u200d", "e\u0301", "\u00e9", "漢字", "\u2028", "\u00a0"]
    assert all(any(part in text if part else text == "" for text in strings) for part in wanted)
    assert {"<|bos|>", "<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>"} <= set(strings)


@pytest.mark.parametrize(
    ("spoil", "cause"),
    [
        (lambda text, found: found[1:], "add-BOS"),
        (lambda text, found: [7 if number == 4 else number for number in found], "special token"),
        (lambda text, found: found if "1234567" not in text else [*found[:-1], 9, 9], "pre-tokenizer's name"),
    ],
    ids=["bos", "special", "split"],
)
def test_a_difference_names_string_position_and_cause(encoder: Tokenizer, spoil, cause: str):
    with pytest.raises(RunError) as failure:
        ids.check(_Server(encoder, spoil), encoder, [], "llama-bpe")
    assert cause in failure.value.found and "token " in failure.value.where


def test_a_line_that_differs_fails_too(encoder: Tokenizer):
    server = _Server(encoder, lambda text, found: found[:-1] if text == "the line" else found)
    with pytest.raises(RunError) as failure:
        ids.check(server, encoder, ["a line", "the line"], "llama-bpe")
    assert "'the line'" in failure.value.where
