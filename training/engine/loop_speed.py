"""What a step costs beside the model's own work: the batch that is loaded, and a checkpoint written meanwhile.

The model is that of the demo, over made-up tokens; both figures are ratios of times of one run. What a checkpoint adds
is taken over a few steps, in which it is written to its end, and told over as many as the demo's recipe makes
between two.
"""

import contextlib
import tempfile
from pathlib import Path

import numpy as np

from training.core import paths
from training.core.timing import Ratio, best, best_of_both, seconds
from training.engine import checkpoint, device
from training.engine.parallel import Ranks
from training.engine.probe import TrainerProbe
from training.engine.saver import Saver
from training.recipe.load import load
from training.runs.folder import RunFolder

_RECIPE = paths.REPOSITORY / "recipes" / "demo" / "pretrain-stdlib.yaml"
_STEPS = 10
_TURNS = 3


def run() -> tuple[Ratio, ...]:
    """Time batches and saves beside steps; on a GPU where there is one."""
    device.use_cores()
    where = device.resolve("fp32")
    probe = TrainerProbe(load(_RECIPE).recipe, where.torch_device, where.dtype)

    def step() -> None:
        probe.step(contextlib.nullcontext)

    step()
    batches = best(lambda: [probe.rows.batch(rows) for rows in _parts(probe)])
    with tempfile.TemporaryDirectory(prefix="trainyard-") as folder:
        saving = _Saving(probe, Path(folder))
        saved, plain = best_of_both(
            lambda: (saving.save(), [step() for _ in range(_STEPS)], saving.wait()),
            lambda: [step() for _ in range(_STEPS)],
            _TURNS,
        )
    apart = probe.recipe.checkpoint.every_steps * plain / _STEPS  # between two checkpoints
    return (
        Ratio("a window's batches over its step", batches, min(plain / _STEPS, seconds(step))),
        Ratio("the demo's steps with checkpoints over those without", apart + saved - plain, apart),
    )


def _parts(probe: TrainerProbe) -> list[np.ndarray]:
    """The micro-batches of a window."""
    size = probe.recipe.data.micro_batch
    return np.array_split(np.arange(probe.rows.num_rows), range(size, probe.rows.num_rows, size))


class _Saving:
    """Saves a probe's model, again and again at the same step, as a run does."""

    def __init__(self, probe: TrainerProbe, folder: Path):
        self._probe, self._run = probe, RunFolder(folder)
        self._saver = Saver(self._write, in_background=True)

    def save(self) -> None:
        """Save it as it stands; the save before is done."""
        snapshot = checkpoint.Snapshot.of(self._probe.trainee, self._probe.optimizer, self._probe.state, Ranks())
        self._saver.save(snapshot)

    def wait(self) -> None:
        """Wait for the disk."""
        self._saver.wait()

    def _write(self, snapshot: checkpoint.Snapshot) -> None:
        trainee = self._probe.trainee
        names = trainee.weights_file, trainee.settings_file
        checkpoint.remove(checkpoint.write(self._run, snapshot, *names, {}, _NoTokenizer(), {}))


class _NoTokenizer:
    def copy_to(self, folder: Path) -> None:
        """Copy nothing: the weights are what takes time."""
