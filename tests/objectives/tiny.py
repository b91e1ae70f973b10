"""A tiny base with a tokenizer of its own, fetched and pinned, chat records, and recipes that tune it in a second."""

import json
import shutil
from pathlib import Path

import pytest

from tests.engine.conftest import make_records
from tests.engine.test_run import final_weights, losses, train
from training.cli import main
from training.core import files, paths
from training.recipe import bases
from training.runs.folder import RunFolder
from training.tokenizer import artifact

SIZES = {
    "vocab_size": 384, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 128,
}  # fmt: skip
BASES = """\
# a comment that stays

tiny:
  source: folder:tiny-source          # beside it
  licence: MIT
  config:
    model_type: llama
    vocab_size: 384
    hidden_size: 32
    intermediate_size: 64
    num_hidden_layers: 2
    num_attention_heads: 2
    num_key_value_heads: 1
    max_position_embeddings: 128
    tie_word_embeddings: true

other:                                # another one
  source: hub:owner/other
  licence: MIT
  config: {model_type: llama, vocab_size: 8}
"""
RECIPE = """\
name: tuned
method: METHOD
model: {base: tiny}
data: {dataset: chat, seq_len: 64, micro_batch: 2, loss_on: assistant}
memory: {weights: WEIGHTS}
optimizer: {lr: 5e-3}
schedule: {warmup: 0 steps}
batch: {accumulate: 2}
stop: {max_steps: 8}
checkpoint: {every_steps: 2, every_minutes: null, keep: 9}
evaluate: {every_steps: 4, records: 8}
"""


def make_source(folder: Path, tokenizer: artifact.Tokenizer, tied: bool = True) -> None:
    """Write a Hugging Face folder with random weights and a tokenizer's files."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=tied)).save_pretrained(folder)
    tokenizer.copy_to(folder)
    (folder / artifact.MANIFEST_IN_CHECKPOINT).unlink()


def make_chat(path: Path, count: int = 40) -> Path:
    """Write conversations whose answers follow from what is asked."""
    records = [
        {
            "messages": [
                {"role": "user", "content": f"f{i}"},
                {"role": "assistant", "content": f"x * {i % 7}" + " + 1" * (i % 3)},
            ],
            "group": f"g{i}",
        }
        for i in range(count)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def make_world(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the tokenizer, the base (fetched and pinned) and the data under the test's data root; returns a folder."""
    assert main(["data-prepare", str(make_records(folder / "records.jsonl")), "--name", "texts"]) == 0
    assert main(["tokenizer-train", "--dataset", "texts", "--name", "tiny", "--vocab-size", "384"]) == 0
    tokenizer = artifact.load(artifact.resolve("tiny"))
    make_source(paths.roots().models / "tiny-source", tokenizer)
    monkeypatch.setattr(bases, "FILE", folder / "bases.yaml")
    bases.FILE.write_text(BASES)
    assert main(["base-fetch", "tiny", "--pin"]) == 0
    assert main(["data-prepare", str(make_chat(folder / "chat.jsonl")), "--name", "chat"]) == 0
    for method, weights in (("full", "fp32"), ("lora", "fp32"), ("qlora", "nf4")):
        text = RECIPE.replace("METHOD", method).replace("WEIGHTS", weights)
        (folder / f"{method}.yaml").write_text(text)
    return folder


def train_in_any_split(recipe: Path, *others: tuple[str, ...]) -> None:
    """Train an adapter's recipe with its windows cut in several ways, and hold their losses against each other."""
    found = []
    for overrides in (
        ("data.micro_batch=4", "batch.accumulate=1"), ("data.micro_batch=1", "batch.accumulate=4"),
        ("memory.loss_chunk=3",), ("memory.gradient_checkpointing=true",), *others,
    ):  # fmt: skip
        _, run = train(recipe, "lora.dropout=0", "stop.max_steps=4", *overrides)
        found.append(list(losses(run).values()))
    for other in found[1:]:
        assert other == pytest.approx(found[0], abs=1e-5)


def resume_in_the_middle(run: RunFolder) -> None:
    """Resume a completed run of 8 steps behind its step 4, and hold losses and weights against those that it had."""
    wanted, seen = final_weights(run), losses(run)
    for step in (6, 8):
        shutil.rmtree(run.step_folder(step))
    run.update(status="lost")
    assert main(["resume", run.id]) == 0
    assert final_weights(run) == wanted and losses(run) == seen


def manifest_of(folder: Path) -> dict:
    return files.read_json(folder / files.MANIFEST)
