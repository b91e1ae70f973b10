"""The longest record of the prepared data as the length that counts."""

import pytest

from training.calculator import lengths, nvml
from training.calculator.fit import fit, require
from training.core.errors import RunError
from training.recipe.load import load


def stats(form: str = "text", **train: dict) -> dict:
    return {"schema": 1, "form": form, "splits": {"train": train}}


TOKENS = {"splits": {"train": {"tokens": 7000, "tokens_per_record": {"max": 2000, "longest": "train.jsonl:101"}}}}


@pytest.fixture
def tune(tmp_path):
    """A recipe that tunes on padded rows of up to 4,096 tokens, four at a time."""
    path = tmp_path / "tune.yaml"
    path.write_text(
        "name: tune\nmethod: full\nmodel: {base: smollm2-135m-instruct}\nstop: {max_steps: 1}\n"
        "data: {seq_len: 4096, micro_batch: 4}\n"
    )
    return lambda *overrides: load(path, overrides)


def test_a_late_long_record_is_the_length_that_counts(tune):
    """B71 in figures: 100 records of 50 tokens and one of 2,000 at the end; a batch of 4, padded, is 4 x 2,000."""
    found = fit(tune(), vram="80GiB", longest=lengths.of_tokens(TOKENS))
    exactly = fit(tune("data.seq_len=2000"), vram="80GiB")
    assert found.estimate.peak == exactly.estimate.peak
    assert "4 x 2000 tokens" in " ".join(found.estimate.assumptions)
    assert "train.jsonl:101" in found.estimate.assumptions[0]


def test_the_limit_of_the_recipe_and_packing_stand(tune):
    longest = lengths.of_tokens(TOKENS)
    assert lengths.shortened(tune("data.seq_len=512").recipe, longest).data.seq_len == 512
    assert lengths.shortened(tune("data.packing=true").recipe, longest).data.seq_len == 4096
    assert lengths.shortened(tune().recipe, None).data.seq_len == 4096


def test_bytes_bound_tokens_of_texts_and_nothing_of_conversations():
    longest = lengths.of_stats(stats(text_bytes_per_record={"p50": 90, "max": 1000, "longest": "train.jsonl:7"}))
    assert (longest.tokens, longest.is_bound) == (1002, True) and "(train.jsonl:7) has at most 1002" in longest.in_words
    assert lengths.of_stats(stats("messages", text_bytes_per_record={"max": 1000})) is None
    assert lengths.of_stats(stats()) is None


def test_a_refusal_names_the_record_that_is_too_long(tune, monkeypatch):
    monkeypatch.setattr(nvml, "ask", lambda: nvml.Answer((), None, "no driver"))
    much = tune("memory.weights=fp32", "data.micro_batch=65536")
    with pytest.raises(RunError) as caught:
        require(much, lengths.of_tokens(TOKENS))
    assert "the longest record (train.jsonl:101) has 2000 tokens" in caught.value.found
    with pytest.raises(RunError) as caught:
        require(much)
    assert "longest" not in caught.value.found
