"""What a trace or a calibration watches: a training step, whoever's it is.

The trainer implements this and the commands pass it in; the plain Hugging Face step stands in
`training.calculator.plain`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from training.recipe.model import Recipe

Phase = Callable[[str], AbstractContextManager[None]]
"""Surrounds a part of a step by its name: `forward`, `backward`, `optimizer_step` or `evaluation`."""


class StepProbe(Protocol):
    """A model with its optimizer, in the type and on the device that it trains on."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer

    def step(self, phase: Phase) -> None:
        """Run one optimizer step of the recipe's size over made-up tokens."""

    def evaluate(self, phase: Phase) -> None:
        """Run one micro-batch without gradients."""


MakeProbe = Callable[["Recipe", "torch.device", "torch.dtype"], StepProbe]
"""Builds a probe of a recipe. Raises UserError where its step cannot be run."""
