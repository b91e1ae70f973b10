"""The gradient of one window: its micro-batches one after another, begun anew where memory or float16 gave out.

Invariants: the gradient is that of the sum over the window's trained tokens divided by their number, whatever the
micro-batch; a window that is begun anew draws the same random numbers; nothing of a failed try is left in a gradient.
"""

import dataclasses
import math

import numpy as np
import torch

from training.engine import generators, ladder, loss_scale
from training.engine.hooks import Hooks
from training.engine.state import TrainState
from training.objectives.contract import Batch, Objective
from training.recipe.model import Recipe


@dataclasses.dataclass(frozen=True)
class Sums:
    """What a window's gradient was made of; `sick_rows` are those of micro-batches whose loss is not finite."""

    nats: float
    num_tokens: int
    num_bytes: int
    grad_norm: float
    sick_rows: np.ndarray

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.nats) and math.isfinite(self.grad_norm)


class Gradients:
    """Fills the parameters' gradients, window by window."""

    def __init__(
        self, recipe: Recipe, model: torch.nn.Module, optimizer: torch.optim.Optimizer, objective: Objective,
        hooks: Hooks,
    ):  # fmt: skip
        self._model, self._optimizer, self._objective, self._hooks = model, optimizer, objective, hooks
        self._max_norm = recipe.optimizer.grad_clip or math.inf
        self._device = next(model.parameters()).device
        self._at = np.empty(0, np.int64)

    def of(self, state: TrainState, rows: np.ndarray) -> Sums:
        """Make the gradient of these rows; `state` learns of lower rungs, scales and rows that were left out."""
        while True:
            drawn = generators.states()
            try:
                sums = self._pass(state, rows)
            except Exception as error:
                if not ladder.is_out_of_memory(error):
                    raise
                why = str(error).partition("\n")[0][:200]
            else:
                if sums.is_finite or not loss_scale.lower(state, sums.nats):
                    return sums
                why = None
            self.forget(drawn)
            if why is not None:
                rows = self._less(state, rows, why)

    def forget(self, drawn: generators.Tensors) -> None:
        """Undo a try, or a whole window: outside of an `except`, whose traceback would keep its tensors alive."""
        self._optimizer.zero_grad(set_to_none=True)
        generators.restore(drawn)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _less(self, state: TrainState, rows: np.ndarray, why: str) -> np.ndarray:
        """Go one rung down the ladder, or leave the row out that was too much; returns the rows that stay."""
        if lower := state.rung.lower(self._model):
            state.rung = lower
            ladder.stand_on(self._model, lower)
            self._hooks.on_event("out_of_memory", state, **dataclasses.asdict(lower), error=why)
            return rows
        lines = self._objective.lines(self._at)
        state.skipped_records += len(lines)
        self._hooks.on_event("record_skipped", state, lines=lines, error=why)
        return rows[~np.isin(rows, self._at)]

    def _pass(self, state: TrainState, rows: np.ndarray) -> Sums:
        size = state.rung.micro_batch
        parts = [rows[start : start + size] for start in range(0, len(rows), size)]
        batches = [self._objective.batch(part) for part in parts]
        num_tokens = sum(batch.num_tokens for batch in batches)
        losses = []
        for self._at, batch in zip(parts, batches, strict=True):
            losses.append(self._backward(batch, state.loss_scale / max(1, num_tokens)))
        nats = torch.stack(losses).tolist() if losses else []
        norm = self._clip(state.loss_scale)
        sick = [part for part, one in zip(parts, nats, strict=True) if not math.isfinite(one)]
        num_bytes = sum(batch.num_bytes for batch in batches)
        return Sums(sum(nats), num_tokens, num_bytes, norm, np.concatenate(sick) if sick else rows)

    def _backward(self, batch: Batch, factor: float) -> torch.Tensor:
        """Add a micro-batch's share to the gradients; returns its loss in nats."""
        with self._hooks.phase("forward"):
            nats = self._objective.loss(self._model, batch.to(self._device))
        with self._hooks.phase("backward"):
            (nats * factor).backward()
        return nats.detach()

    def _clip(self, scale: float) -> float:
        """Clip the window's gradient, its scale taken off; returns its norm before."""
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        if scale != 1:
            torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], 1 / scale)
        return torch.nn.utils.clip_grad_norm_(parameters, self._max_norm).item()
