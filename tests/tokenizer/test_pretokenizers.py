"""The pre-tokenizers by llama.cpp's name, and that a configuration which is no known one's has no name."""

import copy
import json

import pytest
from tokenizers import Tokenizer, models, normalizers

from training.core.errors import IntegrityError, UserError
from training.tokenizer import pretokenizers

TEXT = "I'LL don't 12345 x=1\r\n\r\n   y\t\tz  <|im_start|> 你好"


def document(name: str) -> dict:
    library = Tokenizer(models.BPE(ignore_merges=pretokenizers.ignores_merges(name)))
    library.pre_tokenizer = pretokenizers.build(name)
    return json.loads(library.to_str())


def pieces(name: str, text: str) -> list[str]:
    """The text's own pieces, by their offsets."""
    return [text[start:end] for _, (start, end) in pretokenizers.build(name).pre_tokenize_str(text)]


@pytest.mark.parametrize("name", pretokenizers.CONFIGURATIONS)
def test_what_is_built_has_its_name_back(name: str):
    assert pretokenizers.name_of(document(name)) == name


@pytest.mark.parametrize("name", pretokenizers.CONFIGURATIONS)
def test_every_split_covers_the_text(name: str):
    assert "".join(pieces(name, TEXT)) == TEXT


def test_digits_are_cut_as_each_name_means():
    assert pieces("llama-bpe", "a 12345") == ["a", " ", "123", "45"]
    assert pieces("qwen2", "a 123") == ["a", " ", "1", "2", "3"]
    assert pieces("smollm", "a 123") == ["a", " ", "1", "2", "3"]
    assert pieces("gpt-2", "a 12345") == ["a", " 12345"]


def test_contractions_and_blanks_are_cut_as_each_name_means():
    assert pieces("llama-bpe", "I'LL\r\n\r\n   y") == ["I", "'LL", "\r\n\r\n", "  ", " y"]
    assert pieces("gpt-2", "I'LL\r\n\r\n   y") == ["I", "'", "LL", "\r\n\r\n  ", " y"]
    assert pieces("llama-bpe", "'\u017f") == ["'\u017f"]  # long s is no contraction for llama.cpp


@pytest.mark.parametrize("name", ["llama-bpe", "qwen2"])
def test_the_spelling_of_model_makers_has_the_name_too(name: str):
    config = document(name)
    pattern = config["pre_tokenizer"]["pretokenizers"][0]["pattern"]
    pattern["Regex"] = pattern["Regex"].replace(
        "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])", "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    )
    config["pre_tokenizer"]["pretokenizers"][1]["trim_offsets"] = False
    assert pretokenizers.name_of(config) == name


def test_a_changed_configuration_has_no_name():
    for change in ({"behavior": "Removed"}, {"invert": True}, {"pattern": {"Regex": r"\p{N}{1,2}"}}):
        config = copy.deepcopy(document("llama-bpe"))
        config["pre_tokenizer"]["pretokenizers"][0].update(change)
        with pytest.raises(IntegrityError, match="none that llama"):
            pretokenizers.name_of(config)
    config = document("gpt-2")
    config["pre_tokenizer"]["add_prefix_space"] = True
    with pytest.raises(IntegrityError):
        pretokenizers.name_of(config)
    with pytest.raises(IntegrityError):
        pretokenizers.name_of(config | {"pre_tokenizer": None})


def test_whether_merges_are_ignored_decides_between_two_names_or_has_none():
    """llama-bpe and dbrx split alike; a pre-token that is in the vocabulary is taken whole by the first alone."""
    others = {"llama-bpe": "dbrx", "dbrx": "llama-bpe"}
    for name in pretokenizers.CONFIGURATIONS:
        config = document(name)
        config["model"]["ignore_merges"] = not pretokenizers.ignores_merges(name)
        if name in others:
            assert pretokenizers.name_of(config) == others[name]
            continue
        with pytest.raises(IntegrityError, match="other ids") as caught:
            pretokenizers.name_of(config)
        assert "ignore_merges" in caught.value.found


def test_a_normalizer_but_nfc_has_no_name():
    """NFC is not applied here, as llama.cpp does not."""
    for normalizer in (normalizers.NFKC(), normalizers.Prepend("\u2581"), normalizers.Lowercase()):
        config = document("qwen2") | {"normalizer": json.loads(normalizer.__getstate__())}
        with pytest.raises(IntegrityError) as caught:
            pretokenizers.name_of(config)
        assert "normalizer" in caught.value.found
    for same in ({"type": "NFC"}, {"type": "Sequence", "normalizers": []}):
        assert pretokenizers.name_of(document("qwen2") | {"normalizer": same}) == "qwen2"


def test_what_makes_ids_random_or_marks_words_has_no_name():
    for key, value in (("dropout", 0.1), ("end_of_word_suffix", "</w>"), ("continuing_subword_prefix", "##")):
        config = document("gpt-2")
        config["model"][key] = value
        with pytest.raises(IntegrityError) as caught:
            pretokenizers.name_of(config)
        assert key in caught.value.found


def test_an_unknown_name_lists_the_known():
    with pytest.raises(UserError) as caught:
        pretokenizers.build("gpt2")
    assert "gpt-2" in caught.value.expected
