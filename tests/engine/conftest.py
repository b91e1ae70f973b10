"""A small real data set, its tokenizer and a recipe that trains a tiny model in a second or two."""

import json
from pathlib import Path

import pytest

RECIPE = """\
name: tiny
method: pretrain
model:
  arch: {{family: llama, vocab_size: 384, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2,
         num_attention_heads: 2, num_key_value_heads: 1, max_position_embeddings: 64, tie_word_embeddings: true}}
tokenizer: {{path: "{tokenizer}"}}
data: {{dataset: "{dataset}", seq_len: 32, micro_batch: 2, packing: true}}
memory: {{weights: fp32, gradient_checkpointing: false}}
optimizer: {{name: adamw, lr: 3e-3}}
schedule: {{kind: cosine, warmup: 10%}}
batch: {{accumulate: 2}}
stop: {{max_steps: 12}}
checkpoint: {{every_steps: 4, every_minutes: null, keep: 2, initial: true}}
evaluate: {{every_steps: 4, records: 8}}
"""


def make_records(path: Path, count: int = 60) -> Path:
    """Write JSONL of short texts, each in a group of its own."""
    lines = [
        json.dumps(
            {"text": f"def f{i}(x):\n    return x * {i * 37} + {i}  # number {i * 1009}\n" * 4, "group": f"g{i}"}
        )
        for i in range(count)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def make_recipe(folder: Path) -> Path:
    """Prepare the data and the tokenizer under the test's data root and write the recipe that names them."""
    from training.cli import main

    records = make_records(folder / "records.jsonl")
    assert main(["data-prepare", str(records), "--name", "tiny"]) == 0
    assert main(["tokenizer-train", "--dataset", "tiny", "--name", "tiny", "--vocab-size", "384"]) == 0
    recipe = folder / "tiny.yaml"
    recipe.write_text(RECIPE.format(dataset="tiny", tokenizer="tiny"))
    return recipe


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return make_recipe(tmp_path)
