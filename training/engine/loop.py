"""The loop: windows of rows, one optimizer step each, with validation, checkpoints and stop rules between steps.

Invariants: a window's gradient does not depend on how it is cut (`window`); the order of rows is a function of the data
seed and the epoch (`order`); the learning rate is a function of the step and the recorded plan (`budget`, `schedule`).
So a resume goes on bit for bit on a CPU. Of several processes the first one's clock and requests count (`parallel`).
"""

import math
import time

import numpy as np
import torch

from training.core.errors import RunError
from training.engine import compiling, ladder, loss_scale, stop, trial
from training.engine.budget import Clock
from training.engine.hooks import Hooks, StepResult
from training.engine.optimizer import allocate, set_rate
from training.engine.order import Windows
from training.engine.parallel import Ranks
from training.engine.state import TrainState
from training.engine.window import Gradients, Sums
from training.objectives.contract import Objective, Score, measure
from training.recipe.model import Recipe

MAX_SKIPPED_IN_A_ROW = 5
_MAX_SKIPPED_SHARE = 0.1
_MOST_LINES_TOLD = 8


class Loop:
    """One run's training from its state on.

    Args:
        validation: objective and the fixed rows that validation is measured on, or None.
        ranks: the processes that train together; this one alone by default.
    """

    def __init__(
        self, recipe: Recipe, model: torch.nn.Module, optimizer: torch.optim.Optimizer, objective: Objective,
        validation: tuple[Objective, np.ndarray] | None, hooks: Hooks, ranks: Ranks | None = None,
    ):  # fmt: skip
        self._ranks = ranks or Ranks()
        self.recipe, self.model, self.optimizer, self.objective = recipe, model, optimizer, objective
        self.validation, self.hooks = validation, hooks
        self._windows = Windows(recipe, objective)
        self._gradients = Gradients(recipe, model, optimizer, objective, hooks, self._ranks)
        self._since_save = self._since_validation = time.monotonic()

    # ---- one step

    def step(self, state: TrainState) -> StepResult | None:
        """Train on the next window; None where its loss or gradient was not finite and the step was skipped."""
        started = time.monotonic()
        rows = self._windows.next(state)
        state.step += 1
        sums = self._gradients.of(state, rows)
        if not (sums.num_tokens and sums.is_finite):
            self.optimizer.zero_grad(set_to_none=True)
            self._skip(state, sums)
            return None
        rate = state.plan.rate(state.step)
        set_rate(self.optimizer, rate)
        with self.hooks.phase("optimizer_step"):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        loss_scale.count_step(state)
        state.skipped_in_a_row = 0
        state.trained_tokens += sums.num_tokens
        score = Score(sums.nats, sums.num_tokens, sums.num_bytes)
        return StepResult(score, rate, sums.grad_norm, time.monotonic() - started)

    def _skip(self, state: TrainState, sums: Sums) -> None:
        """Count a step that was not made; too many end the run."""
        if sums.is_finite and len(sums.sick_rows):  # rows of one position can hold a document's first token alone
            return
        lines = self.objective.lines(sums.sick_rows)
        state.skipped_steps += 1
        state.skipped_in_a_row += 1
        self.hooks.on_event("skipped", state, lines=lines, loss=repr(sums.nats), grad_norm=repr(sums.grad_norm))
        in_a_row = state.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW
        if in_a_row or state.skipped_steps > MAX_SKIPPED_IN_A_ROW + _MAX_SKIPPED_SHARE * state.step:
            raise self._too_many(state, sums, lines)

    def _too_many(self, state: TrainState, sums: Sums, lines: list[int]) -> RunError:
        """What is said where a run ends since steps could not be made, by what was wrong with the last of them."""
        in_all = f"{state.skipped_in_a_row} steps in a row, {state.skipped_steps} in all, could not be made"
        if not sums.num_tokens:
            return RunError(
                f"{in_all}: no row fitted the memory", where=f"step {state.step}",
                found=f"{state.skipped_records} records left out on the lowest rung",
                expected="rows that fit, one at a time, with gradient checkpointing",
                next_command=self.hooks.command("memfit"),
            )  # fmt: skip
        shown = ", ".join(str(line) for line in lines[:_MOST_LINES_TOLD])
        more = f" and {len(lines) - _MOST_LINES_TOLD} more" if len(lines) > _MOST_LINES_TOLD else ""
        return RunError(
            f"{in_all}: their loss or gradient was not finite",
            where=f"step {state.step}, lines {shown or 'none'}{more} of the train split",
            found=f"loss {sums.nats}, gradient norm {sums.grad_norm}", expected="finite numbers",
            next_command=self.at_half_the_rate(),
        )  # fmt: skip

    def at_half_the_rate(self) -> str | None:
        """The command that tries the recipe with smaller steps, where numbers were not finite."""
        return self.hooks.command("train", f"optimizer.lr={self.recipe.optimizer.lr / 2:g}")

    # ---- between steps

    def validate(self, state: TrainState) -> None:
        """Measure the fixed validation rows and keep the best, where the recipe validates anything."""
        if self.validation is None:
            return
        started = time.monotonic()
        objective, rows = self.validation
        with self.hooks.phase("validation"):
            score = self._measured(objective, rows, state)
        if not math.isfinite(score.nats):
            raise RunError(
                "the validation loss is not finite", where=f"step {state.step}", found=score.nats,
                expected="a finite number", next_command=self.at_half_the_rate(),
            )  # fmt: skip
        is_best = state.best.observe(score.loss_nats, state.step)
        self.hooks.on_validation(state, score, is_best)
        self._since_validation = time.monotonic()
        self._clock.validation_seconds = self._since_validation - started

    def _measured(self, objective: Objective, rows: np.ndarray, state: TrainState) -> Score:
        """The score, each process measuring its share."""
        size = state.rung.micro_batch
        own_rows = rows[self._ranks.rank :: self._ranks.size]
        own = self._own_score(objective, own_rows, size)
        others = -(-len(rows) // self._ranks.size)
        if self._ranks.shards and -(-len(own_rows) // size) < -(-others // size):
            measure(self.model, objective, rows[:1], size)  # the others wait for this process's shards
        nats, num_tokens, num_bytes = self._ranks.sums(own.nats, own.num_tokens, own.num_bytes)
        return Score(nats, int(num_tokens), int(num_bytes))

    def _own_score(self, objective: Objective, rows: np.ndarray, size: int) -> Score:
        """In smaller batches where memory runs out: the value does not depend on them."""
        while True:
            try:
                return measure(self.model, objective, rows, size, on_rows=lambda _: self.hooks.beat("validation"))
            except RuntimeError as error:
                if size == 1 or self._ranks.shards or not ladder.is_out_of_memory(error):
                    raise
            size //= 2

    def _due(self, step: int, every_steps: int | None, every_minutes: float | None, since: float) -> bool:
        if every_steps is not None and step % every_steps == 0:
            return True
        return every_minutes is not None and self._ranks.told(time.monotonic() - since >= every_minutes * 60)

    def _save(self, state: TrainState) -> None:
        started = time.monotonic()
        with self.hooks.phase("saving"):
            self.hooks.save(state)
        self._since_save = time.monotonic()
        self._clock.save_seconds, self._clock.write_seconds = self._since_save - started, self.hooks.write_seconds()

    def _prepare(self, state: TrainState) -> None:
        """Stand where the state stands, try the longest rows, and measure and keep the untrained model."""
        ladder.stand_on(self.model, state.rung)
        if state.stop_reason is None:
            self._try(state)
        if state.step == 0:
            self.validate(state)
            if self.recipe.checkpoint.initial or state.best.step is not None:
                self._save(state)

    def _try(self, state: TrainState) -> None:
        """Try the longest rows, compiled where that was decided."""
        allocate(self.optimizer)
        rows = trial.rows_of(self.recipe, self.objective, self._ranks.size)

        def attempt() -> None:
            self._attempt(state, rows)

        compiling.settle(self.recipe, self.model, state, attempt, self.hooks)
        attempt()
        self.hooks.on_event("trial", state, lengths=self.objective.lengths[rows].tolist())

    def _attempt(self, state: TrainState, rows: np.ndarray) -> None:
        """Make the gradient of these rows and leave no trace of it, but perhaps a lower rung."""
        trial.run(self._gradients, state, rows)

    def run(self, state: TrainState) -> str:
        """Train until a stop rule or a request ends it; returns the reason, or `paused` or `cancelled`.

        The state is saved when it returns, unless it was cancelled.
        """
        self.model.train()
        self._clock = Clock(self.recipe, state.trained_seconds)
        self._prepare(state)
        return self._steps(state) or state.stop_reason

    def _steps(self, state: TrainState) -> str | None:
        """Make steps until a rule or a request ends the run; returns `paused` or `cancelled` where somebody asked."""
        while state.stop_reason is None:
            if asked := self._after(state, self.step(state)):
                return asked
        return None

    def _after(self, state: TrainState, result: StepResult | None) -> str | None:
        """Count a step, and do what is due after it; returns `paused` or `cancelled` where somebody asked."""
        state.trained_seconds = self._clock.passed()
        if result is not None:
            self._clock.count_step(result.seconds)
            self.hooks.on_step(state, result)
        if each := self._forecast(state):
            self.hooks.on_event(
                "plan", state, total_steps=state.plan.total_steps, planned_by=state.planned_by,
                seconds_per_step=round(each, 4),
            )  # fmt: skip
        if (asked := self._ranks.told(self.hooks.stop_requested())) == "cancel":
            return "cancelled"
        self._between_steps(state)
        if asked and state.stop_reason is None:
            self._save(state)
            return "paused"
        return None

    def _forecast(self, state: TrainState) -> float | None:
        """Plan by the clock where that is due; returns what a step costs where the plan has changed."""
        if self.recipe.stop.max_hours is None:
            return None
        each = self._clock.forecast(state, self.objective.num_rows)
        state.take_plan(self._ranks.told(state.plan_to_json()))
        return each

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
        time_is_over = self.recipe.stop.max_hours is not None and self._ranks.told(self._clock.is_over())
        return stop.reason(
            step=state.step, planned_steps=state.plan.total_steps, planned_by=state.planned_by, best=state.best,
            time_is_over=time_is_over, patience=self.recipe.stop.patience,
        )  # fmt: skip
