"""The trainer's own step over made-up tokens, for those who watch what a step allocates: trace and calibration.

It is the loop's own code with the objective's own loss; only the text is made up. Rows are packed, with two documents
each, so that attention gets the mask that packed rows get.
"""

from __future__ import annotations

import contextlib

import numpy as np
import torch

from training.calculator.probe import MakeOptimizer, Phase
from training.engine import loop, model, optimizer, trainable
from training.engine.checkpoint import TrainState
from training.objectives.contract import measure
from training.objectives.pretrain import PretrainRows
from training.recipe.model import Recipe

_BOS, _PAD = 0, 1


class TrainerProbe(loop.Hooks):
    """A recipe's step as the trainer runs it. Implements `training.calculator.probe.StepProbe`."""

    def __init__(
        self, recipe: Recipe, device: torch.device, dtype: torch.dtype, make_optimizer: MakeOptimizer | None = None
    ):
        trainable.require_method(recipe, "add memory.profile=hf")
        self.recipe = recipe
        self.model = model.build(recipe, dtype=dtype).train()
        if device.type != "cpu":
            self.model.to(device)
        make = make_optimizer or optimizer.build
        self.optimizer = make(self.model, recipe.optimizer)
        self.rows = _made_up_rows(recipe)
        self._loop = loop.Loop(recipe, self.model, self.optimizer, self.rows, None, self)
        plan, planned_by = loop.first_plan(recipe, self.rows.num_rows)
        self._state = TrainState(plan, planned_by)
        self._phase: Phase = contextlib.nullcontext

    def step(self, phase: Phase) -> None:
        """Run one optimizer step."""
        self._phase = phase
        self._loop.step(self._state)

    def evaluate(self, phase: Phase) -> None:
        """Measure one micro-batch without gradients."""
        with phase("evaluation"):
            measure(self.model, self.rows, np.arange(self.recipe.data.micro_batch), self.recipe.data.micro_batch)

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        return self._phase(name)


class _Split:
    """Two documents a row, drawn at random; what `TokenSplit` is to the objective."""

    def __init__(self, num_rows: int, seq_len: int, vocab_size: int):
        self.num_tokens = num_rows * seq_len + 1
        self.tokens = np.random.default_rng(0).integers(min(2, vocab_size - 1), vocab_size, self.num_tokens)
        self.tokens[:: max(1, seq_len // 2)] = _BOS


def _made_up_rows(recipe: Recipe) -> PretrainRows:
    vocab_size, chunk = recipe.model.arch["vocab_size"], recipe.memory.loss_chunk
    split = _Split(loop.window_rows(recipe), recipe.data.seq_len, vocab_size)
    return PretrainRows(
        split, np.ones(vocab_size, dtype=np.int64), seq_len=recipe.data.seq_len, bos_id=_BOS, pad_id=_PAD,
        loss_chunk=0 if chunk == "auto" else chunk,
    )  # fmt: skip
