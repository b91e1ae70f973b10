"""The loop: windows of rows, one optimizer step each, with validation, checkpoints and stop rules between steps.

Invariants: the order of rows is a function of (data seed, epoch) alone; a window's loss is the sum over its trained
tokens divided by their number, whatever the micro-batch; an epoch's last window may be shorter and is stepped too; the
learning rate is a function of the step and the recorded plan. So a resume goes on bit for bit on a CPU.
"""

import contextlib
import dataclasses
import logging
import math
import time

import numpy as np
import torch

from training.core.errors import RunError
from training.engine import stop
from training.engine.checkpoint import TrainState
from training.engine.optimizer import set_rate
from training.engine.schedule import Plan
from training.objectives.contract import Batch, Objective, Score, measure
from training.recipe.model import Recipe

_logger = logging.getLogger(__name__)
SPEED_STEPS = 10
"""Steps after which the speed is known and a budget in hours becomes a number of steps."""
MAX_SKIPPED_IN_A_ROW = 5
UNLIMITED_STEPS = 10**9


@dataclasses.dataclass(frozen=True)
class StepResult:
    """What one optimizer step reports."""

    score: Score
    rate: float
    grad_norm: float
    seconds: float


class Hooks:
    """What the loop calls out to; `training.engine.trainer` implements it, tests may."""

    def on_step(self, state: TrainState, result: StepResult) -> None: ...
    def on_validation(self, state: TrainState, score: Score, is_best: bool) -> None: ...
    def on_event(self, event: str, state: TrainState, **values: object) -> None: ...
    def save(self, state: TrainState) -> None: ...
    def stop_requested(self) -> bool:
        return False

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Surround a part of the work: `forward` and `backward` of each micro-batch, `optimizer_step`, `validation`
        and `saving`."""
        return contextlib.nullcontext()


def epoch_order(seed: int, epoch: int, num_rows: int) -> np.ndarray:
    """The order of rows in an epoch: a permutation drawn from (seed, epoch)."""
    return np.random.default_rng([seed, epoch]).permutation(num_rows)


def window_rows(recipe: Recipe) -> int:
    """Rows of one full accumulation window."""
    return recipe.data.micro_batch * recipe.batch.accumulate


def planned_steps(recipe: Recipe, num_rows: int) -> tuple[int, str]:
    """Steps that the recipe's own limits allow, and which limit it is: `steps` or `epochs`."""
    per_epoch = math.ceil(num_rows / window_rows(recipe))
    limits = []
    if recipe.stop.max_steps is not None:
        limits.append((recipe.stop.max_steps, "steps"))
    if recipe.stop.max_epochs is not None:
        limits.append((math.ceil(recipe.stop.max_epochs * per_epoch), "epochs"))
    return min(limits) if limits else (UNLIMITED_STEPS, "hours")


def first_plan(recipe: Recipe, num_rows: int) -> tuple[Plan, str]:
    """The learning-rate plan before the speed is known, and what limits it: `steps`, `epochs` or `hours`."""
    steps, planned_by = planned_steps(recipe, num_rows)
    # Without a limit in steps the warm-up's share is taken of a guess, until the speed is known.
    whole = 100 * SPEED_STEPS if steps == UNLIMITED_STEPS else steps
    return plan(recipe, steps, recipe.schedule.warmup.steps(whole)), planned_by


def plan(recipe: Recipe, total_steps: int, warmup_steps: int) -> Plan:
    """A plan of the recipe's schedule over this many steps."""
    schedule = recipe.schedule
    return Plan(schedule.kind, recipe.optimizer.lr, warmup_steps, total_steps, schedule.min_lr_ratio)


class Loop:
    """One run's training from its state on.

    Args:
        validation: objective and the fixed rows that validation is measured on, or None.
    """

    def __init__(
        self, recipe: Recipe, model: torch.nn.Module, optimizer: torch.optim.Optimizer, objective: Objective,
        validation: tuple[Objective, np.ndarray] | None, hooks: Hooks,
    ):  # fmt: skip
        self.recipe, self.model, self.optimizer, self.objective = recipe, model, optimizer, objective
        self.validation, self.hooks = validation, hooks
        self.device = next(model.parameters()).device
        self._order: tuple[int, np.ndarray] | None = None
        self._skipped_in_a_row = 0
        self._since_save = self._since_validation = time.monotonic()
        self._overhead_seconds = 0.0

    # ---- one step

    def _next_rows(self, state: TrainState) -> np.ndarray:
        """The rows of the next window; moves the cursor, and into the next epoch at an epoch's end."""
        if self._order is None or self._order[0] != state.epoch:
            self._order = (state.epoch, epoch_order(self.recipe.seeds.data, state.epoch, self.objective.num_rows))
        rows = self._order[1][state.row : state.row + window_rows(self.recipe)]
        state.row += len(rows)
        if state.row >= self.objective.num_rows:
            state.epoch, state.row = state.epoch + 1, 0
        return rows

    def _micro_batches(self, rows: np.ndarray) -> list[Batch]:
        size = self.recipe.data.micro_batch
        return [self.objective.batch(rows[start : start + size]) for start in range(0, len(rows), size)]

    def step(self, state: TrainState) -> StepResult | None:
        """Train on the next window; None where its loss or gradient was not finite and the step was skipped."""
        started = time.monotonic()
        rows = self._next_rows(state)
        batches = self._micro_batches(rows)
        window_tokens = sum(batch.num_tokens for batch in batches)
        state.step += 1
        rate = state.plan.rate(state.step)
        nats = sum(self._backward(batch, window_tokens) for batch in batches)
        grad_norm = self._clip()
        if window_tokens == 0:  # rows of one position can hold the first token of a document alone
            self.optimizer.zero_grad(set_to_none=True)
            return None
        if not (math.isfinite(nats) and math.isfinite(grad_norm)):
            self._skip(state, rows, nats)
            return None
        set_rate(self.optimizer, rate)
        with self.hooks.phase("optimizer_step"):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._skipped_in_a_row = 0
        seconds = time.monotonic() - started
        state.trained_tokens += window_tokens
        num_bytes = sum(batch.num_bytes for batch in batches)
        return StepResult(Score(nats, window_tokens, num_bytes), rate, grad_norm, seconds)

    def _backward(self, batch: Batch, window_tokens: int) -> float:
        """Add a micro-batch's share to the gradients of the window; returns its loss in nats."""
        with self.hooks.phase("forward"):
            nats = self.objective.loss(self.model, batch.to(self.device))
        with self.hooks.phase("backward"):
            (nats / max(1, window_tokens)).backward()
        return nats.item()

    def _clip(self) -> float:
        """Clip the window's gradient; returns its norm before."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        return torch.nn.utils.clip_grad_norm_(parameters, self.recipe.optimizer.grad_clip or math.inf).item()

    def _skip(self, state: TrainState, rows: np.ndarray, nats: float) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        state.skipped_steps += 1
        self._skipped_in_a_row += 1
        self.hooks.on_event("skipped", state, rows=[int(row) for row in rows], loss=repr(nats))
        if self._skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise RunError(
                f"{MAX_SKIPPED_IN_A_ROW} steps in a row had a loss or gradient that is not finite",
                where=f"step {state.step}, rows {', '.join(str(row) for row in rows[:8])}",
                found=nats,
                expected="finite numbers",
                next_command="lower optimizer.lr, then train again",
            )

    # ---- between steps

    def validate(self, state: TrainState) -> Score | None:
        """Measure the fixed validation rows and keep the best; None where the recipe validates nothing."""
        if self.validation is None:
            return None
        objective, rows = self.validation
        with self.hooks.phase("validation"):
            score = measure(self.model, objective, rows, self.recipe.data.micro_batch)
        if not math.isfinite(score.nats):
            raise RunError(
                "the validation loss is not finite", where=f"step {state.step}", found=score.nats,
                expected="a finite number", next_command="lower optimizer.lr, and look at the recipe's architecture",
            )  # fmt: skip
        is_best = state.best.observe(score.loss_nats, state.step)
        self.hooks.on_validation(state, score, is_best)
        self._since_validation = time.monotonic()
        return score

    def _due(self, step: int, every_steps: int | None, every_minutes: float | None, since: float) -> bool:
        by_step = every_steps is not None and step % every_steps == 0
        return by_step or (every_minutes is not None and time.monotonic() - since >= every_minutes * 60)

    def _save(self, state: TrainState) -> None:
        with self.hooks.phase("saving"):
            self.hooks.save(state)
        self._since_save = time.monotonic()

    def _replan(self, state: TrainState, seconds_per_step: float) -> None:
        """Turn the budget in hours into steps, once, when the speed is known; the plan only ever gets shorter."""
        state.replanned = True
        if self.recipe.stop.max_hours is None:
            return
        left = self.recipe.stop.max_hours * 3600 - state.trained_seconds
        reachable = state.step + max(1, int(left / (seconds_per_step + self._overhead_seconds)))
        if reachable < state.plan.total_steps:
            state.plan = plan(self.recipe, reachable, self.recipe.schedule.warmup.steps(reachable))
            state.planned_by = "hours"
            self.hooks.on_event("plan", state, total_steps=reachable, seconds_per_step=round(seconds_per_step, 4))

    def _first_time(self, state: TrainState) -> None:
        """Measure the untrained model, and learn what a validation and a save cost."""
        started = time.monotonic()
        self.validate(state)
        validation_seconds = time.monotonic() - started
        if self.recipe.checkpoint.initial or state.best.step is not None:
            self._save(state)
        save_seconds = time.monotonic() - started - validation_seconds
        every = (self.recipe.evaluate.every_steps, self.recipe.checkpoint.every_steps)
        costs = (validation_seconds + save_seconds, save_seconds)
        self._overhead_seconds = sum(cost / steps for cost, steps in zip(costs, every, strict=True) if steps)

    def run(self, state: TrainState) -> str:
        """Train until a stop rule or a request ends it; returns the reason. The state is saved when it returns."""
        self.model.train()
        clock, already = time.monotonic(), state.trained_seconds
        if state.step == 0:
            self._first_time(state)
        step_seconds: list[float] = []
        while state.stop_reason is None:
            result = self.step(state)
            state.trained_seconds = already + time.monotonic() - clock
            if result is not None:
                step_seconds.append(result.seconds)
                self.hooks.on_step(state, result)
            if not state.replanned and len(step_seconds) >= SPEED_STEPS:
                self._replan(state, float(np.median(step_seconds)))
            self._between_steps(state)
            if self.hooks.stop_requested():
                self._save(state)
                return "interrupted"
        return state.stop_reason

    def _between_steps(self, state: TrainState) -> None:
        """Validate and save what is due; the last step of a run is always validated and saved."""
        evaluate, checkpoint = self.recipe.evaluate, self.recipe.checkpoint
        ends = self._end(state)
        improved = False
        if ends or self._due(state.step, evaluate.every_steps, evaluate.every_minutes, self._since_validation):
            self.validate(state)
            improved = state.best.step == state.step
            ends = ends or self._end(state)
        state.stop_reason = ends
        if (
            ends
            or improved
            or self._due(state.step, checkpoint.every_steps, checkpoint.every_minutes, self._since_save)
        ):
            self._save(state)

    def _end(self, state: TrainState) -> str | None:
        return stop.reason(
            step=state.step, planned_steps=state.plan.total_steps, planned_by=state.planned_by, best=state.best,
            trained_seconds=state.trained_seconds, max_hours=self.recipe.stop.max_hours,
            patience=self.recipe.stop.patience,
        )  # fmt: skip
