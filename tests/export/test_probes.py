"""The draw of lines and prompts: repeatable, from the validation split, inside the context."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from training.core import files
from training.core.errors import UserError
from training.export import probes


@pytest.fixture
def encoder(tokenizer_files) -> Tokenizer:
    return Tokenizer.from_file(str(tokenizer_files / "tokenizer.json"))


def _named(ours: Path) -> dict:
    return files.read_json(ours / "manifest.json")["dataset"]


def test_texts_come_from_the_validation_split_and_are_the_same_each_time(ours: Path, own_roots: Path):
    texts = probes.draw_texts(_named(ours))
    assert texts == probes.draw_texts(_named(ours))
    assert len(texts.lines) == probes.NUM_LINES and len(texts.documents) == probes.NUM_PROMPTS
    assert texts.origin.startswith("tiny@") and "validation" in texts.origin
    [split] = own_roots.rglob("validation.jsonl")
    raw = split.read_text()
    assert all(line.strip() and line.replace("\r", "\\r").replace("\t", "\\t") in raw for line in texts.lines)


def test_a_dataset_that_is_not_here_is_said(ours: Path):
    texts = probes.draw_texts({"name": "gone", "hash": "0" * 64})
    assert texts.origin.startswith("built-in passages (gone@000000000000")
    assert probes.draw_texts(None).origin == "built-in passages (the checkpoint names no dataset)"


@pytest.mark.parametrize("context", [256, 48, 8])
@pytest.mark.parametrize("documents", ["split", "built-in", "short", "one", "many short"])
def test_there_are_256_positions_of_32_prompts_inside_the_context(
    ours: Path, encoder: Tokenizer, documents: str, context: int
):
    """Whatever the split holds: nothing, one document, or many that are too short."""
    texts = {
        "split": lambda: probes.draw_texts(_named(ours)).documents,
        "built-in": lambda: probes.draw_texts(None).documents,
        "short": lambda: ["", "a", "b c"],
        "one": lambda: probes.draw_texts(_named(ours)).documents[:1],
        "many short": lambda: [f"is {number}" for number in range(32)],
    }[documents]()
    prompts, num_parts = probes.make_prompts(encoder, texts, context)
    assert (prompts, num_parts) == probes.make_prompts(encoder, texts, context)
    single = [prompt for prompt in prompts if len(prompt.ids) == 1]
    longer = [prompt for prompt in prompts if len(prompt.ids) > 1]
    assert len(single) == probes.NUM_SINGLE_TOKENS and all(prompt.lengths == [1] for prompt in single)
    assert len(longer) >= 32 and len({tuple(prompt.ids) for prompt in longer}) >= 32
    assert 256 <= sum(len(set(prompt.lengths)) for prompt in longer) < 256 + len(longer)
    assert all(min(prompt.lengths) >= 2 and max(prompt.lengths) <= len(prompt.ids) < context for prompt in longer)
    assert (num_parts == 0) == (documents == "split" and context > 8), num_parts


def test_a_context_that_is_too_short_for_a_proof_is_refused(encoder: Tokenizer):
    with pytest.raises(UserError, match="too short to prove") as refusal:
        probes.make_prompts(encoder, ["a b c d"], 3)
    assert "3 tokens" in refusal.value.found and "256 positions in 32 prompts" in refusal.value.expected


def test_a_reservoir_gives_every_item_its_chance():
    sample = probes._Reservoir(10)
    for number in range(1000):
        sample.offer(str(number))
    numbers = [int(text) for text in sample.kept]
    assert len(set(numbers)) == 10 and min(numbers) < 300 and max(numbers) > 700
