"""A checkpoint: weights that anyone can read, and beside them the state that only a resume needs.

`step_000200/` holds the weights and their settings (`model.safetensors` with `config.json`, or those of an adapter),
the tokenizer's files, `recipe.json` and `manifest.json`; `state/` holds `optimizer.safetensors`,
`generators.safetensors`, `state.json` and a manifest of its own. The folder is written beside its place and renamed
once. Nothing is pickled. What is written is a snapshot, so that training may go on meanwhile (`saver`). How many
processes have trained shows in `generators.safetensors` alone, which holds those of each.
"""

import copy
import dataclasses
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from training.core import files, version
from training.engine import generators
from training.engine.optimizer import load_state_tensors, state_tensors
from training.engine.parallel import Ranks
from training.engine.state import TrainState
from training.objectives import shards
from training.objectives.trainee import Trainee
from training.runs.folder import STATE_KIND, RunFolder
from training.tokenizer.artifact import Tokenizer

Tensors = dict[str, torch.Tensor]
_OTHER_FILES_BYTES = 1 << 20
_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """Everything that a checkpoint holds of a moment.

    Args:
        is_copy: whether its tensors are its own already.
    """

    state: TrainState
    weights: Tensors
    optimizer: Tensors
    generators: Tensors
    settings: dict
    is_copy: bool = False

    @classmethod
    def of(
        cls, trainee: Trainee, optimizer: torch.optim.Optimizer, state: TrainState, ranks: Ranks
    ) -> "Snapshot":  # fmt: skip
        """The moment itself: its tensors are those that are being trained; of shards, the whole ones that the first
        process puts together."""
        weights, states = trainee.weights(), state_tensors(trainee.model, optimizer)
        if ranks.shards:
            weights, states = (shards.gathered(one, keeps=ranks.is_first) for one in (weights, states))
        drawn = generators.of_all(ranks.gathered_bytes(generators.states()))
        return cls(state, weights, states, drawn, trainee.settings(), is_copy=ranks.shards)

    @property
    def num_bytes(self) -> int:
        """Bytes of its tensors."""
        return sum(tensor.nbytes for part in (self.weights, self.optimizer) for tensor in part.values())

    def copied(self) -> "Snapshot":
        """A copy in host memory, which training does not change any more."""
        parts = {} if self.is_copy else {"weights": self.weights, "optimizer": self.optimizer}
        copies = {name: {key: _copy(one) for key, one in part.items()} for name, part in parts.items()}
        return dataclasses.replace(self, state=copy.deepcopy(self.state), **copies)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone() if tensor.device.type == "cpu" else tensor.to("cpu")


def require_space(run: RunFolder, snapshot: Snapshot, tokenizer: Tokenizer) -> None:
    """Raise MachineError where the disk has no room for this checkpoint beside those that are there."""
    others = sum(path.stat().st_size for path in tokenizer.folder.iterdir() if path.is_file())
    needed = snapshot.num_bytes + others + _OTHER_FILES_BYTES
    files.require_space(run.step_folder(snapshot.state.step), needed, f"the checkpoint of step {snapshot.state.step}")


def write(
    run: RunFolder, snapshot: Snapshot, weights_file: str, settings_file: str, origin: dict, tokenizer: Tokenizer,
    recipe_values: dict, on_part: Callable[[], None] = lambda: None,
) -> Path:  # fmt: skip
    """Write the checkpoint of a moment, let `latest` name it, and return its folder.

    Args:
        origin: the manifest's own keys: method, base, recipe_sha256, dataset, tokenizer.
        on_part: called as each of the large files is written, and as it is hashed.
    """
    step = snapshot.state.step
    folder = run.step_folder(step)
    with files.atomic_folder(folder) as partial:
        files.write_json(partial / settings_file, snapshot.settings)
        _save(snapshot.weights, partial / weights_file, {"format": "pt"})
        on_part()
        tokenizer.copy_to(partial)
        files.write_json(partial / "recipe.json", recipe_values)
        names = [path.name for path in partial.iterdir()]
        weights = files.file_record(partial / weights_file)
        on_part()
        body = {"run": run.id, "step": step, **origin, "weights_sha256": weights["sha256"], "tool": version.tool()}
        _write_state(partial / "state", snapshot, on_part)
        files.write_manifest(partial, "checkpoint", body, names, known={weights_file: weights})
    run.point("latest", step)
    return folder


def _write_state(folder: Path, snapshot: Snapshot, on_part: Callable[[], None]) -> None:
    folder.mkdir()
    _save(snapshot.optimizer, folder / "optimizer.safetensors")
    on_part()
    _save(snapshot.generators, folder / "generators.safetensors")
    files.write_json(folder / "state.json", dataclasses.asdict(snapshot.state))
    files.write_manifest(folder, STATE_KIND, {"step": snapshot.state.step})
    on_part()


def _save(tensors: Tensors, path: Path, metadata: dict | None = None) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata)


def load(folder: Path, trainee: Trainee, optimizer: torch.optim.Optimizer, ranks: Ranks, seed: int) -> TrainState:
    """Load weights, optimizer, generators and state; the generators come last, right before the next draw.

    A process of which the checkpoint has no generators draws from a seed of its own.
    """
    trainee.load(folder)
    state_folder = folder / "state"
    load_state_tensors(trainee.model, optimizer, load_file(state_folder / "optimizer.safetensors"))
    state = TrainState.from_json(files.read_json(state_folder / "state.json"))
    drawn = generators.of_rank(load_file(state_folder / "generators.safetensors"), ranks.rank)
    if drawn is not None:
        generators.restore(drawn)
    else:
        generators.begin(seed, state.step, ranks.rank)
    return state


def prune(run: RunFolder, keep: int, *, keep_initial: bool, best_step: int | None) -> None:
    """Remove all but the newest `keep` checkpoints; the best one, and step 0 where it is wanted, always stay."""
    steps = run.steps()
    kept = set(steps[-keep:]) | {best_step} | ({0} if keep_initial else set())
    for step in steps:
        if step not in kept:
            remove(run.step_folder(step))


def remove(folder: Path) -> None:
    """Remove a checkpoint's folder; its manifest goes first, so that a crash leaves none that looks complete."""
    (folder / files.MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder)
    _logger.debug("removed %s", folder)
