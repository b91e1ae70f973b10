"""Windows that fail: out of memory, not finite, too large for float16; and the trial that comes first."""

import copy
import dataclasses
import math

import numpy as np
import pytest
import torch

from tests.engine.test_loop import Recorder, Words, random_rows, recipe_of, tiny_model, train
from training.core.errors import RunError
from training.engine import compiling, generators, ladder, loop, loss_scale, optimizer, trial
from training.engine.ladder import Rung
from training.engine.parallel import Ranks
from training.engine.window import Gradients

FAULT = "CUDA out of memory. Tried to allocate 2.00 GiB"


class Failing(Words):
    """Words whose passes run out of memory where `fails(rows, place)` says so: forward, or in the midst of backward."""

    def __init__(self, rows, fails):
        super().__init__(rows)
        self.fails, self.at = fails, None

    def batch(self, rows):
        batch = super().batch(rows)
        batch.tensors["rows"] = torch.as_tensor(rows)
        return batch

    def loss(self, model, tensors):
        rows = tensors["rows"].tolist()
        if self.fails(rows, "forward"):
            raise torch.OutOfMemoryError(FAULT)
        if self.fails(rows, "backward"):
            model[0].weight.register_hook(self._raise_once)  # the head's gradient is there by then
        return super().loss(model, tensors)

    @staticmethod
    def _raise_once(_grad):
        raise torch.OutOfMemoryError(FAULT)


class Fresh(Failing):
    """The same, with hooks that go with their try."""

    def loss(self, model, tensors):
        model[0].weight._backward_hooks = None
        return super().loss(model, tensors)


def weights_of(model) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("seed", range(6))
def test_out_of_memory_anywhere_changes_nothing_but_the_micro_batch(seed: int):
    """Faults at random micro-batches, forward and backward: losses and weights of an undisturbed run to 1e-6."""
    recipe = recipe_of(data={"micro_batch": 4}, batch={"accumulate": 3}, stop={"max_steps": 8})
    rows = random_rows(30).rows
    wanted = Recorder()
    model, *_ = train(recipe, Words(rows), hooks=wanted)
    chance = np.random.default_rng(seed)
    limit = 4

    def fails(batch, place):
        nonlocal limit
        if len(batch) >= limit and limit > 1 and chance.random() < 0.2:
            limit = len(batch)
            return True
        return False

    hooks = Recorder()
    mine, _, state, _, reason = train(recipe, Fresh(rows, fails), hooks=hooks)
    assert (reason, state.step, state.skipped_records) == ("steps", 8, 0)
    assert hooks.losses == pytest.approx(wanted.losses, abs=1e-6)
    for one, other in zip(weights_of(mine), weights_of(model), strict=True):
        assert torch.allclose(one, other, atol=1e-6)
    rungs = [values["micro_batch"] for event, _, values in hooks.events if event == "out_of_memory"]
    assert rungs == [2, 1][: len(rungs)] and state.rung.micro_batch == (rungs or [4])[-1]


def test_the_ladder_is_walked_to_its_end_and_the_record_left_out():
    """Halved to 1, then checkpointing, then the record: the window is that of the others, and the record is counted."""

    class Model(torch.nn.Sequential):
        supports_gradient_checkpointing = True
        is_activation_checkpointing = False

        def activation_checkpointing_enable(self, settings):
            assert settings == {"use_reentrant": False}
            self.is_activation_checkpointing = True

    def model():
        torch.manual_seed(0)
        return Model(*tiny_model().children())

    rows = random_rows(4).rows
    recipe = recipe_of(data={"micro_batch": 4}, stop={"max_steps": 1})
    hooks = Recorder()
    failing = Fresh(rows, lambda batch, place: 2 in batch and place == "backward")
    mine, _, state, _, _ = train(recipe, failing, model(), hooks)
    whole, *_ = train(recipe_of(data={"micro_batch": 3}, stop={"max_steps": 1}), Words(rows[:2] + rows[3:]), model())
    for one, other in zip(weights_of(mine), weights_of(whole), strict=True):
        assert torch.allclose(one, other, atol=1e-6)
    rungs = [(values["micro_batch"], values["checkpointing"]) for event, _, values in hooks.events[:3]]
    assert rungs == [(2, False), (1, False), (1, True)]
    assert [values["lines"] for event, _, values in hooks.events if event == "record_skipped"][-1] == [3]
    assert (state.skipped_records, state.skipped_steps, state.rung) == (1, 0, Rung(1, True))
    assert mine.is_activation_checkpointing


@pytest.mark.parametrize("sick", [1, 2])
def test_a_row_that_cannot_even_be_built_is_left_out_of_its_own_window(sick: int):
    """Memory runs out on the lowest rung before any forward pass, in a later window than the first: it goes on."""

    class Large(Words):
        num_tries = 0

        def batch(self, rows):
            if sick in rows:
                self.num_tries += 1
                assert self.num_tries < 9, "the very same window is tried without end"
                raise MemoryError("Unable to allocate 9.00 GiB")
            return super().batch(rows)

    rows = random_rows(6).rows
    hooks = Recorder()
    recipe = recipe_of(batch={"accumulate": 2}, stop={"max_steps": None, "max_epochs": 1})
    _, _, state, _, reason = train(recipe, Large(rows), hooks=hooks)
    assert (reason, state.step, state.skipped_records) == ("epochs", 3, 1)
    assert [values["lines"] for event, step, values in hooks.events if event == "record_skipped" and step] == [
        [sick + 1]
    ]


def test_where_no_row_fits_the_run_ends():
    hooks = Recorder()
    with pytest.raises(RunError, match="no row fitted the memory"):
        train(recipe_of(), Fresh(random_rows(4).rows, lambda batch, place: place == "forward"), hooks=hooks)
    assert sum(event == "record_skipped" for event, *_ in hooks.events) >= 5


def test_other_errors_are_not_taken_for_memory():
    class Broken(Words):
        def loss(self, model, tensors):
            raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes"):
        train(recipe_of(), Broken(random_rows(4).rows))


def test_validation_takes_smaller_batches_where_memory_runs_out():
    rows = random_rows(6)
    recipe = recipe_of(data={"micro_batch": 4}, evaluate={"every_steps": 5, "records": 6}, stop={"max_steps": 5})
    wanted = train(recipe, rows, validation=(Words(rows.rows), np.arange(6)))[2].best.loss_nats
    failing = Fresh(rows.rows, lambda batch, place: len(batch) > 1 and place == "forward")
    assert train(recipe, rows, validation=(failing, np.arange(6)))[2].best.loss_nats == pytest.approx(wanted, abs=1e-6)


def test_dropout_is_drawn_alike_when_a_window_is_begun_anew():
    """The generator stands where it stood: a fault in the last micro-batch of a window leaves the others' draws."""
    recipe = recipe_of(batch={"accumulate": 4}, stop={"max_steps": 3})
    rows, wanted, hooks = random_rows(12).rows, Recorder(), Recorder()
    train(recipe, Words(rows), tiny_model(dropout=0.5), wanted)
    count = 0

    def fails(batch, place):
        nonlocal count
        count += place == "forward"
        return place == "forward" and count == 9

    ladder_of_two = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, micro_batch=1))
    model = tiny_model(dropout=0.5)
    model.supports_gradient_checkpointing, model.is_activation_checkpointing = True, True
    train(ladder_of_two, Fresh(rows, fails), model, hooks)
    assert [event for event, *_ in hooks.events] == ["out_of_memory"] and hooks.losses == wanted.losses


def test_the_trial_leaves_everything_bit_for_bit():
    """Weights, moments, generators and counters; the longest row is what it looks at, twice where windows have more."""
    recipe = recipe_of(data={"micro_batch": 2}, batch={"accumulate": 3}, stop={"max_steps": 4})
    rows = random_rows(9)
    model, opt, state, hooks, _ = train(recipe, rows, tiny_model(dropout=0.5))
    before = (weights_of(model), copy.deepcopy(opt.state_dict()), generators.states(), copy.deepcopy(state))
    chosen = trial.rows_of(recipe, rows)
    longest = max(len(row) for row in rows.rows)
    assert len(chosen) == 4 and len(rows.rows[chosen[0]]) == longest and list(chosen[:2]) == list(chosen[2:])
    trial.run(Gradients(recipe, model, opt, rows, hooks, Ranks()), state, chosen)
    assert all(torch.equal(one, other) for one, other in zip(before[0], weights_of(model), strict=True))
    assert str(before[1]) == str(opt.state_dict()) and before[3] == state
    assert all(torch.equal(one, generators.states()[name]) for name, one in before[2].items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_run_with_a_trial_is_a_run_without_one(monkeypatch: pytest.MonkeyPatch):
    """Moments that are there from the start are those that the first step would have made."""
    recipe = recipe_of(batch={"accumulate": 2}, stop={"max_steps": 6})
    rows, wanted, hooks = random_rows(9).rows, Recorder(), Recorder()
    model, opt, *_ = train(recipe, Words(rows), tiny_model(dropout=0.5), wanted)
    monkeypatch.setattr(trial, "run", lambda *_: None)
    monkeypatch.setattr(loop, "allocate", lambda _: None)
    other, other_opt, *_ = train(recipe, Words(rows), tiny_model(dropout=0.5), hooks)
    assert wanted.losses == hooks.losses
    assert all(torch.equal(a, b) for a, b in zip(weights_of(model), weights_of(other), strict=True))
    assert str(opt.state_dict()["state"]) == str(other_opt.state_dict()["state"])


def test_the_trial_finds_the_rung_before_the_first_step():
    hooks = Recorder()
    recipe = recipe_of(data={"micro_batch": 4}, batch={"accumulate": 2}, stop={"max_steps": 3})
    _, _, state, *_ = train(
        recipe, Fresh(random_rows(12).rows, lambda batch, place: len(batch) > 2 and place == "forward"), hooks=hooks
    )
    assert [(event, step) for event, step, _ in hooks.events] == [("out_of_memory", 0)] and state.rung.micro_batch == 2


class Sick(Words):
    """Words whose loss is not finite for some rows."""

    sick: tuple[int, ...] = ()

    def batch(self, rows):
        batch = super().batch(rows)
        batch.tensors["is_sick"] = torch.tensor(any(row in self.sick for row in rows))
        return batch

    def loss(self, model, tensors):
        return super().loss(model, tensors) * (math.nan if tensors["is_sick"] else 1.0)


def test_a_sick_record_is_named_and_its_step_skipped():
    """Of a window of four micro-batches the one with the record is named; the others' numbers are not blamed."""
    rows = Sick(random_rows(12).rows)
    rows.sick = (7,)
    hooks = Recorder()
    model, _, state, _, reason = train(recipe_of(batch={"accumulate": 4}, stop={"max_steps": 6}), rows, hooks=hooks)
    assert reason == "steps" and state.skipped_steps == 2 and len(hooks.losses) == 4
    assert [values["lines"] for event, _, values in hooks.events if event == "skipped"] == [[8], [8]]
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


def test_too_many_skipped_steps_end_the_run_with_its_records():
    rows = Sick(random_rows(4).rows)
    rows.sick = (0, 1, 2, 3)
    with pytest.raises(RunError, match="5 steps in a row, 5 in all") as caught:
        train(recipe_of(), rows)
    assert caught.value.exit_code == 4 and "lines" in caught.value.where
    every_other = Sick(random_rows(2).rows)
    every_other.sick = (1,)
    with pytest.raises(RunError, match="1 steps in a row, 7 in all"):
        train(recipe_of(stop={"max_steps": 100}), every_other)


def test_float16_overflows_halve_the_scale_and_lose_no_step():
    """At a scale of 2^24 a float16 gradient overflows; the same window is made again until it does not."""
    recipe = recipe_of(stop={"max_steps": 3})
    wanted, hooks = Recorder(), Recorder()
    train(recipe, random_rows(6), tiny_model().half().float(), wanted)
    model = tiny_model().half()
    assert loss_scale.first(model) == 2.0**16 and loss_scale.first(tiny_model()) == 1
    opt = optimizer.build(model.float(), recipe.optimizer)  # steps in float32, passes in float16 below

    class Half(Words):
        def loss(self, model, tensors):
            weights = {name: p.half() for name, p in model.named_parameters()}
            tokens_BT = tensors["tokens_BT"]
            logits = torch.func.functional_call(model, weights, (tokens_BT[:, :-1].clamp(min=0),)).float()
            labels = tokens_BT[:, 1:].flatten()
            return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels, reduction="sum")

    from training.engine import budget
    from training.engine.state import TrainState

    state = TrainState(*budget.first_plan(recipe, 6), Rung.of(recipe), loss_scale=2.0**24)
    train(recipe, Half(random_rows(6).rows), model, hooks, state, opt)
    assert state.skipped_steps == 0 and 2 <= state.loss_scale < 2.0**24 and state.steps_at_scale > 0
    assert hooks.losses == pytest.approx(wanted.losses, abs=2e-3)


def test_a_scale_is_doubled_after_many_good_steps():
    _, _, state, *_ = train(recipe_of(stop={"max_steps": 1}), random_rows(3))
    loss_scale.count_step(state)
    assert state.loss_scale == 1
    state.loss_scale = 8.0
    for _ in range(2000):
        loss_scale.count_step(state)
    assert (state.loss_scale, state.steps_at_scale) == (16.0, 0)


def test_a_scale_that_is_at_its_least_doubles_again():
    """Where even the least one overflows it is not the scale's fault; after many good steps it rises as any other."""
    _, _, state, *_ = train(recipe_of(stop={"max_steps": 1}), random_rows(3))
    state.loss_scale = 8.0
    assert [loss_scale.lower(state, 1.0) for _ in range(4)] == [True, True, False, False]
    least = state.loss_scale
    for _ in range(2000):
        loss_scale.count_step(state)
    assert state.loss_scale == 2 * least


def test_what_is_no_lack_of_memory():
    assert ladder.is_out_of_memory(RuntimeError("[enforce fail at alloc_cpu.cpp] can't allocate memory: you tried"))
    assert not ladder.is_out_of_memory(RuntimeError("size mismatch"))


def test_a_compiler_that_is_not_there_is_told_and_auto_goes_on(monkeypatch: pytest.MonkeyPatch):
    from torch._inductor.exc import InductorError

    from training.core.errors import MachineError

    calls = []

    def attempt():
        calls.append(1)
        if model._compiled_call_impl is not None:
            raise InductorError(RuntimeError("no working C++ compiler"), None)

    _, _, state, hooks, _ = train(recipe_of(stop={"max_steps": 1}), random_rows(3))
    model = tiny_model()
    state.compiled = None
    compiling.settle(recipe_of(memory={"compile": "auto"}), model, state, attempt, hooks)
    event, _, values = hooks.events[-1]
    assert event == "compile" and not state.compiled and "compiler" in values["error"]
    assert model._compiled_call_impl is None
    state.compiled = None
    with pytest.raises(MachineError, match=r"torch\.compile does not work here"):
        compiling.settle(recipe_of(memory={"compile": True}), model, state, attempt, hooks)
