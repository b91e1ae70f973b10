"""A recipe that is valid and small, and a way to write others beside it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from training.core.errors import Problems
from training.recipe.load import load

VALID = """\
name: tiny
method: pretrain
model:
  arch:
    vocab_size: 64
    hidden_size: 32
    intermediate_size: 64
    num_hidden_layers: 2
    num_attention_heads: 4
    num_key_value_heads: 2
    max_position_embeddings: 128
data: {seq_len: 64, packing: true}
stop: {max_steps: 10}
"""


def problems(path: Path, *overrides: str) -> str:
    """All that a recipe is refused for."""
    with pytest.raises(Problems) as caught:
        load(path, overrides)
    return str(caught.value)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write a recipe's text and return its path; without text, the valid one."""

    def write(text: str = VALID, name: str = "tiny.yaml") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write
