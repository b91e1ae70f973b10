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

    from training.recipe.model import Optimizer, Recipe

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


MakeOptimizer = Callable[["torch.nn.Module", "Optimizer"], "torch.optim.Optimizer"]


class MakeProbe(Protocol):
    """Builds a probe."""

    def __call__(
        self, recipe: Recipe, device: torch.device, dtype: torch.dtype, make_optimizer: MakeOptimizer | None = None
    ) -> StepProbe:
        """Build the probe of a recipe, with an optimizer of its own or `make_optimizer`'s.

        Raises UserError where its step cannot be run.
        """


def dtype_of(weights: str, *, on_cpu: bool = False) -> torch.dtype:
    """The type that a probe's other weights have: that of `memory.weights`; of an NF4 base 16 bits, 32 on a CPU."""
    import torch

    if weights == "nf4" and on_cpu:
        return torch.float32
    return {"fp32": torch.float32, "bf16": torch.bfloat16}.get(weights, torch.float16)
