"""How long a run is: the first of steps, epochs and hours, and the learning-rate plan over the steps that will happen.

A limit in steps or epochs is known at once. One in hours becomes a number of steps when the first steps have shown
their speed, and is made again when half of the time or of the steps to go is gone. What was planned is an event and
lies in the checkpoint, so a resume keeps it. Patience ends a run early and changes no plan.
"""

import math
import time

import numpy as np

from training.engine.order import window_rows
from training.engine.schedule import Plan
from training.engine.state import Forecast, TrainState
from training.recipe.model import Recipe
from training.runs.course import UNLIMITED_STEPS

SPEED_STEPS = 10
"""Steps after which the speed is known."""
_FEWEST_SPEED_STEPS, _LATE_SHARE = 2, 0.1
_WORTH_A_PLAN = 0.02
"""Share of the steps to go by which a forecast must differ before the plan is made again."""


def planned_steps(recipe: Recipe, num_rows: int) -> tuple[int, str]:
    """Steps that the recipe's own limits allow, and which limit it is: `steps`, `epochs`, or `hours` for neither."""
    per_epoch = math.ceil(num_rows / window_rows(recipe))
    limits = []
    if recipe.stop.max_steps is not None:
        limits.append((recipe.stop.max_steps, "steps"))
    if recipe.stop.max_epochs is not None:
        limits.append((math.ceil(recipe.stop.max_epochs * per_epoch), "epochs"))
    return min(limits) if limits else (UNLIMITED_STEPS, "hours")


def first_plan(recipe: Recipe, num_rows: int) -> tuple[Plan, str]:
    """The plan before the speed is known, and what limits it."""
    steps, planned_by = planned_steps(recipe, num_rows)
    # Without a limit in steps the warm-up's share is taken of a guess, until the speed is known.
    whole = 100 * SPEED_STEPS if steps == UNLIMITED_STEPS else steps
    return _plan(recipe, steps, recipe.schedule.warmup.steps(whole)), planned_by


def _plan(recipe: Recipe, total_steps: int, warmup_steps: int) -> Plan:
    schedule = recipe.schedule
    return Plan(schedule.kind, recipe.optimizer.lr, warmup_steps, total_steps, schedule.min_lr_ratio)


class Clock:
    """One process's time of a run: what has passed, what steps cost, and what the end will cost.

    A save costs training what it waits for (`save_seconds`), and the end what the disk takes (`write_seconds`).

    Args:
        already_seconds: what earlier processes have trained.
    """

    def __init__(self, recipe: Recipe, already_seconds: float):
        self._recipe, self._began = recipe, time.monotonic() - already_seconds
        self._first: list[float] = []
        self._mark: tuple[float, int] | None = None
        self.validation_seconds = self.save_seconds = self.write_seconds = 0.0

    def passed(self) -> float:
        """Seconds that the run has trained."""
        return time.monotonic() - self._began

    def is_over(self) -> bool:
        """Whether there is no time left but for the last validation and the last save."""
        hours = self._recipe.stop.max_hours
        return hours is not None and self.passed() + self._closing_seconds >= hours * 3600

    def count_step(self, seconds: float) -> None:
        """Take the time of a step in; validations and saves are not part of it."""
        if len(self._first) < SPEED_STEPS:
            self._first.append(seconds)
            self._mark = (time.monotonic(), 0)
        else:
            self._mark = (self._mark[0], self._mark[1] + 1)

    @property
    def _closing_seconds(self) -> float:
        return self.validation_seconds + max(self.save_seconds, self.write_seconds)

    def seconds_per_step(self) -> float | None:
        """What a step costs with its share of validations and saves; None before the speed is known."""
        if not self._knows_the_speed():
            return None
        since, num_steps = self._mark
        if num_steps >= SPEED_STEPS:
            return (time.monotonic() - since) / num_steps
        evaluate, checkpoint = self._recipe.evaluate.every_steps, self._recipe.checkpoint.every_steps
        costs = ((self.validation_seconds + self.save_seconds, evaluate), (self.save_seconds, checkpoint))
        return float(np.median(self._first)) + sum(cost / every for cost, every in costs if every)

    def _knows_the_speed(self) -> bool:
        """After the first steps; sooner where they are so long that they take a good part of the hours."""
        hours, num_steps = self._recipe.stop.max_hours, len(self._first)
        is_late = hours is not None and self.passed() >= _LATE_SHARE * hours * 3600
        return num_steps >= SPEED_STEPS or (num_steps >= _FEWEST_SPEED_STEPS and is_late)

    def forecast(self, state: TrainState, num_rows: int) -> float | None:
        """Plan by the clock where that is due; returns what a step costs where the plan has changed."""
        hours, each, due = self._recipe.stop.max_hours, self.seconds_per_step(), state.forecast
        if hours is None or each is None or (due and self.passed() < due.seconds and state.step < due.step):
            return None
        left = hours * 3600 - self.passed() - self._closing_seconds
        if due and left < SPEED_STEPS * each:
            return None  # too late to matter
        self._mark = (time.monotonic(), 0)
        limit, limited_by = planned_steps(self._recipe, num_rows)
        reachable = state.step + max(1, int(left / each + 1e-6))
        total, by = (reachable, "hours") if reachable < limit else (limit, limited_by)
        state.forecast = Forecast(self.passed() + left / 2, state.step + (total - state.step + 1) // 2)
        if abs(total - state.plan.total_steps) <= _WORTH_A_PLAN * (total - state.step):
            return None
        # a warm-up that is over stays as long as it was: the rate does not go up again
        is_warm = state.step >= state.plan.warmup_steps
        warmup = state.plan.warmup_steps if is_warm else self._recipe.schedule.warmup.steps(total)
        state.plan, state.planned_by = _plan(self._recipe, total, warmup), by
        return each
