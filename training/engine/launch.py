"""Starting a run and going on with one: what a run is keyed by, which one is meant, and whose turn it is.

All that a person has got wrong is told before the run waits for its turn, without torch, which the engine's own process
(`supervisor`, `child`) imports.
"""

import contextlib
import logging

from training import __version__
from training.calculator import fit
from training.core import files, locks, paths, queue
from training.core.errors import IntegrityError
from training.data import longest
from training.engine import environment, supervisor, trainable
from training.engine.backends import contract as backends
from training.engine.inputs import Inputs, resolve_inputs
from training.engine.pulse import Pulse
from training.objectives import registry
from training.recipe import kept
from training.recipe.load import Resolved, load
from training.recipe.model import Recipe
from training.runs.folder import STATE_KIND, RunFolder, all_runs

_logger = logging.getLogger(__name__)


def run_key(resolved: Resolved, inputs: Inputs) -> str:
    """The hash of everything that decides what a run trains."""
    origin = inputs.origin()
    values = {key: value for key, value in resolved.values.items() if key not in ("data", "tokenizer")}
    data = {key: value for key, value in resolved.values["data"].items() if key != "dataset"}
    return files.sha256_json({"recipe": values, "data": data, "version": __version__, **origin})


def find_same(key: str) -> RunFolder | None:
    """The newest run of the same key: a completed one first, else one that can be gone on with."""
    same = [run for run in all_runs() if _key_of(run) == key]
    for wanted in (("completed",), ("paused", "lost", "failed")):
        for run in same:
            if run.status() in wanted and run.latest(STATE_KIND):
                return run
    return None


def _key_of(run: RunFolder) -> str | None:
    try:
        return run.record().get("key")
    except IntegrityError:  # a damaged run is nobody's match
        return None


def start(resolved: Resolved, *, reuse: bool = False) -> tuple[RunFolder, dict, bool]:
    """Train a recipe as a new run; returns the run, its summary and whether a finished run was reused.

    With `reuse`, a completed run of the same key is returned as it is, and an unfinished one is gone on with.
    """
    trainable.require(resolved)
    resolved = registry.of(resolved.recipe.method).settled(resolved)
    recipe = resolved.recipe
    fitting = fit.require(resolved, longest.of_recipe(recipe))
    inputs = resolve_inputs(recipe)
    key = run_key(resolved, inputs)
    if reuse:
        with _one_of(key, recipe.name):
            same = find_same(key)
            return (same, *_reused(same)) if same else (*_new(resolved, key, inputs, fitting), False)
    return *_new(resolved, key, inputs, fitting), False


def _one_of(key: str, name: str) -> contextlib.AbstractContextManager[int]:
    """Let one command at a time look for a run of a key and train it; the next one then finds it done."""
    lock = paths.roots().cache / "locks" / f"run-{files.short(key)}.lock"
    return locks.hold(lock, f"training {name}", resource="a run of the very same recipe")


def _new(resolved: Resolved, key: str, inputs: Inputs, fitting: fit.Fit) -> tuple[RunFolder, dict]:
    """Make a run and train it."""
    recipe = resolved.recipe
    run = RunFolder.create(recipe.name, {
        "status": "waiting", "name": recipe.name, "method": recipe.method, "key": key,
        "recipe_sha256": resolved.sha256, "parent": None, **inputs.origin(),
        "estimate_bytes": _held_against(recipe, fitting),
    })  # fmt: skip
    kept.write(resolved, run.path / "recipe.yaml")
    _logger.info("run %s", run.id)
    return run, _in_turn(run)


def _held_against(recipe: Recipe, fitting: fit.Fit) -> int | None:
    """What the recorded peak is held against: the tensors on a GPU, else the whole process; the native step's alone."""
    peak = fitting.estimate.peak
    if recipe.backend != "native":
        return None
    return peak.allocated_bytes if fitting.device.kind == "cuda" else peak.device_bytes


def _reused(run: RunFolder) -> tuple[dict, bool]:
    """The summary of a run of the same key, and whether it was completed before."""
    was_completed = run.status() == "completed"
    return resume(run), was_completed


def resume(run: RunFolder) -> dict:
    """Go on with a run from its newest complete checkpoint, under the same id; returns its summary.

    A run that is completed is left as it is. Raises UserError where it is still running.
    """
    if run.status() == "completed":
        return run.summary()
    _kept_recipe(run)
    return _in_turn(run)


def _in_turn(run: RunFolder) -> dict:
    """Wait for the machine and train the run to its end in a process of its own. The status on disk is true whatever
    happens, a SIGKILL apart."""
    with run.work() as work:
        run.update(status="waiting", error=None)
        environment.write(run.path)
        try:
            with queue.turn(f"training {run.record()['name']}", run=run.id) as machine:
                return supervisor.train(run, (work, machine))
        except KeyboardInterrupt:
            _leave(run, status="paused")
            raise
        except Exception as error:
            _leave(run, status="failed", error=str(error))
            raise


def _leave(run: RunFolder, **changes: str) -> None:
    """Say how a run stopped, unless the engine has said it."""
    if run.record()["status"] in ("running", "waiting"):
        run.update(**changes)


def train(run: RunFolder, pulse: Pulse) -> dict:
    """The engine's part: train the run to its end in this process; returns its summary."""
    resolved = _kept_recipe(run)
    backends.of(resolved.recipe.backend).prepare()
    from training.engine.trainer import Trainer

    return Trainer(run, resolved, resolve_inputs(resolved.recipe, run.record()), pulse).run()


def _kept_recipe(run: RunFolder) -> Resolved:
    """The recipe that the run began with. Raises IntegrityError where the file is not that one any more."""
    path = run.path / "recipe.yaml"
    resolved = load(path)
    if resolved.sha256 != run.record()["recipe_sha256"]:
        raise IntegrityError(
            "the run's recipe has changed since it began", where=path, found=files.short(resolved.sha256),
            expected=files.short(run.record()["recipe_sha256"]),
            next_command=f"make train CONFIG={path} starts a new run with it",
        )  # fmt: skip
    return resolved
