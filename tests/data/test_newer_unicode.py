"""Letters that Unicode has got since Python's own table: kept, tokenized as the library does, and back to the byte."""

import unicodedata
from pathlib import Path

import pytest

from tests.data.test_tokens import make_dataset, make_tokenizer
from training.data import contamination, near, peek_view, tokens
from training.tokenizer import huggingface
from training.tokenizer.artifact import TOKENIZER

# Nag Mundari (Unicode 15.0), Garay (16.0), a Cyrillic pair of letters and Latin lambda with stroke (16.0), unassigned.
NEWER = "\U0001e4d0\U0001e4d1 \U00010d50\U00010d70 \u1c89\u1c8a a\ua7dc\ua7dab \U0001e4f0 x\u0378y"


def test_they_are_kept_tokenized_and_given_back(tmp_path: Path):
    data = make_dataset(tmp_path, [{"text": f"{NEWER} {number} {NEWER}"} for number in range(40)])
    tokenizer = make_tokenizer(data)
    split = tokens.open_split(tokens.tokenize(data, tokenizer), "train")
    library = huggingface.open_library(tokenizer.folder / TOKENIZER, frozenset(tokenizer.specials))
    for index, text in enumerate(data.iter_texts("train")):
        ids = split.tokens[int(split.offsets[index]) + 1 : int(split.offsets[index + 1]) - 1].tolist()
        assert NEWER in text and tokenizer.decode(ids) == text
        assert ids == library.encode(text, add_special_tokens=False).ids


@pytest.mark.skipif(unicodedata.unidata_version >= "15", reason="this Python knows some of them")
def test_where_pythons_own_table_decides_they_count_as_unknown():
    """As docs/data.md says: nothing lowers them, they are no words, and a terminal shows their numbers."""
    assert near.normal(["\u1c89 A"]) == "\u1c89 a".encode()
    assert contamination.words("\u1c89\u1c8a one") == ["one"]
    assert peek_view.printable("a\u1c89") == "a\\u1c89"
