"""A recipe to plan with, changed by overrides."""

from collections.abc import Callable

import pytest

from training.recipe.load import load
from training.recipe.model import Recipe

SMALL = """\
name: small
method: pretrain
model:
  arch: {family: llama, vocab_size: 4096, hidden_size: 256, intermediate_size: 768, num_hidden_layers: 4,
         num_attention_heads: 4, num_key_value_heads: 2, max_position_embeddings: 256, tie_word_embeddings: true}
data: {seq_len: 256, micro_batch: 2, packing: true}
memory: {weights: fp32}
batch: {accumulate: 1}
stop: {max_steps: 400}
"""


@pytest.fixture
def recipe(tmp_path) -> Callable[..., Recipe]:
    """A small Llama's recipe with overrides; with `base=`, one that tunes a base instead."""

    def recipe(*overrides: str, base: str | None = None, method: str = "full") -> Recipe:
        if base is None:
            path = tmp_path / "small.yaml"
            path.write_text(SMALL)
            return load(path, overrides).recipe
        path = tmp_path / "based.yaml"
        path.write_text(f"name: based\nmethod: {method}\nmodel: {{base: {base}}}\nstop: {{max_steps: 1}}\n")
        return load(path, overrides).recipe

    return recipe
