"""The contract between the loop and an objective, and the figures that a loss is reported in.

Legend: B rows of a batch, T positions of a row. A row is what the loop counts and shuffles; a trained token is a
position with a label. Losses are summed, never averaged, so that any split into micro-batches gives one value.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch

IGNORED_LABEL = -100

Tensors = dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Batch:
    """A batch on the CPU, with what its loss is summed over: trained tokens, and the bytes of text they stand for."""

    tensors: Tensors
    num_tokens: int
    num_bytes: int

    def to(self, device: torch.device) -> Tensors:
        """The tensors on a device."""
        return {name: tensor.to(device) for name, tensor in self.tensors.items()}


class Objective(Protocol):
    """One split of a data set, seen as rows of one method.

    Args:
        lengths: (num_rows,) positions of each row, which decide the memory that it takes.
    """

    num_rows: int
    lengths: np.ndarray

    def batch(self, rows: np.ndarray) -> Batch:
        """Build the batch of these row numbers on the CPU, a pure function of them."""

    def lines(self, rows: np.ndarray) -> list[int]:
        """The records that these rows are made of, by their line in the split's file, from 1, in order."""

    def loss(self, model: torch.nn.Module, tensors: Tensors) -> torch.Tensor:
        """Run the model on a batch's tensors, which lie on its device, and sum the loss in nats over the labels."""


@dataclasses.dataclass(frozen=True)
class Score:
    """A measured loss: sums over a set of rows, and the figures derived from them."""

    nats: float
    num_tokens: int
    num_bytes: int

    @property
    def loss_nats(self) -> float:
        """Nats for each trained token."""
        return self.nats / self.num_tokens

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss_nats, 700.0))

    @property
    def bits_per_byte(self) -> float | None:
        """Bits for each byte of text, which compares across tokenizers; None where the labels are specials alone."""
        return self.nats / math.log(2) / self.num_bytes if self.num_bytes else None

    def text(self) -> str:
        """The figures for people: `6.345 nats  3.021 bits/byte`."""
        bits = self.bits_per_byte
        return f"{self.loss_nats:.4f} nats" + ("" if bits is None else f"  {bits:.4f} bits/byte")

    def to_json(self) -> dict:
        return dataclasses.asdict(self) | {
            "loss_nats": self.loss_nats,
            "perplexity": self.perplexity,
            "bits_per_byte": self.bits_per_byte,
        }


def measure(
    model: torch.nn.Module, objective: Objective, rows: np.ndarray, micro_batch: int,
    on_rows: Callable[[int], None] | None = None,
) -> Score:  # fmt: skip
    """Sum the loss over `rows` without gradients; the value does not depend on `micro_batch`.

    Args:
        on_rows: called after each batch with the number of its rows.
    """
    was_training = model.training
    model.eval()
    nats, num_tokens, num_bytes = 0.0, 0, 0
    device = next(model.parameters()).device
    try:
        with torch.inference_mode():
            for start in range(0, len(rows), micro_batch):
                chosen = rows[start : start + micro_batch]
                batch = objective.batch(chosen)
                nats += objective.loss(model, batch.to(device)).item()
                num_tokens, num_bytes = num_tokens + batch.num_tokens, num_bytes + batch.num_bytes
                if on_rows:
                    on_rows(len(chosen))
    finally:
        model.train(was_training)
    return Score(nats, num_tokens, num_bytes)
