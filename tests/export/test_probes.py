"""The draw of lines and prompts: repeatable, from the validation split, inside the context."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from training.core import files
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


@pytest.mark.parametrize("documents", ["split", "built-in", "short", "many short"])
def test_there_are_256_positions_of_32_prompts_inside_the_context(ours: Path, encoder: Tokenizer, documents: str):
    texts = {
        "split": lambda: probes.draw_texts(_named(ours)).documents,
        "built-in": lambda: probes.draw_texts(None).documents,
        "short": lambda: ["", "a", "b c"],
        "many short": lambda: [f"v{number}" for number in range(32)],
    }[documents]()
    prompts, num_passages = probes.make_prompts(encoder, texts, 48)
    assert (prompts, num_passages) == probes.make_prompts(encoder, texts, 48)
    assert (num_passages > 0) == ("short" in documents)
    assert sum(len(prompt.ids) > 1 for prompt in prompts) >= 32
    assert sum(len(prompt.lengths) for prompt in prompts) >= 256
    assert all(len(prompt.ids) <= 47 for prompt in prompts)
    assert all(max(prompt.lengths) <= len(prompt.ids) for prompt in prompts)
    assert sum(prompt.lengths == [1] for prompt in prompts) == probes.NUM_SINGLE_TOKENS
    assert sum(len(prefix) == 1 for prompt in prompts for prefix in prompt.prefixes()) == probes.NUM_SINGLE_TOKENS


def test_prompts_that_begin_alike_share_no_position(ours: Path, encoder: Tokenizer):
    """A template's beginning is every conversation's: what rounding is off there counts once."""
    documents = [f"system: You are brief and kind.\nuser: How many legs have {number} cats?" for number in range(32)]
    prompts, num_passages = probes.make_prompts(encoder, documents, 96)
    prefixes = [tuple(prefix) for prompt in prompts for prefix in prompt.prefixes()]
    assert len(prefixes) == len(set(prefixes)) >= 256 and num_passages > 0
    assert len(probes.make_prompts(encoder, 32 * documents[:1], 96)[0]) >= 32


def test_a_reservoir_gives_every_item_its_chance():
    sample = probes._Reservoir(10)
    for number in range(1000):
        sample.offer(str(number))
    numbers = [int(text) for text in sample.kept]
    assert len(set(numbers)) == 10 and min(numbers) < 300 and max(numbers) > 700
