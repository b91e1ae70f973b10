"""Starting a run and going on with one: what a run is keyed by, which one is meant, and whose turn it is.

All that a person has got wrong is told before the run waits for its turn, without torch, which the engine's own process
(`supervisor`, `child`) imports.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

from training import __version__
from training.calculator import fit
from training.calculator.parallel import Parallel
from training.core import files, locks, paths, queue
from training.core.errors import IntegrityError
from training.core.report import make_command
from training.data import longest
from training.engine import environment, supervisor, torchrun, trainable
from training.engine.backends import contract as backends
from training.engine.inputs import Inputs, resolve_inputs
from training.engine.pulse import Pulse
from training.engine.requests import Requests
from training.objectives import registry
from training.recipe import kept
from training.recipe.load import Resolved, load
from training.recipe.model import Recipe
from training.runs.folder import STATE_KIND, RunFolder, all_runs

if TYPE_CHECKING:
    from training.engine.parallel import Ranks

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


def start(
    resolved: Resolved, *, reuse: bool = False, parallel: Parallel | None = None
) -> tuple[RunFolder, dict, bool]:  # fmt: skip
    """Train a recipe as a new run; returns the run, its summary and whether a finished run was reused.

    With `reuse`, a completed run of the same key is returned as it is, and an unfinished one is gone on with. With
    `parallel` several processes of this machine train it, which changes nothing of what is trained. The summary is
    empty in a process of torchrun's that follows another.
    """
    parallel = _several(torchrun.parallel(parallel))
    trainable.require(resolved, parallel)
    resolved = registry.of(resolved.recipe.method).settled(resolved)
    recipe = resolved.recipe
    fitting = fit.require(resolved, None, parallel) if recipe.data.packing else None
    if torchrun.follows():
        return *_following(parallel), False
    inputs = resolve_inputs(recipe)
    if fitting is None:  # rows as long as their longest record, which the tokens tell: they are there now
        fitting = fit.require(resolved, longest.of_recipe(recipe), parallel)
    key = run_key(resolved, inputs)
    if reuse:
        with _one_of(key, recipe.name):
            same = find_same(key)
            return (same, *_reused(same, parallel)) if same else (*_new(resolved, key, inputs, fitting), False)
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
        "recipe_sha256": resolved.sha256, "parent": None, **inputs.origin(), **_planned(recipe, fitting),
    })  # fmt: skip
    kept.write(resolved, run.path / "recipe.yaml")
    _logger.info("run %s", run.id)
    return run, _in_turn(run)


def _planned(recipe: Recipe, fitting: fit.Fit) -> dict:
    """How many processes train a run, and what a process's peak is held against: the tensors on a GPU, else all; the
    native step's alone."""
    peak = fitting.estimate.peak
    estimate = peak.allocated_bytes if fitting.device.kind == "cuda" else peak.device_bytes
    return {
        "parallel": fitting.parallel.to_json() if fitting.parallel else None,
        "estimate_bytes": estimate if recipe.backend == "native" else None,
    }


def _several(parallel: Parallel | None) -> Parallel | None:
    return parallel if parallel and parallel.ranks > 1 else None


def _reused(run: RunFolder, parallel: Parallel | None) -> tuple[dict, bool]:
    """The summary of a run of the same key, and whether it was completed before."""
    was_completed = run.status() == "completed"
    if was_completed and torchrun.is_here():
        _followed(run).leave()
    return resume(run, parallel or Parallel("ddp", 1)), was_completed


def resume(run: RunFolder, parallel: Parallel | None = None) -> dict:
    """Go on with a run from its newest complete checkpoint, under the same id; returns its summary.

    It is trained by as many processes as before, unless `parallel` says otherwise: how many there are changes nothing
    of what is trained. A run that is completed is left as it is. Raises UserError where it is still running.
    """
    if run.status() == "completed":
        return run.summary()
    parallel = torchrun.parallel(parallel)
    if torchrun.follows():
        return _following(parallel)[1]
    resolved, before = _kept_recipe(run), run.record().get("parallel")
    wanted = _several(parallel or (Parallel(**before) if before else None))
    trainable.require(resolved, wanted)
    changes = {}
    if before != (wanted.to_json() if wanted else None):
        changes = _planned(resolved.recipe, fit.require(resolved, longest.of_recipe(resolved.recipe), wanted))
    return _in_turn(run, changes)


def _in_turn(run: RunFolder, changes: dict | None = None) -> dict:
    """Wait for the machine and train the run to its end in processes of its own. The status on disk is true whatever
    happens, a SIGKILL apart."""
    with run.work() as work:
        run.update(status="waiting", error=None, **(changes or {}))
        environment.write(run.path)
        try:
            with queue.turn(f"training {run.record()['name']}", run=run.id) as machine:
                if torchrun.is_here():
                    return train(run, Pulse.create(), _followed(run))
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


def _joined(run: RunFolder) -> Ranks:
    """Meet the processes that train the run with this one, where there are any."""
    from training.engine import parallel

    return parallel.join((run.record().get("parallel") or {}).get("kind", "ddp"))


def _followed(run: RunFolder) -> Ranks:
    """Meet torchrun's other processes as the first, and tell them which run it is."""
    ranks = _joined(run)
    ranks.told(run.id)
    return ranks


def _following(wanted: Parallel) -> tuple[RunFolder, dict]:
    """Train the run that the first of torchrun's processes tells of; returns it, and nothing of what came of it."""
    from training.engine import parallel

    ranks = parallel.join(wanted.kind)
    run = RunFolder.open(ranks.told(None))
    if run.record()["status"] == "completed":  # the first one reuses it
        ranks.leave()
        return run, {}
    with Requests(run.path).listening():  # torchrun sends its signals to all: the first process decides
        return run, train(run, Pulse.create(), ranks)


def train(run: RunFolder, pulse: Pulse, ranks: Ranks | None = None) -> dict:
    """The engine's part: train the run to its end in this process, which may have met others already; returns its
    summary."""
    resolved, record = _kept_recipe(run), run.record()
    backends.of(resolved.recipe.backend).prepare()
    from training.engine import follower
    from training.engine.trainer import Trainer

    ranks = ranks or _joined(run)
    inputs = resolve_inputs(resolved.recipe, record)
    if ranks.is_first:
        summary = Trainer(run, resolved, inputs, pulse, ranks).run()
    else:
        summary = follower.Follower(run, resolved.recipe, inputs, ranks).run()
    ranks.leave()  # not after an error, which others may be waiting in
    return summary


def _kept_recipe(run: RunFolder) -> Resolved:
    """The recipe that the run began with. Raises IntegrityError where the file is not that one any more."""
    path = run.path / "recipe.yaml"
    resolved = load(path)
    if resolved.sha256 != run.record()["recipe_sha256"]:
        raise IntegrityError(
            "the run's recipe has changed since it began", where=path, found=files.short(resolved.sha256),
            expected=files.short(run.record()["recipe_sha256"]),
            next_command=make_command("train", CONFIG=path),
        )  # fmt: skip
    return resolved
