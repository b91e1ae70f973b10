"""A run's part of every process but the first: it trains its share and records nothing.

The first process (`trainer`) says where to go on from and when to stop, and writes what all have made.
"""

from training.engine.assembly import Assembly, take_device
from training.engine.hooks import Hooks
from training.engine.inputs import Inputs
from training.engine.parallel import Ranks
from training.engine.state import TrainState
from training.recipe.model import Recipe
from training.runs.folder import RunFolder


class Follower(Hooks):
    """One process that follows the first."""

    def __init__(self, run: RunFolder, recipe: Recipe, inputs: Inputs, ranks: Ranks):
        self.folder, self.recipe, self.inputs, self.ranks = run, recipe, inputs, ranks

    def run(self) -> dict:
        """Train to the end that the first process decides on."""
        device, _ = take_device(self.recipe, self.ranks, self.folder.record().get("estimate_bytes"))
        self.assembly = Assembly.of(self.recipe, self.inputs, device, self.ranks)
        newest = self.ranks.told(None)
        state = self.assembly.go_on(self.folder.checkpoints / newest) if newest else self.assembly.begin()[0]
        self.assembly.loop(self).run(state)
        return {}

    def save(self, state: TrainState) -> None:
        if not self.ranks.told(None):
            self.assembly.snapshot(state)
