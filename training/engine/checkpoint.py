"""A checkpoint: weights that anyone can read, and beside them the state that only a resume needs.

`step_000200/` holds the weights and their settings (`model.safetensors` with `config.json`, or those of an adapter),
the tokenizer's files, `recipe.json` and `manifest.json`; `state/` holds `optimizer.safetensors`,
`generators.safetensors`, `state.json` and a manifest of its own. The folder is written beside its place and renamed
once. Nothing is pickled.
"""

import dataclasses
import logging
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from training.core import files, version
from training.engine.optimizer import load_state_tensors, state_tensors
from training.engine.schedule import Plan
from training.engine.stop import BestSoFar
from training.objectives.trainee import Trainee
from training.runs.folder import STATE_KIND, RunFolder
from training.tokenizer.artifact import Tokenizer

_logger = logging.getLogger(__name__)


@dataclasses.dataclass
class TrainState:
    """What a run is in the middle of. All of it lies in `state.json`."""

    plan: Plan
    planned_by: str
    step: int = 0
    epoch: int = 0
    row: int = 0
    trained_tokens: int = 0
    trained_seconds: float = 0.0
    skipped_steps: int = 0
    replanned: bool = False
    stop_reason: str | None = None
    best: BestSoFar = dataclasses.field(default_factory=BestSoFar)

    @classmethod
    def from_json(cls, values: dict) -> "TrainState":
        values = values | {"plan": Plan(**values["plan"]), "best": BestSoFar(**values["best"])}
        return cls(**values)


def save(
    run: RunFolder, trainee: Trainee, optimizer: torch.optim.Optimizer, state: TrainState, origin: dict,
    tokenizer: Tokenizer, recipe_values: dict,
) -> Path:  # fmt: skip
    """Write the checkpoint of this step, let `latest` name it, and return its folder.

    Args:
        origin: the manifest's own keys: method, base, recipe_sha256, dataset, tokenizer.
    """
    folder = run.step_folder(state.step)
    weights = trainee.weights()
    needed = sum(tensor.nbytes for tensor in weights.values()) * 3 + (1 << 20)
    files.require_space(folder, needed, f"the checkpoint of step {state.step}")
    with files.atomic_folder(folder) as partial:
        files.write_json(partial / trainee.settings_file, trainee.settings())
        tensors = {name: tensor.contiguous() for name, tensor in weights.items()}
        save_file(tensors, partial / trainee.weights_file, {"format": "pt"})
        tokenizer.copy_to(partial)
        files.write_json(partial / "recipe.json", recipe_values)
        names = [path.name for path in partial.iterdir()]
        weights_sha256 = files.sha256_file(partial / trainee.weights_file)
        body = {"run": run.id, "step": state.step, **origin, "weights_sha256": weights_sha256, "tool": version.tool()}
        _save_state(partial / "state", trainee.model, optimizer, state)
        files.write_manifest(partial, "checkpoint", body, names)
    run.point("latest", state.step)
    return folder


def _save_state(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, state: TrainState) -> None:
    folder.mkdir()
    save_file(state_tensors(model, optimizer), folder / "optimizer.safetensors")
    save_file(_generators(), folder / "generators.safetensors")
    files.write_json(folder / "state.json", dataclasses.asdict(state))
    files.write_manifest(folder, STATE_KIND, {"step": state.step})


def _generators() -> dict[str, torch.Tensor]:
    """The states of torch's generators. Python's and NumPy's draw nothing in training: every order is seeded afresh."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states |= {f"cuda{i}": value for i, value in enumerate(torch.cuda.get_rng_state_all())}
    return states


def load(folder: Path, trainee: Trainee, optimizer: torch.optim.Optimizer) -> TrainState:
    """Load weights, optimizer, generators and state; the generators come last, right before the next draw."""
    trainee.load(folder)
    state_folder = folder / "state"
    load_state_tensors(trainee.model, optimizer, load_file(state_folder / "optimizer.safetensors"))
    state = TrainState.from_json(files.read_json(state_folder / "state.json"))
    generators = load_file(state_folder / "generators.safetensors")
    torch.set_rng_state(generators["cpu"])
    if torch.cuda.is_available() and "cuda0" in generators:
        torch.cuda.set_rng_state_all([generators[f"cuda{i}"] for i in range(len(generators) - 1)])
    return state


def prune(run: RunFolder, keep: int, *, keep_initial: bool, best_step: int | None) -> None:
    """Remove all but the newest `keep` checkpoints; the best one, and step 0 where it is wanted, always stay."""
    steps = run.steps()
    kept = set(steps[-keep:]) | {best_step} | ({0} if keep_initial else set())
    for step in steps:
        if step not in kept:
            folder = run.step_folder(step)
            (folder / files.MANIFEST).unlink()
            shutil.rmtree(folder)
            _logger.debug("removed %s", folder)
