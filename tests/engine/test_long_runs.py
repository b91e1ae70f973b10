"""Runs that are long or compiled: memory that does not grow, names that stay plain, budgets by the clock."""

import dataclasses
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from tests.engine.test_loop import Recorder, random_rows, recipe_of, tiny_model, train
from tests.engine.test_run import losses
from tests.engine.test_run import train as train_run
from training.cli import main
from training.core import process
from training.engine import budget, saver
from training.engine.state import TrainState
from training.engine.trainer import Trainer
from training.runs.events import read_events


@pytest.mark.slow
def test_a_thousand_steps_hold_no_more_memory_than_a_hundred(recipe: Path, monkeypatch: pytest.MonkeyPatch):
    """Less than 1 %, with validations and checkpoints in the background on the way."""
    held, on_step = {}, Trainer.on_step

    def keep(self, state, result):
        on_step(self, state, result)
        if state.step in (200, 1200):
            process.reset_peak_rss()
            held[state.step] = process.peak_rss_bytes()

    monkeypatch.setattr(Trainer, "on_step", keep)
    often = ("checkpoint.every_steps=25", "evaluate.every_steps=25", "checkpoint.initial=false")
    code, run = train_run(recipe, "stop.max_steps=1200", *often)
    assert code == 0 and len(losses(run)) == 1200  # each was told and written down
    assert held[1200] < held[200] * 1.01


@pytest.mark.slow
def test_whether_to_compile_is_tried_and_told(recipe: Path):
    code, run = train_run(recipe, "stop.max_steps=1", "memory.compile=auto")
    tried = next(read_events(run.path, "compile"))
    assert code == 0 and tried["plain_seconds"] > 0 and tried["compiled_seconds"] > 0
    assert run.summary()["compiled"] == tried["compiled"]


@pytest.mark.slow
def test_a_compiled_run_and_a_plain_one_read_each_others_checkpoints(recipe: Path, monkeypatch: pytest.MonkeyPatch):
    """B07: the same names; each goes on from step 4 of the other's, and everything is the plain run's to 1e-5."""
    often = ("stop.max_steps=8", "checkpoint.keep=9")
    (_, plain), (code, compiled) = train_run(recipe, *often), train_run(recipe, *often, "memory.compile=true")
    assert code == 0 and compiled.summary()["compiled"] and not plain.summary()["compiled"]
    wanted, weights = losses(plain), load_file(plain.step_folder(8) / "model.safetensors")
    assert list(losses(compiled).values()) == pytest.approx(list(wanted.values()), abs=1e-5)
    read = TrainState.from_json
    for run, goes_on_compiled in ((compiled, False), (plain, True)):
        num_told = len(list(read_events(run.path, "step")))
        shutil.rmtree(run.step_folder(8))
        run.update(status="lost")
        with monkeypatch.context() as patch:
            patch.setattr(TrainState, "from_json", lambda values, on=goes_on_compiled: read(values | {"compiled": on}))
            assert main(["resume", run.id]) == 0
        assert run.summary()["compiled"] == goes_on_compiled
        again = list(read_events(run.path, "step"))[num_told:]
        assert [one["step"] for one in again] == [5, 6, 7, 8]
        assert [one["train/loss_nats"] for one in again] == pytest.approx([wanted[n] for n in (5, 6, 7, 8)], abs=1e-5)
        mine = load_file(run.step_folder(8) / "model.safetensors")
        assert mine.keys() == weights.keys()
        assert all((mine[name] - weights[name]).abs().max() < 1e-4 for name in weights)


def clock(monkeypatch: pytest.MonkeyPatch, rows, seconds) -> None:
    """Let the clock stand still but for `seconds(number)` of each forward pass."""
    now, number, plain = [0.0], [0], rows.loss
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def slow(model, batch):
        now[0] += seconds(number[0])
        number[0] += 1
        return plain(model, batch)

    rows.loss = slow


@pytest.mark.parametrize(
    ("seconds", "steps"),
    [
        (lambda n: 1.0 if n < 200 else 2.0, 400),  # a machine that becomes slow
        (lambda n: 2.0 if n < 100 else 1.0, 500),  # and one that becomes quick
    ],
)
def test_the_plan_follows_a_speed_that_changes(monkeypatch: pytest.MonkeyPatch, seconds, steps: int):
    """600 s: the last step is the plan's last, its rate the floor, within a few steps."""
    rows = random_rows(10)
    clock(monkeypatch, rows, seconds)
    recipe = recipe_of(
        stop={"max_steps": 10_000, "max_hours": 600 / 3600},
        schedule={"kind": "cosine", "warmup": "5%", "min_lr_ratio": 0.1},
    )
    hooks = Recorder()
    _, _, state, _, reason = train(recipe, rows, hooks=hooks)
    assert reason == "hours" and abs(state.step - steps) <= 12 and abs(state.plan.total_steps - state.step) <= 12
    assert hooks.rates[-1] == pytest.approx(1e-3, rel=0.05)
    plans = [values for event, _, values in hooks.events if event == "plan"]
    assert 2 <= len(plans) <= 8 and plans[-1]["total_steps"] == state.plan.total_steps
    assert state.planned_by == "hours"


def test_steps_that_are_long_are_planned_after_two(monkeypatch: pytest.MonkeyPatch):
    """100 s a step and 600 s: the trial and five steps, of which the last has the floor's rate."""
    rows = random_rows(10)
    clock(monkeypatch, rows, lambda n: 100.0)
    recipe = recipe_of(
        stop={"max_steps": 1000, "max_hours": 600 / 3600}, schedule={"kind": "cosine", "min_lr_ratio": 0.1}
    )
    hooks = Recorder()
    _, _, state, _, reason = train(recipe, rows, hooks=hooks)
    assert (reason, state.step, state.plan.total_steps) == ("hours", 5, 5)
    assert [step for event, step, _ in hooks.events] == [2] and hooks.rates[-1] == pytest.approx(1e-3)


def test_a_run_that_the_clock_has_planned_keeps_its_plan_when_it_goes_on(monkeypatch: pytest.MonkeyPatch):
    """B05: the plan of the first ten steps is that of the steps after a stop; no new one is made before it is due."""
    limits = {"stop": {"max_steps": 10_000, "max_hours": 600 / 3600}, "schedule": {"kind": "cosine", "warmup": "5%"}}
    rows = random_rows(10)
    clock(monkeypatch, rows, lambda n: 1.0)
    wanted = Recorder()
    *_, unbroken, _, _ = train(recipe_of(**limits), rows, hooks=wanted)
    rows, before, after = random_rows(10), Recorder(stop_after=40), Recorder()
    clock(monkeypatch, rows, lambda n: 1.0)
    model, opt, state, _, reason = train(recipe_of(**limits), rows, hooks=before)
    assert (reason, state.planned_by) == ("paused", "hours")
    kept = TrainState.from_json(dataclasses.asdict(state))
    plan, due = kept.plan, kept.forecast.step
    assert due > 60
    *_, reason = train(recipe_of(**limits), rows, model, after, kept, opt)
    assert reason == "hours" and abs(kept.step - unbroken.step) <= 2  # the trial of the resume takes a second
    assert all(step >= due for event, step, _ in after.events if event == "plan")
    assert after.rates[: due - 41] == [plan.rate(step) for step in range(41, due)]
    assert before.rates + after.rates[: due - 41] == wanted.rates[: due - 1]


def test_a_limit_in_steps_that_comes_before_the_clock_is_the_plan_again(monkeypatch: pytest.MonkeyPatch):
    """A slow start makes the clock decide; when the machine is quick again the steps do."""
    rows = random_rows(10)
    clock(monkeypatch, rows, lambda n: 10.0 if n < 15 else 1.0)
    recipe = recipe_of(stop={"max_steps": 100, "max_hours": 600 / 3600})
    hooks = Recorder()
    _, _, state, _, reason = train(recipe, rows, hooks=hooks)
    assert (reason, state.step, state.planned_by) == ("steps", 100, "steps")
    assert next(values["planned_by"] for event, _, values in hooks.events if event == "plan") == "hours"


def test_the_last_validation_and_save_are_within_the_hours(monkeypatch: pytest.MonkeyPatch):
    """100 s, 5 s for each save: the run ends with the clock and not after it."""
    rows = random_rows(10)
    clock(monkeypatch, rows, lambda n: 1.0)
    hooks, now = Recorder(), []

    def slow_save(state):
        hooks.saved.append(state.step)
        for _ in range(5):
            rows.loss(model, rows.batch([0]).tensors)
        now.append(time.monotonic())

    model = tiny_model()
    hooks.save = slow_save
    recipe = recipe_of(
        stop={"max_steps": 10_000, "max_hours": 100 / 3600}, checkpoint={"every_steps": 20, "initial": True}
    )
    _, _, state, _, reason = train(recipe, rows, hooks=hooks)
    assert reason == "hours" and hooks.saved[-1] == state.step
    assert 94 <= now[-1] <= 101


def test_minutes_make_validations_and_saves_due(monkeypatch: pytest.MonkeyPatch):
    """A second a step: validated every half minute and saved every minute, whatever the steps say."""
    rows = random_rows(10)
    clock(monkeypatch, rows, lambda n: 1.0)
    recipe = recipe_of(
        stop={"max_steps": 125}, evaluate={"every_steps": None, "every_minutes": 0.5, "records": 2},
        checkpoint={"every_steps": None, "every_minutes": 1}, optimizer={"lr": 1e-30},
    )  # fmt: skip
    hooks = Recorder()
    train(recipe, rows, hooks=hooks, validation=(random_rows(3), np.arange(3)))
    assert [step for step, _ in hooks.validations] == [0, 30, 60, 90, 120, 125]
    assert hooks.saved == [0, 60, 120, 125]


def test_epochs_and_steps_alone_are_planned_once():
    recipe = recipe_of(batch={"accumulate": 3}, stop={"max_steps": None, "max_epochs": 1.5})
    assert budget.planned_steps(recipe, 10) == (6, "epochs")
    hooks = Recorder()
    _, _, state, _, reason = train(recipe, random_rows(10), hooks=hooks)
    assert (reason, state.step, hooks.events) == ("epochs", 6, [])


def test_there_is_room_for_a_copy_or_there_is_not():
    assert saver._has_room(1 << 20) and not saver._has_room(1 << 60)
