"""Starting a run and going on with one: what a run is keyed by, which one is meant, and whose turn it is.

While it trains a run holds the machine's lock; who comes second waits and is told for whom.
"""

import contextlib
import logging

from training import __version__
from training.calculator import fit
from training.core import files, locks
from training.core.errors import IntegrityError, UserError
from training.data import longest
from training.engine import checkpoint, device, trainable
from training.engine.inputs import Inputs, resolve_inputs
from training.engine.trainer import Trainer
from training.objectives import registry
from training.recipe import kept
from training.recipe.load import Resolved, load
from training.runs.folder import RunFolder, all_runs

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
            if run.status() in wanted and run.latest(checkpoint.STATE_KIND):
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
    where = device.resolve(recipe.memory.weights)
    expected = fit.require(resolved, longest.of_recipe(recipe)).estimate.peak
    inputs = resolve_inputs(recipe)
    key = run_key(resolved, inputs)
    with machine(f"training {recipe.name}"):
        if reuse and (run := find_same(key)):
            was_completed = run.status() == "completed"
            return run, _go_on(run), was_completed
        record = {
            "name": recipe.name, "method": recipe.method, "key": key, "recipe_sha256": resolved.sha256,
            "parent": None, **inputs.origin(), "estimate_bytes": where.counted(expected),
        }  # fmt: skip
        run = RunFolder.create(recipe.name, record)
        kept.write(resolved, run.path / "recipe.yaml")
        _logger.info("run %s", run.id)
        return run, Trainer(run, resolved, inputs).run(), False


def resume(run: RunFolder) -> dict:
    """Go on with a run from its newest complete checkpoint, under the same id; returns its summary.

    A run that is completed is left as it is. Raises UserError where it is still running.
    """
    if run.status() in ("running", "waiting"):
        raise UserError(
            "the run is still running", where=run.path, found=f"process {run.record()['process']['pid']}",
            expected="a run that is paused, failed or lost", next_command="make runs",
        )  # fmt: skip
    with machine(f"training {run.record()['name']}"):
        return _go_on(run)


def _go_on(run: RunFolder) -> dict:
    """Train a run to its end, with the machine held; what it is in is looked at only now."""
    if run.status() == "completed":
        return files.read_json(run.path / "summary.json")
    resolved = _kept_recipe(run)
    return Trainer(run, resolved, resolve_inputs(resolved.recipe, run.record())).run()


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


def machine(what: str) -> contextlib.AbstractContextManager[None]:
    """Hold the machine, waiting for whoever has it and saying who that is."""
    return locks.hold(locks.machine_lock(), what, resource="the machine")
