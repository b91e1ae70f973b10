"""Resuming bit for bit: from any step, any number of times, whatever is trained, and after kills at any moment."""

import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.engine.nursery import Nursery
from tests.engine.test_run import final_weights, losses, train, wait_for_step
from tests.objectives.tiny import make_world
from training.cli import main
from training.core import files, paths
from training.engine import checkpoint
from training.engine.trainer import Trainer
from training.runs.events import read_events
from training.runs.folder import RunFolder, all_runs

STREAM = ("stop.max_steps=24", "evaluate.every_steps=5", "checkpoint.every_steps=7")
"""Epochs of some eleven steps, validations and saves at odd places."""


PLACES = {
    "loading": ("assembly.Assembly", "of", 1, 0.02), "resuming": ("checkpoint", "load", 1, 0.002),
    "saving": ("checkpoint", "write", 4, 0.004), "pointing": ("folder.RunFolder", "point", 5, 0.0002),
    "removing": ("checkpoint", "remove", 3, 0.0002), "stepping": ("loop.Loop", "step", 5, 0.004),
}  # fmt: skip
"""Where a run is killed: a function, the most calls of it that are waited for, the most seconds into the last one."""

DEATH = """
import inspect, os, signal, threading, time
from training.engine import assembly, checkpoint, loop
from training.runs import folder

journal = os.open(os.environ["DATA_ROOT"] + "/journal", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
real, calls = getattr({owner}, "{name}"), []

def die():
    time.sleep({seconds})
    os.kill(os.getpid(), signal.SIGKILL)

def deadly(*arguments, **named):
    calls.append(1)
    os.write(journal, b"in {name}\\n")
    if len(calls) == {number}:
        threading.Thread(target=die, daemon=True).start()
    try:
        return real(*arguments, **named)
    finally:
        if len(calls) == {number}:
            time.sleep(60)  # a fast machine is done before its time: it dies before anyone hears of it
        os.write(journal, b"out of {name}\\n")

setattr({owner}, "{name}", staticmethod(deadly) if inspect.ismethod(real) else deadly)
"""


def stopped_at(recipe: Path, steps: list[int], monkeypatch: pytest.MonkeyPatch, *overrides: str) -> RunFolder:
    """Train with a stop and a resume after each of these steps; returns the run, which is at its end."""
    run = None
    for step in steps:
        with monkeypatch.context() as patch:
            patch.setattr(Trainer, "stop_requested", _at(step))
            code = train(recipe, *overrides)[0] if run is None else main(["resume", run.id])
        run = run or all_runs()[0]
        assert code == 130 and run.status() == "paused" and run.steps()[-1] == step
    assert main(["resume", run.id]) == 0
    return run


def _at(step: int):
    return lambda self: "pause" if len(list(read_events(self.folder.path, "step"))) >= step else None


def same(one: RunFolder, other: RunFolder) -> None:
    """Losses, rates, norms, validations, the best and every byte of weights, moments and generators."""
    keys = ("train/loss_nats", "train/lr", "train/grad_norm", "train/tokens", "eval/loss_nats", "best")
    seen = [
        [
            [(event["step"], *(event.get(key) for key in keys)) for event in read_events(run.path, kind)]
            for run in (one, other)
        ]
        for kind in ("step", "validation")
    ]  # fmt: skip
    assert all(mine == theirs for mine, theirs in seen)
    last = [run.step_folder(run.steps()[-1]) for run in (one, other)]
    assert last[0].name == last[1].name and final_weights(one) == final_weights(other)
    for name in ("optimizer.safetensors", "generators.safetensors"):
        assert files.sha256_file(last[0] / "state" / name) == files.sha256_file(last[1] / "state" / name)
    states = [files.read_json(folder / "state" / "state.json") for folder in last]
    assert states[0] | {"trained_seconds": 0} == states[1] | {"trained_seconds": 0}
    bests = [run.pointed("best").name for run in (one, other)]
    assert bests[0] == bests[1]


def test_a_stream_goes_on_from_random_steps(recipe: Path, monkeypatch: pytest.MonkeyPatch):
    """B01, B04, B05: mid-epoch, at an epoch's end, twice in a row, right before and after a validation."""
    _, wanted = train(recipe, *STREAM)
    per_epoch = -(-next(read_events(wanted.path, "start"))["rows"] // 4)
    chance = random.Random(1)
    for _ in range(2):
        steps = sorted({*chance.sample(range(1, 24), 3), min(per_epoch, 23)})
        same(stopped_at(recipe, steps, monkeypatch, *STREAM), wanted)


@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_tuned_base_goes_on_from_random_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str):
    """Dropout included: a LoRA's draws go on where they were; 8-bit moments too."""
    world = make_world(tmp_path, monkeypatch)
    more = ("lora.dropout=0.5",) if method == "lora" else ("optimizer.name=adamw8bit",)
    overrides = ("stop.max_steps=12", "evaluate.every_steps=5", *more)
    _, wanted = train(world / f"{method}.yaml", *overrides)
    steps = sorted(random.Random(2).sample(range(1, 12), 3))
    same(stopped_at(world / f"{method}.yaml", steps, monkeypatch, *overrides), wanted)


def test_a_finished_run_and_its_last_step_are_left_alone(recipe: Path):
    """B08: a run whose end was saved and not told makes no further step."""
    _, run = train(recipe, "optimizer.lr=1e-12", "evaluate.every_steps=1", "stop.patience=2")
    assert files.read_json(run.path / "summary.json")["stop_reason"] == "patience"
    seen = losses(run)
    run.update(status="lost")
    assert main(["resume", run.id]) == 0 and losses(run) == seen and run.status() == "completed"


@pytest.mark.slow
def test_a_run_killed_twenty_times_ends_as_one_that_nobody_killed(recipe: Path):
    """B11, B78: kill -9 at random moments of a random place, three times in each: loading, resuming and saving, the
    pointer's change and the removal of old checkpoints included."""
    overrides = ("stop.max_steps=150", "checkpoint.every_steps=1", "evaluate.every_steps=3")
    chance = random.Random(3)
    places = [*PLACES] * 3 + ["anywhere"] * 2
    chance.shuffle(places)
    assert len(places) == 20
    with Nursery() as nursery:
        nursery.start("train", "--config", str(recipe), *overrides)
        assert nursery.code() == 0
        wanted = all_runs()[0]
        child = nursery.start("train", "--config", str(recipe), *overrides)
        run = _begun(wanted)
        os.kill(child, signal.SIGKILL)
        assert nursery.code() == -signal.SIGKILL
        for place in places:
            if place == "anywhere":
                child = nursery.start("resume", run.id)
                _wait_for_a_step(run)
                time.sleep(chance.random() * 0.15)
                os.kill(child, signal.SIGKILL)
            else:
                owner, name, most_calls, seconds = PLACES[place]
                how = {"number": chance.randint(1, most_calls), "seconds": chance.random() * seconds}
                nursery.start("resume", run.id, before=DEATH.format(owner=owner, name=name, **how))
            assert nursery.code() == -signal.SIGKILL, "the run was done before it was killed twenty times"
            assert place == "anywhere" or _journal().endswith(f"in {PLACES[place][1]}\n")
            assert run.status() == "lost" and run.latest(checkpoint.STATE_KIND) is not None
        assert nursery.run("resume", run.id) == 0
    assert run.status() == "completed" and not list(run.checkpoints.glob(".*"))
    assert final_weights(run) == final_weights(wanted) and losses(run) == losses(wanted)


def test_a_run_killed_before_its_first_checkpoint_begins_again(recipe: Path):
    """Nothing of it was kept, so nothing is lost by that; where something was kept and is damaged, it is told."""
    overrides = (
        "stop.max_steps=40",
        "checkpoint.every_steps=null",
        "checkpoint.initial=false",
        "evaluate.every_steps=null",
    )
    with Nursery() as nursery:
        child = nursery.start("train", "--config", str(recipe), *overrides)
        run = wait_for_step(1, seconds=120)
        _wait_for_a_step(run)
        os.kill(child, signal.SIGKILL)
        assert nursery.code() == -signal.SIGKILL
    assert run.status() == "lost" and not run.steps()
    assert main(["resume", run.id]) == 0 and run.status() == "completed"
    _, unbroken = train(recipe, *overrides)
    assert unbroken.id != run.id and final_weights(run) == final_weights(unbroken)
    assert losses(run) == losses(unbroken)

    (run.step_folder(40) / files.MANIFEST).unlink()
    for mark in (run.record()["has_saved"], None):  # a run that is older than the mark has none
        run.update(status="lost", has_saved=mark)
        assert main(["resume", run.id]) == 5 and run.status() == "failed"


def test_what_a_kill_has_left_of_a_checkpoint_goes_whatever_process_id_it_had(recipe: Path):
    """In a container the next engine has the number of the one before."""
    _, run = train(recipe)
    left = run.checkpoints / f".step_000003.{os.getpid()}.0123abcd.partial"
    left.mkdir()
    run.update(status="lost")
    assert main(["resume", run.id]) == 0 and not left.exists()


def _journal() -> str:
    return (paths.roots().data / "journal").read_text()


def _begun(other: RunFolder) -> RunFolder:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        for run in all_runs():
            if run.id != other.id and run.steps():
                return run
        time.sleep(0.01)
    raise AssertionError("no run began")


def _wait_for_a_step(run: RunFolder) -> None:
    """Wait until the run has made a step more."""
    before, deadline = _num_steps(run), time.monotonic() + 120
    while _num_steps(run) == before:
        assert time.monotonic() < deadline
        time.sleep(0.002)


def _num_steps(run: RunFolder) -> int:
    return sum(1 for _ in read_events(run.path, "step"))
