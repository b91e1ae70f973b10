"""Which rows a step trains: windows of an epoch's order, which is a function of (data seed, epoch) alone.

An epoch's last window may be shorter. Inside a window the longest rows come first, so that rows of a like length share
a micro-batch and little is padding; the window's loss is a sum and does not change by that.
"""

import numpy as np

from training.engine.state import TrainState
from training.objectives.contract import Objective
from training.recipe.model import Recipe


def epoch_order(seed: int, epoch: int, num_rows: int) -> np.ndarray:
    """The order of rows in an epoch: a permutation drawn from (seed, epoch)."""
    return np.random.default_rng([seed, epoch]).permutation(num_rows)


def window_rows(recipe: Recipe) -> int:
    """Rows of one full accumulation window."""
    return recipe.data.micro_batch * recipe.batch.accumulate


def longest_rows(objective: Objective, count: int) -> np.ndarray:
    """The rows with the most positions, the longest first."""
    return np.argsort(-objective.lengths, kind="stable")[:count]


class Windows:
    """The windows of a run, one after another; the place in them is the state's."""

    def __init__(self, recipe: Recipe, objective: Objective):
        self._seed, self._size, self._objective = recipe.seeds.data, window_rows(recipe), objective
        self._order: tuple[int, np.ndarray] | None = None

    def next(self, state: TrainState) -> np.ndarray:
        """The rows of the next window; moves the state's cursor, and into the next epoch at an epoch's end."""
        num_rows = self._objective.num_rows
        if self._order is None or self._order[0] != state.epoch:
            self._order = (state.epoch, epoch_order(self._seed, state.epoch, num_rows))
        rows = self._order[1][state.row : state.row + self._size]
        state.row += len(rows)
        if state.row >= num_rows:
            state.epoch, state.row = state.epoch + 1, 0
        return rows[np.argsort(-self._objective.lengths[rows], kind="stable")]
