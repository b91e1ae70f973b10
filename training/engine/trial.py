"""A trial of the longest rows before the first step, so that trouble with memory shows in the first minute.

Invariant: weights, moments, generators and counters are bit for bit what they were; only the rung may be a lower one.
The moments are there before it, as they are from the second step on, so that its peak is that of the run.
"""

import copy

import numpy as np

from training.engine import generators
from training.engine.order import longest_rows
from training.engine.state import TrainState
from training.engine.window import Gradients
from training.objectives.contract import Objective
from training.recipe.model import Recipe


def rows_of(recipe: Recipe, objective: Objective, num_processes: int = 1) -> np.ndarray:
    """A window of the longest rows, for each process one micro-batch, and again where the next one meets the gradients
    of the last."""
    longest = longest_rows(objective, recipe.data.micro_batch)
    return np.tile(longest, num_processes * min(2, -(-recipe.batch.accumulate // num_processes)))


def run(gradients: Gradients, state: TrainState, rows: np.ndarray) -> None:
    """Make the gradient of these rows and forget it."""
    drawn, trial = generators.states(), copy.copy(state)
    gradients.of(trial, rows)
    gradients.forget(drawn)
    state.rung = trial.rung
