"""Checkpoints in the background: what they hold, what happens when the disk fails, and what waits for them."""

import threading
import time
from pathlib import Path

import pytest
import torch

from tests.conftest import small_disk
from tests.engine.test_run import final_weights, losses, train
from training.cli import main
from training.core import files, paths
from training.core.errors import MachineError
from training.engine import checkpoint, saver
from training.engine.trainer import Trainer
from training.runs.events import read_events
from training.runs.folder import all_runs


def test_a_snapshot_is_of_its_moment():
    """A copy does not change when training goes on; the moment itself does."""
    weights = {"w": torch.ones(3)}
    state = [1]
    moment = checkpoint.Snapshot(state, weights, {"w/exp_avg": torch.zeros(3)}, {"cpu": torch.get_rng_state()}, {})
    copied = moment.copied()
    weights["w"].add_(1)
    state.append(2)
    assert copied.weights["w"].tolist() == [1, 1, 1] and copied.state == [1]
    assert moment.weights["w"].tolist() == [2, 2, 2] and moment.num_bytes == 24


def test_one_is_on_its_way_and_an_error_comes_back():
    moment = checkpoint.Snapshot(None, {"w": torch.ones(3)}, {}, {}, {})
    begun, go = threading.Event(), threading.Event()

    def write(_snapshot):
        begun.set()
        go.wait(10)
        raise MachineError("the disk is full")

    one = saver.Saver(write, in_background=True)
    one.save(moment)
    assert begun.wait(10)
    one.check()  # nothing is wrong so far
    go.set()
    with pytest.raises(MachineError, match="full"):
        one.wait()
    one.wait()  # told once


def test_who_waits_for_the_disk_hears_of_each_file(monkeypatch: pytest.MonkeyPatch):
    """D8: in the main thread and while it waits alone, so that a disk that hangs, or a step, is silent."""
    monkeypatch.setattr(saver, "_LOOK_SECONDS", 0.01)
    heard, go = [], threading.Event()

    def write(_snapshot):
        one.count_part()
        go.wait(10)
        for _ in range(2):
            one.count_part()
            time.sleep(0.1)

    one = saver.Saver(write, True, lambda: heard.append(threading.current_thread()))
    one.save(checkpoint.Snapshot(None, {"w": torch.ones(3)}, {}, {}, {}))
    time.sleep(0.05)
    assert heard == []
    go.set()
    one.wait()
    assert set(heard) == {threading.main_thread()} and len(heard) >= 2


def test_without_host_memory_the_run_waits_for_the_disk(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(saver, "_has_room", lambda num_bytes: False)
    threads = []
    one = saver.Saver(lambda _: threads.append(threading.current_thread()), in_background=True)
    one.save(checkpoint.Snapshot(None, {}, {}, {}, {}))
    assert threads == [threading.main_thread()]


def slowly(monkeypatch: pytest.MonkeyPatch, seconds: float) -> list[int]:
    """Let every write take this long; returns the steps that are written, as they are."""
    write, steps = Trainer._write, []

    def slow(self, snapshot):
        time.sleep(seconds)
        write(self, snapshot)
        steps.append(snapshot.state.step)

    monkeypatch.setattr(Trainer, "_write", slow)
    return steps


def test_slow_writes_change_nothing(recipe: Path, monkeypatch: pytest.MonkeyPatch):
    """The weights of each checkpoint are those of its step, however late it is written."""
    overrides = ("checkpoint.every_steps=2", "checkpoint.keep=9")
    _, plain = train(recipe, *overrides, "checkpoint.background=false", "seeds.train=42")
    steps = slowly(monkeypatch, 0.1)
    _, slow = train(recipe, *overrides)
    assert steps == [0, 2, 4, 6, 8, 10, 12] == slow.steps() == plain.steps()
    for step in steps:
        one, other = (files.read_manifest(run.step_folder(step), "checkpoint") for run in (plain, slow))
        assert one["weights_sha256"] == other["weights_sha256"]
        states = [files.sha256_file(run.step_folder(step) / "state" / "optimizer.safetensors") for run in (plain, slow)]
        assert states[0] == states[1]


def test_an_error_while_saving_ends_the_run_and_the_old_checkpoint_stays(recipe: Path, monkeypatch: pytest.MonkeyPatch):
    write = Trainer._write

    def fails(self, snapshot):
        if snapshot.state.step == 4:
            raise MachineError("the disk is full")
        write(self, snapshot)

    monkeypatch.setattr(Trainer, "_write", fails)
    code, run = train(recipe)
    assert code == 3 and run.status() == "failed" and "full" in run.record()["error"]
    assert run.steps() == [0] and run.pointed("latest").name == "step_000000"
    assert max(losses(run)) < 12


def test_a_run_that_ends_waits_for_its_last_checkpoint(recipe: Path, monkeypatch: pytest.MonkeyPatch):
    steps = slowly(monkeypatch, 0.5)
    code, run = train(recipe, "stop.max_steps=2")
    assert code == 0 and steps == [0, 2] and run.latest(checkpoint.STATE_KIND).name == "step_000002"


def test_room_on_the_disk_is_asked_for_before_anything_is_written(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    """B13: needed and free bytes are told; what was there stays."""
    monkeypatch.setattr(
        files.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 100 << 10})()
    )  # fmt: skip
    code, run = train(recipe, "stop.max_steps=2")
    text = capsys.readouterr().err
    assert code == 3 and "not enough disk space for the checkpoint of step 0" in text
    assert "100.00 KiB free" in text and "at least" in text and run.steps() == []


def test_latest_and_best_are_never_removed(recipe: Path):
    """Keep one: the newest and the best stay, whichever they are."""
    _, run = train(
        recipe, "checkpoint.keep=1", "checkpoint.initial=false", "checkpoint.every_steps=1", "optimizer.lr=3e-1"
    )
    best = run.pointed("best").name
    assert run.steps() == sorted({int(best.removeprefix("step_")), 12}) and run.pointed("latest").name == "step_000012"


def asks_at(monkeypatch: pytest.MonkeyPatch, name: str, step: int) -> None:
    """Put a file of this name into the run's folder after a step."""
    on_step = Trainer.on_step

    def touch(self, state, result):
        on_step(self, state, result)
        if state.step == step:
            (self.folder.path / name).touch()

    monkeypatch.setattr(Trainer, "on_step", touch)


def test_a_pause_file_saves_and_stops_and_the_run_goes_on(recipe: Path, monkeypatch: pytest.MonkeyPatch):
    """D18: exit 130, status paused, the file used up; the end is that of a run nobody stopped."""
    _, wanted = train(recipe)
    with monkeypatch.context() as patch:
        slowly(patch, 0.2)  # which the stop waits for
        asks_at(patch, "pause", 5)
        code, run = train(recipe)
    assert (code, run.status(), run.steps()[-1]) == (130, "paused", 5) and not (run.path / "pause").exists()
    assert [event["step"] for event in read_events(run.path, "paused")] == [5]
    (run.path / "pause").touch()  # asked for again while it was down: a start is the newer wish
    assert main(["resume", run.id]) == 0 and run.status() == "completed"
    assert losses(run) == losses(wanted) and final_weights(run) == final_weights(wanted)


def test_a_cancel_file_stops_and_saves_nothing(recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    asks_at(monkeypatch, "cancel", 6)
    code, run = train(recipe)
    assert (code, run.status(), run.steps()) == (130, "cancelled", [0, 4]) and not (run.path / "cancel").exists()
    assert "cancelled at step 6" in capsys.readouterr().err


def test_checkpoints_on_a_small_disk_are_old_or_new(recipe: Path):
    """B13 on a real file system: it fills up while the run saves in the background."""
    with small_disk(paths.roots().runs, "4000k") as runs:
        code, run = train(recipe, "checkpoint.keep=1", "checkpoint.every_steps=2", "checkpoint.initial=false")
        assert code == 0 and run.status() == "completed"  # room for three, and old ones go
        (runs / "ballast").write_bytes(b"x" * 1_000_000)
        code = main(["train", "--config", str(recipe), "checkpoint.keep=9", "checkpoint.every_steps=1"])
        full = all_runs()[0]
        assert code == 3 and full.status() == "failed" and full.latest(checkpoint.STATE_KIND) is not None
        assert not list(full.checkpoints.glob(".*"))


def test_a_request_before_the_first_step_is_heard_after_it(recipe: Path, monkeypatch: pytest.MonkeyPatch):
    on_event = Trainer.on_event

    def touch(self, event, state, **values):
        on_event(self, event, state, **values)
        (self.folder.path / "pause").touch()

    monkeypatch.setattr(Trainer, "on_event", touch)
    code, run = train(recipe)
    assert (code, run.steps()[-1]) == (130, 1)
