"""The PyTorch side of a proof: weights come and go layer by layer."""

from collections import Counter

import numpy as np
import pytest
import torch
import transformers

from training.export import reference
from training.export.checkpoint import Checkpoint
from training.export.probes import Prompt

PROMPTS = [Prompt([5, 6, 7, 8], [1, 4]), Prompt([9], [1]), Prompt([2, 3], [2])]


def test_each_weight_is_read_once_and_none_stays(plain: Checkpoint, monkeypatch: pytest.MonkeyPatch):
    """However many prompts there are, the head's too."""
    read, models, value, empty = Counter(), [], reference._Streamed._value, reference._empty
    monkeypatch.setattr(reference._Streamed, "_value", lambda self, full: read.update([full]) or value(self, full))
    monkeypatch.setattr(reference, "_empty", lambda checkpoint: models.append(empty(checkpoint)) or models[-1])
    reference.logprobs(plain, PROMPTS)
    [model] = models
    assert set(read) == {name for name, _ in model.named_parameters()} and set(read.values()) == {1}
    assert all(parameter.is_meta for parameter in model.parameters())


def test_log_probabilities_are_those_of_the_whole_model(plain: Checkpoint):
    model = transformers.AutoModelForCausalLM.from_pretrained(plain.folder, dtype=torch.float32)
    with torch.no_grad():
        rows = [
            torch.log_softmax(model(torch.tensor([prompt.ids])).logits[0, length - 1].double(), -1)
            for prompt in PROMPTS for length in prompt.lengths
        ]  # fmt: skip
    found_NV = reference.logprobs(plain, PROMPTS)
    assert found_NV.dtype == np.float32 and found_NV.shape == (4, model.config.vocab_size)
    assert np.abs(found_NV - torch.stack(rows).numpy()).max() < 1e-5
