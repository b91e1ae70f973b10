"""The loop and its parts on a tiny model: exact accumulation, order, resume, patience, budgets."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from training.core.errors import RunError
from training.engine import budget, loop, optimizer
from training.engine.hooks import Hooks
from training.engine.ladder import Rung
from training.engine.order import Windows
from training.engine.parallel import Ranks
from training.engine.schedule import Plan
from training.engine.state import TrainState
from training.engine.stop import BestSoFar
from training.engine.window import Gradients
from training.objectives.contract import Batch, Score
from training.recipe.load import Resolved

VOCAB = 11


class Words:
    """An objective over fixed rows of unequal length: the loss of predicting the next token of a row."""

    def __init__(self, rows: list[list[int]]):
        self.rows, self.num_rows = rows, len(rows)
        self.lengths = np.array([len(row) for row in rows])
        self.seen: list[int] = []

    def batch(self, rows: np.ndarray) -> Batch:
        width = max(len(self.rows[row]) for row in rows)
        padded = [self.rows[row] + [-100] * (width - len(self.rows[row])) for row in rows]
        self.seen += [int(row) for row in rows]
        num_tokens = sum(len(self.rows[row]) - 1 for row in rows)
        return Batch({"tokens_BT": torch.tensor(padded)}, num_tokens, num_tokens)

    def lines(self, rows: np.ndarray) -> list[int]:
        return sorted(int(row) + 1 for row in rows)

    def loss(self, model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        tokens_BT = tensors["tokens_BT"]
        labels_BT = tokens_BT[:, 1:]
        logits_BTV = model(tokens_BT[:, :-1].clamp(min=0))
        return torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten(), reduction="sum")


def tiny_model(dropout: float = 0.0) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Embedding(VOCAB, 8), torch.nn.Dropout(dropout), torch.nn.Linear(8, VOCAB))


def recipe_of(**sections: dict):
    values = {
        "name": "t", "method": "pretrain",
        "model": {"arch": {
            "family": "llama", "vocab_size": VOCAB, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
            "num_attention_heads": 1, "num_key_value_heads": 1, "max_position_embeddings": 64,
        }},
        "tokenizer": {"path": "t"},
        "data": {"dataset": "t", "seq_len": 8, "micro_batch": 1, "packing": True},
        "memory": {"weights": "fp32", "gradient_checkpointing": False},
        "optimizer": {"lr": 1e-2}, "schedule": {"kind": "constant", "warmup": "0 steps"}, "batch": {"accumulate": 1},
        "stop": {"max_steps": 30}, "evaluate": {"every_steps": None},
    }  # fmt: skip
    for name, section in sections.items():
        values[name] = values.get(name, {}) | section
    return Resolved.from_values(values).recipe


class Recorder(Hooks):
    """Keeps what the loop says; can ask it to stop after a step."""

    def __init__(self, stop_after: int | None = None):
        self.stop_after, self.losses, self.rates, self.validations = stop_after, [], [], []
        self.saved, self.events, self.step, self.rows = [], [], 0, None

    def on_step(self, state, result) -> None:
        self.losses.append(result.score.loss_nats)
        self.rates.append(result.rate)
        self.step = state.step

    def on_validation(self, state, score, is_best) -> None:
        self.validations.append((state.step, is_best))

    def on_event(self, event, state, **values) -> None:
        if event == "trial":  # what it has looked at is not trained
            self.rows.seen.clear()
            return
        self.events.append((event, state.step, values))

    def save(self, state) -> None:
        self.saved.append(state.step)

    def stop_requested(self) -> str | None:
        return "pause" if self.step == self.stop_after else None


def train(recipe, rows: Words, model=None, hooks=None, state=None, opt=None, validation=None):
    model = model or tiny_model()
    opt = opt or optimizer.build(model, recipe.optimizer)
    state = state or TrainState(*budget.first_plan(recipe, rows.num_rows), Rung.of(recipe))
    hooks = hooks or Recorder()
    hooks.rows = rows
    reason = loop.Loop(recipe, model, opt, rows, validation, hooks).run(state)
    return model, opt, state, hooks, reason


def random_rows(count: int) -> Words:
    generator = np.random.default_rng(5)
    return Words([generator.integers(0, VOCAB, size=int(generator.integers(2, 9))).tolist() for _ in range(count)])


def test_the_learning_rate_law_of_the_trial():
    """B05: law cos10/100."""
    plan = Plan("cosine", 1e-3, 10, 100, 0.0)
    wanted = {5: 5e-4, 10: 1e-3, 50: 5.868241e-4, 55: 5e-4}
    for step, rate in wanted.items():
        assert plan.rate(step) == pytest.approx(rate, rel=1e-6)
    assert plan.rate(100) == pytest.approx(0, abs=1e-12)
    assert Plan("cosine", 1e-3, 0, 100, 0.1).rate(100) == pytest.approx(1e-4)
    assert Plan("linear", 1e-3, 0, 100, 0.0).rate(25) == pytest.approx(7.5e-4)


def test_accumulation_weighs_tokens_and_not_batches():
    """B16: one token of loss 4 and three of loss 1 make 1.75, and the gradient of the batch of both rows."""

    class Forced(Words):
        def loss(self, model, tensors):
            num_tokens = int((tensors["tokens_BT"][:, 1:] != -100).sum())
            wanted = 4.0 if num_tokens == 1 else 1.0
            return super().loss(model, tensors) * 0 + wanted * num_tokens + model[2].bias.sum() * 0

    hooks = Recorder()
    recipe = recipe_of(batch={"accumulate": 2}, stop={"max_steps": 1})
    train(recipe, Forced([[1, 2], [3, 4, 5, 6]]), hooks=hooks)
    assert hooks.losses == [1.75]


@pytest.mark.parametrize(("micro_batch", "accumulate"), [(1, 4), (2, 2), (4, 1)])
def test_any_split_into_micro_batches_gives_one_gradient(micro_batch: int, accumulate: int):
    rows = random_rows(4)
    recipe = recipe_of(data={"micro_batch": micro_batch}, batch={"accumulate": accumulate}, stop={"max_steps": 1})
    model, *_ = train(recipe, rows)
    whole, *_ = train(recipe_of(data={"micro_batch": 4}, stop={"max_steps": 1}), random_rows(4))
    for mine, other in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.allclose(mine, other, atol=1e-6)


def test_the_last_window_of_an_epoch_is_stepped_with_its_true_size():
    """B17: 7 micro-batches with accumulation 4 over 2 epochs are 4 steps, of 4, 3, 4 and 3."""
    rows = random_rows(7)
    recipe = recipe_of(batch={"accumulate": 4}, stop={"max_steps": None, "max_epochs": 2})
    _, _, state, _, reason = train(recipe, rows)
    assert (state.step, reason, len(rows.seen)) == (4, "epochs", 14)
    assert sorted(rows.seen[:7]) == sorted(rows.seen[7:]) == list(range(7))
    short = train(recipe_of(batch={"accumulate": 4}, stop={"max_steps": None, "max_epochs": 1}), random_rows(3))
    assert short[2].step == 1


def test_the_gradient_of_a_short_window_is_that_of_one_batch_of_its_rows():
    """B17: three rows of unequal length where four make a window: their sum by their own number of tokens."""
    recipe, rows = recipe_of(batch={"accumulate": 4}), random_rows(3)
    assert len(set(rows.lengths)) > 1
    model = tiny_model()
    opt, state = optimizer.build(model, recipe.optimizer), TrainState(*budget.first_plan(recipe, 3), Rung.of(recipe))
    sums = Gradients(recipe_of(optimizer={"grad_clip": 0}), model, opt, rows, Recorder(), Ranks()).of(
        state, Windows(recipe, rows).next(state)
    )
    other, whole = tiny_model(), rows.batch(np.arange(3))
    nats = rows.loss(other, whole.tensors) / whole.num_tokens
    nats.backward()
    assert sums.num_tokens == whole.num_tokens and sums.nats / sums.num_tokens == pytest.approx(nats.item(), abs=1e-6)
    for mine, wanted in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.allclose(mine.grad, wanted.grad, atol=1e-6) and wanted.grad.abs().max() > 1e-3


def test_a_resume_goes_on_where_the_order_was():
    """B01: 10 records, stopped at 14 of 30, in another process's objects."""
    recipe = recipe_of()
    unbroken = random_rows(10)
    _, _, _, hooks, _ = train(recipe, unbroken)
    first, second = random_rows(10), random_rows(10)
    model, opt, state, before, reason = train(recipe, first, hooks=Recorder(stop_after=14))
    assert (reason, before.saved[-1]) == ("paused", 14)
    _, _, _, after, _ = train(recipe, second, model, Recorder(), state, opt)
    assert first.seen + second.seen == unbroken.seen
    assert before.losses + after.losses == hooks.losses
    epochs = [tuple(unbroken.seen[start : start + 10]) for start in (0, 10, 20)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs) and len(set(epochs)) == 3


def test_patience_lies_in_the_state():
    """B08: the third validation without gain ends the run, restarts between them or not."""
    best = BestSoFar()
    for step, loss in enumerate([1.0, 0.9, 0.95, 0.96]):
        best.observe(loss, step)
    best = BestSoFar(**dataclasses.asdict(best))
    best.observe(0.97, 4)
    assert best.validations_without_gain == 3 and best.loss_nats == 0.9
    other, counts = BestSoFar(), []
    for step, loss in enumerate([1.0, 1.1, 1.1, 0.9, 1.0, 1.0, 1.0]):
        other.observe(loss, step)
        counts.append(other.validations_without_gain)
    assert counts == [0, 1, 2, 0, 1, 2, 3] and other.loss_nats == 0.9


def test_patience_ends_a_run_that_gets_no_better():
    recipe = recipe_of(
        optimizer={"lr": 1e-30}, evaluate={"every_steps": 1, "records": 2}, stop={"max_steps": 30, "patience": 3}
    )
    rows = random_rows(10)
    _, _, state, hooks, reason = train(recipe, rows, validation=(random_rows(3), np.arange(3)))
    assert (reason, state.step) == ("patience", 3)
    assert hooks.validations == [(0, True), (1, False), (2, False), (3, False)]


def test_a_finished_state_makes_no_step():
    recipe = recipe_of(stop={"max_steps": 3})
    rows = random_rows(4)
    model, opt, state, _, _ = train(recipe, rows)
    again = Recorder()
    assert train(recipe, rows, model, again, state, opt)[4] == "steps" and again.losses == []


def test_a_loss_that_is_not_finite_is_skipped_and_counted_and_too_many_end_the_run():
    class Sick(Words):
        def loss(self, model, tensors):
            return super().loss(model, tensors) * (math.nan if self.sick else 1.0)

    rows = Sick(random_rows(4).rows)
    rows.sick = True
    model = tiny_model()
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(RunError, match="not finite"):
        train(recipe_of(), rows, model)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def rows_of_a_second_each(monkeypatch: pytest.MonkeyPatch) -> Words:
    """Ten rows whose every batch takes one second by the loop's clock, which stands still otherwise."""
    now = [0.0]
    monkeypatch.setattr(loop.time, "monotonic", lambda: now[0])
    rows = random_rows(10)
    slow = rows.loss

    def one_second(model, batch):
        now[0] += 1.0
        return slow(model, batch)

    rows.loss = one_second
    return rows


def test_hours_become_a_shorter_plan_and_the_clock_has_the_last_word(monkeypatch: pytest.MonkeyPatch):
    """A budget of 60 s at one second a step: the trial takes the first, the plan ends at step 59, by an event."""
    rows = rows_of_a_second_each(monkeypatch)
    recipe = recipe_of(
        stop={"max_steps": 1000, "max_hours": 60 / 3600}, schedule={"kind": "cosine", "min_lr_ratio": 0.1}
    )
    _, _, state, hooks, reason = train(recipe, rows)
    assert reason == "hours" and state.step == 59
    assert [event for event, *_ in hooks.events] == ["plan"]
    assert hooks.rates[-1] == pytest.approx(1e-3) and hooks.rates[0] > 9e-3


def test_a_budget_in_hours_alone_is_planned_once_the_speed_is_known(monkeypatch: pytest.MonkeyPatch):
    """A warm-up of 10 % is 6 of the 59 steps that the clock allows, and not a share of a number nobody set."""
    rows = rows_of_a_second_each(monkeypatch)
    limits = {"max_steps": None, "max_hours": 60 / 3600}
    _, _, state, hooks, reason = train(recipe_of(stop=limits, schedule={"kind": "cosine", "warmup": "10%"}), rows)
    assert (reason, state.step, state.plan.warmup_steps, state.plan.total_steps) == ("hours", 59, 6, 59)
    assert hooks.rates[9] > 0 and max(hooks.rates) > 9e-3


def test_the_score_of_the_trial_batches():
    """B81: 8 tokens of sum 16 and 2 tokens of sum 10 are 2.6 a token."""
    assert Score(26.0, 10, 1).loss_nats == pytest.approx(2.6)


def test_a_clip_of_zero_clips_nothing():
    free, *_ = train(recipe_of(optimizer={"grad_clip": 0}, stop={"max_steps": 3}), random_rows(4))
    wide, *_ = train(recipe_of(optimizer={"grad_clip": 1e9}, stop={"max_steps": 3}), random_rows(4))
    assert all(torch.equal(a, b) for a, b in zip(free.parameters(), wide.parameters(), strict=True))
    assert not torch.equal(free[0].weight, tiny_model()[0].weight)
