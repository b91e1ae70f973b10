"""The self-test and `smoke`: a device that computes otherwise is found out, and what is broken fails."""

import dataclasses
import json
import sys

import pytest
import torch

from training.calculator import nvml
from training.cli import main
from training.core.errors import MachineError, RunError
from training.engine import selftest

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def passed() -> selftest.Pass:
    return selftest.run("lora", CPU)


def test_one_device_gives_one_result_each_time(passed: selftest.Pass):
    again = selftest.run("lora", CPU)
    assert again.loss_nats == passed.loss_nats and torch.equal(again.gradient, passed.gradient)
    assert selftest.compare("lora", again, passed) == {"loss_difference": 0.0, "gradient_difference": 0.0}
    assert passed.loss_nats == pytest.approx(5.95, abs=0.1)  # ln 384, the untrained model's


@pytest.mark.parametrize(
    "wrong",
    [
        lambda one: dataclasses.replace(one, loss_nats=one.loss_nats * 1.001),
        lambda one: dataclasses.replace(one, loss_nats=float("nan")),
        lambda one: dataclasses.replace(one, gradient=one.gradient.roll(1)),
        lambda one: dataclasses.replace(one, gradient=one.gradient * 1.02),
        lambda one: dataclasses.replace(one, gradient=one.gradient / 0),
    ],
)  # fmt: skip
def test_a_device_that_computes_otherwise_is_refused(passed: selftest.Pass, wrong):
    """D9: by the loss, or by the gradient alone."""
    with pytest.raises(MachineError, match="does not compute what the processor does"):
        selftest.compare("lora", wrong(passed), passed)


def test_a_step_that_is_not_finite_is_no_pass(passed: selftest.Pass):
    for broken in (
        dataclasses.replace(passed, loss_nats=float("inf")),
        dataclasses.replace(passed, gradient=passed.gradient * 0),
    ):
        with pytest.raises(RunError, match="does not compute"):
            selftest._require_sound("lora", broken)


def test_smoke_runs_both_methods_on_the_processor(capsys: pytest.CaptureFixture):
    assert main(["smoke", "--cpu", "--json"]) == 0
    steps = json.loads(capsys.readouterr().out)["steps"]
    assert list(steps) == ["lora", "qlora"] and all(step["grad_norm"] > 0 for step in steps.values())
    assert 0 < abs(steps["lora"]["loss_nats"] - steps["qlora"]["loss_nats"]) < 0.05  # 4 bits are not 32


def test_smoke_is_skipped_cleanly_without_a_gpu(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    """T28."""
    monkeypatch.setattr(nvml, "ask", lambda: nvml.Answer((), None, "no driver here"))
    assert main(["smoke"]) == 0
    text = capsys.readouterr().err
    assert "SKIPPED (exit 0)" in text and "skipped  no driver here" in text


def test_smoke_fails_where_something_it_needs_is_broken(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    """T28: the CPU variant does not skip."""
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    assert main(["smoke", "--cpu"]) == 3
    assert "bitsandbytes cannot be used here" in capsys.readouterr().err


def test_a_model_of_ones_own_gives_the_shape(monkeypatch: pytest.MonkeyPatch, tmp_path, capsys):
    """T28: the model is named by the environment; its weights are not read."""
    shape = json.loads(selftest.RECIPE.with_name("selftest_model.json").read_text()) | {"num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(shape | {"vocab_size": 64}))
    monkeypatch.setenv("TRAINYARD_SMOKE_MODEL", str(tmp_path / "config.json"))
    assert main(["smoke", "--cpu", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["steps"]["lora"]["loss_nats"] == pytest.approx(4.16, abs=0.1)  # ln 64
    monkeypatch.setenv("TRAINYARD_SMOKE_MODEL", "no-such-base")
    assert main(["smoke", "--cpu"]) == 2
