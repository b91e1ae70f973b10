"""What is done when memory runs out: the next lower rung of a ladder on which every rung gives the same mathematics.

A micro-batch is halved, down to one row; then the layers' inputs alone are kept and the rest is computed again. Below
that the row itself is left out, which is for the loop to do and to count.
"""

from __future__ import annotations

import dataclasses

import torch

from training.core import errors
from training.recipe.model import Recipe


@dataclasses.dataclass(frozen=True)
class Rung:
    """How much of a window is in memory at once.

    Args:
        micro_batch: rows of one forward pass.
        checkpointing: whether layers are computed again in the backward pass.
    """

    micro_batch: int
    checkpointing: bool

    @classmethod
    def of(cls, recipe: Recipe) -> Rung:
        """The rung that the recipe begins on."""
        return cls(recipe.data.micro_batch, recipe.memory.gradient_checkpointing)

    def lower(self, model: torch.nn.Module) -> Rung | None:
        """The next rung down for this model; None at the lowest."""
        if self.micro_batch > 1:
            return dataclasses.replace(self, micro_batch=self.micro_batch // 2)
        if not self.checkpointing and can_checkpoint(model):
            return dataclasses.replace(self, checkpointing=True)
        return None


def can_checkpoint(model: torch.nn.Module) -> bool:
    """Whether the model's layers can be computed again in the backward pass."""
    return bool(getattr(model, "supports_gradient_checkpointing", False))


def stand_on(model: torch.nn.Module, rung: Rung) -> None:
    """Let the model compute as the rung says."""
    if rung.checkpointing and can_checkpoint(model) and not model.is_activation_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that there was no memory for a tensor."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError | MemoryError) and errors.is_out_of_memory(error)
