"""The trainer's own step over made-up tokens, for those who watch what a step allocates: trace and calibration.

It is the loop's own code with the method's own model and loss; only the text and the weights are made up. Packed rows
have two records each, so that attention gets the mask that packed rows get; others have one of the full length.
"""

from __future__ import annotations

import contextlib

import numpy as np
import torch

from training.calculator.probe import MakeOptimizer, Phase
from training.calculator.shapes import config_of
from training.engine import budget, loop, optimizer
from training.engine.hooks import Hooks
from training.engine.ladder import Rung
from training.engine.order import window_rows
from training.engine.state import TrainState
from training.objectives import registry
from training.objectives.contract import measure
from training.recipe import schema
from training.recipe.model import Recipe


class TrainerProbe(Hooks):
    """A recipe's step as the trainer runs it. Implements `training.calculator.probe.StepProbe`."""

    def __init__(
        self, recipe: Recipe, device: torch.device, dtype: torch.dtype, make_optimizer: MakeOptimizer | None = None
    ):
        self.recipe = recipe
        method = registry.of(recipe.method)
        self.trainee = method.imagine(recipe, device, dtype)
        self.model = self.trainee.model.train()
        make = make_optimizer or optimizer.build
        self.optimizer = make(self.model, recipe.optimizer)
        vocab_size = config_of(recipe.model)["vocab_size"]
        self.rows = method.imagined_rows(recipe, _Split(recipe, vocab_size), _Tokenizer(vocab_size))
        self._loop = loop.Loop(recipe, self.model, self.optimizer, self.rows, None, self)
        plan, planned_by = budget.first_plan(recipe, self.rows.num_rows)
        self.state = TrainState(plan, planned_by, Rung.of(recipe))
        self._phase: Phase = contextlib.nullcontext

    def step(self, phase: Phase) -> None:
        """Run one optimizer step."""
        self._phase = phase
        self._loop.step(self.state)

    def evaluate(self, phase: Phase) -> None:
        """Measure one micro-batch without gradients."""
        with phase("evaluation"):
            measure(self.model, self.rows, np.arange(self.recipe.data.micro_batch), self.recipe.data.micro_batch)

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        return self._phase(name)


class _Split:
    """Records drawn at random, all of them trained; what `TokenSplit` is to the objective.

    Of a stream every position has a label; a record has one token more than inputs.
    """

    def __init__(self, recipe: Recipe, vocab_size: int):
        num_rows, seq_len = window_rows(recipe), recipe.data.seq_len
        if schema.reads_stream(recipe.method):
            each, self.num_tokens, self.trained = max(1, seq_len // 2), num_rows * seq_len + 1, None
            self.offsets = np.append(np.arange(0, self.num_tokens, each), self.num_tokens)
        else:
            first = seq_len // 2 if recipe.data.packing and seq_len > 2 else 0
            lengths = [first + 1, seq_len - first + 1] if first else [seq_len + 1]
            self.offsets = np.concatenate([[0], np.cumsum(lengths * num_rows)])
            self.num_tokens = int(self.offsets[-1])
            self.trained = np.ones(self.num_tokens, np.uint8)
        self.tokens = np.random.default_rng(0).integers(0, vocab_size, self.num_tokens)


class _Tokenizer:
    """What an objective asks of a tokenizer."""

    def __init__(self, vocab_size: int):
        self.pad_id, self.text_bytes_V = 0, np.ones(vocab_size, np.int64)
