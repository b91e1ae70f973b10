"""The gradient of one window: its micro-batches one after another, begun anew where memory or float16 gave out.

Invariants: the gradient is that of the sum over the window's trained tokens divided by their number, whatever the
micro-batch and however many processes share them; a window that is begun anew draws the same random numbers; nothing of
a failed try is left in a gradient. What is known of a window is known to all processes alike, so they decide alike.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from training.core.errors import RunError
from training.engine import generators, ladder, loss_scale
from training.engine.hooks import Hooks
from training.engine.parallel import Ranks
from training.engine.state import TrainState
from training.objectives import shards
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


@dataclasses.dataclass(frozen=True)
class _Share:
    """What this process's micro-batches gave; `nats` are those of its `parts`, the counts the whole window's."""

    parts: list[np.ndarray]
    nats: list[float]
    num_tokens: int
    num_bytes: int


class Gradients:
    """Fills the parameters' gradients, window by window."""

    def __init__(
        self, recipe: Recipe, model: torch.nn.Module, optimizer: torch.optim.Optimizer, objective: Objective,
        hooks: Hooks, ranks: Ranks,
    ):  # fmt: skip
        self._ranks = ranks
        self._model, self._optimizer, self._objective, self._hooks = model, optimizer, objective, hooks
        self._max_norm = recipe.optimizer.grad_clip or math.inf
        self._device = next(model.parameters()).device
        self._at = np.empty(0, np.int64)

    def of(self, state: TrainState, rows: np.ndarray) -> Sums:
        """Make the gradient of these rows; `state` learns of lower rungs, scales and rows that were left out."""
        while True:
            drawn = generators.states()
            self._at = rows  # until a micro-batch is begun: what is left out is always of this window
            share, why = _tried(self._pass, state, rows)
            if why and self._ranks.shards:
                raise self._out_of_memory(state, why)
            lacking = self._ranks.gathered(why and {"error": why, "rows": self._at.tolist()})
            if not any(lacking):
                sums, why = _tried(self._sums, state, rows, share)
                if why and self._ranks.size > 1:
                    raise self._out_of_memory(state, why)
                if why is None and (sums.is_finite or not loss_scale.lower(state, sums.nats)):
                    return sums
                lacking = [why and {"error": why, "rows": self._at.tolist()}]
            self.forget(drawn)
            if any(lacking):
                rows = self._less(state, rows, [one for one in lacking if one])

    def forget(self, drawn: generators.Tensors) -> None:
        """Undo a try, or a whole window: outside of an `except`, whose traceback would keep its tensors alive."""
        self._optimizer.zero_grad(set_to_none=True)
        generators.restore(drawn)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _out_of_memory(self, state: TrainState, why: str) -> RunError:
        """What is said where memory ran out in the middle of what all processes do together: no rung can be tried."""
        return RunError(
            "out of memory while other processes wait for this one's part",
            where=f"step {state.step}, process {self._ranks.rank}", found=why, expected="a step that fits each device",
            next_command=self._hooks.command("train", "memory.gradient_checkpointing=true"),
        )  # fmt: skip

    def _less(self, state: TrainState, rows: np.ndarray, lacking: list[dict]) -> np.ndarray:
        """Go one rung down the ladder, or leave the rows out that were too much; returns the rows that stay."""
        why = lacking[0]["error"]
        if lower := state.rung.lower(self._model):
            state.rung = lower
            ladder.stand_on(self._model, lower)
            self._hooks.on_event("out_of_memory", state, **dataclasses.asdict(lower), error=why)
            return rows
        too_much = np.concatenate([np.array(one["rows"], np.int64) for one in lacking])
        lines = self._objective.lines(too_much)
        state.skipped_records += len(lines)
        self._hooks.on_event("record_skipped", state, lines=lines, error=why)
        return rows[~np.isin(rows, too_much)]

    def _pass(self, state: TrainState, rows: np.ndarray) -> _Share:
        """Add this process's micro-batches of the window to the gradients."""
        size = state.rung.micro_batch
        every = [rows[start : start + size] for start in range(0, len(rows), size)]
        parts = self._ranks.share(every)
        batches = []
        for self._at in parts:
            batches.append(self._objective.batch(self._at))
        counts = (sum(batch.num_tokens for batch in batches), sum(batch.num_bytes for batch in batches))
        num_tokens, num_bytes = map(int, self._ranks.sums(*counts))
        losses = []
        for self._at, batch in zip(parts, batches, strict=True):
            losses.append(self._backward(batch, state.loss_scale / max(1, num_tokens)))
        for _ in range(self._ranks.num_passes(len(every)) - len(parts)):  # others wait for this process's shards
            self._backward(self._objective.batch(every[0]), 0.0)
        nats = torch.stack(losses).tolist() if losses else []
        return _Share(parts, nats, num_tokens, num_bytes)

    def _sums(self, state: TrainState, rows: np.ndarray, share: _Share) -> Sums:
        """Sum the gradients over all processes and clip; returns what is known of the window."""
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        self._ranks.sum_gradients(parameters)
        norm = self._clip(parameters, state.loss_scale)
        (nats,) = self._ranks.sums(sum(share.nats))
        sick = rows
        if not math.isfinite(nats):
            found = [part for part, one in zip(share.parts, share.nats, strict=True) if not math.isfinite(one)]
            every = self._ranks.gathered(np.concatenate(found).tolist() if found else [])
            sick = np.array([row for one in every for row in one], np.int64)
        return Sums(nats, share.num_tokens, share.num_bytes, norm, sick)

    def _backward(self, batch: Batch, factor: float) -> torch.Tensor:
        """Add a micro-batch's share to the gradients; returns its loss in nats."""
        with self._hooks.phase("forward"):
            nats = self._objective.loss(self._model, batch.to(self._device))
        with self._hooks.phase("backward"):
            (nats * factor).backward()
        return nats.detach()

    def _clip(self, parameters: list[torch.nn.Parameter], scale: float) -> float:
        """Clip the window's gradient, its scale taken off; returns its norm before."""
        if scale != 1:
            torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], 1 / scale)
        return shards.whole(torch.nn.utils.clip_grad_norm_(parameters, self._max_norm)).item()


def _tried(work: Callable[..., Any], *arguments: object) -> tuple[Any, str | None]:
    """What some work gave, or why memory ran out in it: outside of an `except`, whose traceback keeps tensors alive."""
    try:
        return work(*arguments), None
    except Exception as error:
        if not ladder.is_out_of_memory(error):
            raise
        return None, str(error).partition("\n")[0][:200]
