"""What a process trains with: its device, the rows, the model with its optimizer, and the state that it begins or goes
on with. Every process of a run builds the same; under FSDP2 it keeps its part."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

import numpy as np
import torch

from training.core import process
from training.engine import budget, checkpoint, device, generators, loss_scale, memory_cap, optimizer
from training.engine.backends import contract as backends
from training.engine.device import Device
from training.engine.hooks import Hooks
from training.engine.inputs import Inputs, rows_of
from training.engine.ladder import Rung
from training.engine.loop import Loop
from training.engine.parallel import Ranks
from training.engine.state import TrainState
from training.objectives import liger_loss, registry
from training.objectives.contract import Objective
from training.objectives.trainee import Trainee
from training.recipe.model import Recipe


def take_device(recipe: Recipe, ranks: Ranks, estimate_bytes: int | None) -> tuple[Device, int]:
    """Choose the device and cap what is taken of it, before anything is; returns it with the number of threads."""
    process.reset_peak_rss()  # tokenizing, where it came before, is not this run's
    if recipe.memory.expandable_segments:
        device.use_expandable_segments()
    found = device.resolve(recipe.memory.weights)
    threads = device.use_cores(ranks.local_size)
    memory_cap.of_device(recipe.memory.cap, found, estimate_bytes)
    return found, threads


@dataclasses.dataclass(frozen=True)
class Assembly:
    """All that a loop is made of.

    Args:
        validation: objective and the fixed rows that validation is measured on, or None.
    """

    recipe: Recipe
    ranks: Ranks
    trainee: Trainee
    optimizer: torch.optim.Optimizer
    rows: Objective
    validation: tuple[Objective, np.ndarray] | None

    @classmethod
    def of(cls, recipe: Recipe, inputs: Inputs, found: Device, ranks: Ranks) -> Assembly:
        """Build them on a device."""
        rows, validation = rows_of(inputs, "train", recipe), _validation_rows(recipe, inputs)
        place = torch.device("cpu") if ranks.shards else found.torch_device
        build = partial(backends.of(recipe.backend).build, recipe, inputs.tokenizer, place, found.dtype)
        if ranks.shards:
            from training.engine import sharding

            trainee, root = sharding.in_turn(build, ranks, found.torch_device)
            rows = sharding.ShardedRows(rows, root)
            validation = validation and (sharding.ShardedRows(validation[0], root), validation[1])
        else:
            trainee = build()
        if recipe.memory.loss_kernel == "liger":
            liger_loss.put_in(trainee.model)
        memory_cap.of_process(recipe.memory.cap, found)
        return cls(recipe, ranks, trainee, optimizer.build(trainee.model, recipe.optimizer), rows, validation)

    def begin(self) -> tuple[TrainState, dict]:
        """The state of a fresh run, and what its first event says of it."""
        plan, planned_by = budget.first_plan(self.recipe, self.rows.num_rows)
        begun = registry.of(self.recipe.method).begin(self.recipe, self.trainee)
        generators.begin(self.recipe.seeds.train, 0, self.ranks.rank)
        scale = loss_scale.first(self.trainee.model)
        state = TrainState(plan, planned_by, Rung.of(self.recipe), loss_scale=scale)
        return state, {
            "total_steps": plan.total_steps, "rows": self.rows.num_rows, **begun,
            **backends.of(self.recipe.backend).versions(),
        }  # fmt: skip

    def go_on(self, folder: Path) -> TrainState:
        """The state of a checkpoint, all of it loaded."""
        state = checkpoint.load(folder, self.trainee, self.optimizer, self.ranks, self.recipe.seeds.train)
        self.require_same(state)
        return state

    def loop(self, hooks: Hooks) -> Loop:
        """The loop over all of it."""
        parts = self.optimizer, self.rows, self.validation, hooks, self.ranks
        return backends.of(self.recipe.backend).loop(self.recipe, self.trainee, *parts)

    def snapshot(self, state: TrainState) -> checkpoint.Snapshot:
        """What a checkpoint of this moment holds; every process has to take it, the first one's is whole."""
        self.require_same(state)
        return checkpoint.Snapshot.of(self.trainee, self.optimizer, state, self.ranks)

    def require_same(self, state: TrainState) -> None:
        """Raise IntegrityError where the processes' weights have come apart."""
        self.ranks.require_same([p for p in self.trainee.model.parameters() if p.requires_grad], state.step)


def _validation_rows(recipe: Recipe, inputs: Inputs) -> tuple[Objective, np.ndarray] | None:
    """The fixed draw of validation rows; it depends on the evaluation seed alone."""
    if not recipe.evaluate.is_wanted:
        return None
    rows = rows_of(inputs, "validation", recipe)
    count = min(recipe.evaluate.records, rows.num_rows)
    drawn = np.random.default_rng(recipe.seeds.eval).permutation(rows.num_rows)[:count]
    return rows, np.sort(drawn)
