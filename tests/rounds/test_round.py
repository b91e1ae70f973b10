"""A round on a tiny base: whole, stopped and gone on with, and with a measurement that fails."""

import argparse
import importlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from tests.objectives.tiny import make_world
from training.core import files, locks, paths
from training.core.errors import MachineError, RunError, UserError
from training.recipe import bases
from training.rounds import round as rounds
from training.rounds import trial
from training.rounds.steps import StepFailed

KEYS = {
    "round", "device", "base", "carriedFrom", "drawSeed", "recipe", "steps", "bestValLoss", "bestAtTurns",
    "turnsTrained", "minutes", "stoppedBecause", "meanLoss", "baseline", "result", "adapter", "beat",
}  # fmt: skip


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict:
    """Steps that answer as the commands do, without running anything; what is put under a name fails or interrupts."""
    state = {"asked": [], "fails": {}}
    run = tmp_path / "data" / "training" / "runs" / "r"

    def answer(title: str, arguments: list[str]) -> tuple[dict, float]:
        state["asked"].append(arguments)
        parser = argparse.ArgumentParser()
        importlib.import_module(f"training.commands.{arguments[0].replace('-', '_')}").add_arguments(parser)
        parser.parse_args(arguments[1:])  # as the command itself reads them; exits where it does not know one
        name = arguments[0] if arguments[0] != "evaluate" else f"evaluate {Path(arguments[1]).name}"
        if name in state["fails"]:
            raise state["fails"].pop(name)
        if arguments[0] == "train":
            return {
                "folder": str(run), "run": "20261130-161009-tuned-8cb9",
                "best_checkpoint": "step_000004", "last_checkpoint": "step_000008",
                "device_name": "cpu", "steps": 8, "best_loss_nats": 1.5, "best_step": 4, "trained_tokens": 99,
                "stop_reason": "hours",
            }, 2.0  # fmt: skip
        if arguments[0] == "export-gguf":
            return {"outputs": [{"manifest": {"name": "tuned", "file": "tuned-Q8_0.gguf"}}]}, 1.0
        return {"records": [{"of": arguments[1], "identities": {}}]}, 1.0

    class Judged:
        is_win, verdict, reasons, comparisons, marked = True, "better", ("exam: better",), (), ()

        def to_json(self) -> dict:
            return {"verdict": self.verdict}

    monkeypatch.setattr(rounds, "run_step", answer)
    monkeypatch.setattr(rounds.datasets, "resolve", lambda name: tmp_path / name / "0123456789ab")
    monkeypatch.setattr(rounds.verdict, "judge", lambda *_, **__: Judged())
    monkeypatch.setattr(rounds.subject, "find", lambda _: None)
    monkeypatch.setattr(rounds.lineage, "curves", lambda _: ())
    monkeypatch.setattr(rounds.lineage, "chain", lambda _: ())
    monkeypatch.setattr(rounds.page, "write", lambda path, _: path.write_text("page"))
    return state


def plan(folder: Path, more: str = "") -> rounds.Plan:
    from training.recipe.load import load

    recipe = folder / "r.yaml"
    recipe.write_text(
        "name: tuned\nmethod: lora\nmodel: {base: smollm2-135m-instruct}\ndata: {dataset: chat, loss_on: assistant}\n"
        "memory: {weights: fp32}\noptimizer: {lr: 1e-3}\nstop: {max_steps: 8}\n" + more
    )
    return rounds.Plan(load(recipe), 0.5, "e.jsonl", "drawn", 9, "Q8_0")


def test_a_round_measures_trains_judges_and_promotes_nothing(steps: dict, tmp_path: Path):
    """R1 to R3, R28: the order, the same papers before and after, every key, and no promotion among the steps."""
    document = rounds.Round(plan(tmp_path)).run()
    names = [arguments[0] for arguments in steps["asked"]]
    assert names == ["evaluate", "train", "evaluate", "export-gguf", "serve-eval", "evaluate"]
    before, after = steps["asked"][0], steps["asked"][2]
    assert before[1] == "smollm2-135m-instruct" and before[2:] == after[2:]
    assert after[-6:] == ["--exam", "e.jsonl", "--guard", "drawn", "--questions", "9"]
    assert "stop.max_hours=0.5" in steps["asked"][1]
    assert '"chat@0123456789ab"' in Path(before[3]).read_text(), "data prepared meanwhile changes nothing"
    assert steps["asked"][3][2:] == ["--name", "tuned-8cb9", "--quant", "Q8_0"], "no other round's file is replaced"
    assert set(document) >= KEYS and document["beat"] is True and document["stoppedBecause"] == "hours"
    [kept] = (tmp_path / "data" / "training" / "rounds").glob("*/round.json")
    assert files.read_json(kept) == document and document["state"] == "completed"
    assert not (paths.roots().models / "champion.gguf").is_symlink()


def test_what_was_carried_on_is_the_baseline(steps: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An adapter that training goes on from, whatever names it, is the run's own start and not the bare base; a round
    that was stopped goes on from the same one, though the latest run is its own by then."""
    latest = iter(["20261129-010203-before-0001", "20261130-161009-tuned-8cb9"])
    monkeypatch.setattr(rounds.adapter_source, "find", lambda _: SimpleNamespace(reference=next(latest)))
    steps["fails"]["train"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        rounds.Round(plan(tmp_path, "lora: {from: latest}\n")).run()
    assert [arguments[0] for arguments in steps["asked"]] == ["train"]
    steps["asked"].clear()
    document = rounds.Round(plan(tmp_path, "lora: {from: latest}\n")).run()
    names = [arguments[0] for arguments in steps["asked"]]
    assert names == ["train", "evaluate", "evaluate", "export-gguf", "serve-eval", "evaluate"]
    assert "checkpoint.initial=true" in steps["asked"][0]
    assert document["carriedFrom"] == "20261129-010203-before-0001" in Path(steps["asked"][0][2]).read_text()
    assert [Path(one[1]).name for one in steps["asked"][1:3]] == ["step_000000", "step_000004"]
    assert document["baseline"]["of"].endswith("step_000000")


@pytest.mark.parametrize("name", ["evaluate smollm2-135m-instruct", "train", "evaluate step_000004", "serve-eval"])
def test_a_stop_at_any_point_leaves_what_was_reached(steps: dict, tmp_path: Path, name: str):
    steps["fails"][name] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        rounds.Round(plan(tmp_path)).run()
    [path] = (tmp_path / "data" / "training" / "rounds").glob("*/round.json")
    stopped = files.read_json(path)
    assert stopped["state"] == "stopped" and stopped["stoppedBecause"] == "interrupted"
    assert (stopped["baseline"] is None) == (name == "evaluate smollm2-135m-instruct")
    assert (stopped["result"] is not None) == (name == "serve-eval")
    again = rounds.Round(plan(tmp_path))
    assert again.is_resumed and again.folder == path.parent
    assert again.run()["state"] == "completed"
    assert not rounds.Round(plan(tmp_path)).is_resumed, "a finished round is not gone on with"


def test_a_measurement_that_crashes_costs_the_measurement(steps: dict, tmp_path: Path):
    """R4: what was trained stays, and the same command measures it."""
    steps["fails"]["evaluate step_000004"] = StepFailed(["evaluate"], -11, {})
    with pytest.raises(StepFailed):
        rounds.Round(plan(tmp_path)).run()
    [path] = (tmp_path / "data" / "training" / "rounds").glob("*/round.json")
    document = files.read_json(path)
    assert document["adapter"].endswith("step_000004") and document["result"] is None
    assert "exit code -11" in document["notes"][0]
    assert rounds.Round(plan(tmp_path)).run()["beat"] is True


def test_a_refused_verdict_costs_the_verdict_alone(steps: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What was trained is exported and tried all the same; the round says why, is no running one, and goes on."""
    judge = rounds.verdict.judge

    def refusing(*_: object, advice) -> None:
        raise UserError(
            "the two were measured under different conditions", found="precision: nf4", next_command=advice("precision")
        )

    monkeypatch.setattr(rounds.verdict, "judge", refusing)
    with pytest.raises(UserError, match="different conditions") as error:
        rounds.Round(plan(tmp_path)).run()
    advice = shlex.split(error.value.next_command)
    assert advice[:2] == ["make", "evaluate"] and advice[2].endswith("step_000004")
    assert advice[3].endswith("--against smollm2-135m-instruct --allow precision"), "a command that knows --allow"
    assert [arguments[0] for arguments in steps["asked"]][-3:] == ["export-gguf", "serve-eval", "evaluate"]
    [path] = (tmp_path / "data" / "training" / "rounds").glob("*/round.json")
    document = files.read_json(path)
    assert (document["state"], document["verdict"], document["beat"]) == ("stopped", None, None)
    assert document["notes"] == ["the two were measured under different conditions: precision: nf4"]
    assert document["model"].endswith("tuned-Q8_0.gguf") and document["served"]
    monkeypatch.setattr(rounds.verdict, "judge", judge)
    again = rounds.Round(plan(tmp_path))
    assert again.is_resumed and again.run()["beat"] is True


def test_two_at_once_do_not_work_on_one_round(steps: dict, tmp_path: Path):
    """The same command a second time finds the round that the first one works on, and leaves it alone."""
    first, second = rounds.Round(plan(tmp_path)), rounds.Round(plan(tmp_path))
    assert second.folder == first.folder
    with locks.hold(first.folder / "lock.json", "round"), pytest.raises(MachineError, match="the round is busy"):
        second.run()
    assert steps["asked"] == [] and second.run()["state"] == "completed"


def test_an_export_that_is_refused_is_told_and_the_verdict_stands(steps: dict, tmp_path: Path):
    steps["fails"]["export-gguf"] = StepFailed(["export-gguf"], 2, {"error": {"what": "an adapter"}})
    document = rounds.Round(plan(tmp_path)).run()
    assert document["state"] == "completed" and document["beat"] is True and "an adapter" in document["notes"][0]


def test_a_trial_reports_what_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch):
    """R27: the best first, one precision, and exit 4 where none loads."""
    scores, asked = {"a": 0.25, "b": 0.75}, []

    def answer(_: str, arguments: list[str]) -> tuple[dict, float]:
        asked.append(arguments)
        if arguments[1] not in scores:
            raise StepFailed(arguments, 2, {"error": {"what": "no such run"}})
        score = {"agreement": scores[arguments[1]]}
        identity = {"model": {}, "paper": {"kind": "exam"}, "conditions": {"precision": "fp32"}}
        return {"records": [{"exam": score, "identities": {"exam": identity}}]}, 1.0

    monkeypatch.setattr(trial, "run_step", answer)
    found = trial.run(["a", "gone", "b"], "e.jsonl", None, "fp32")
    assert [one.reference for one in found] == ["b", "a", "gone"] and found[2].why == "no such run"
    assert all(arguments[-2:] == ["--precision", "fp32"] for arguments in asked)
    with pytest.raises(RunError, match="no candidate could be measured"):
        trial.run(["gone"], "e.jsonl", None, "fp32")


SITE = """
import os, pathlib, time
from training.evaluation import kept
from training.recipe import bases
bases.FILE = pathlib.Path({file!r})
if os.environ.get("SLOWLY"):
    add = kept.Partial.add
    kept.Partial.add = lambda self, answer: (add(self, answer), time.sleep(0.5))
"""


@pytest.mark.slow
def test_a_whole_round_survives_kills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The commands themselves on a tiny base: killed while it measures and while it trains, gone on with each time, and
    judged in the end; there is one round, one run, and one paper for both measurements."""
    world = make_world(tmp_path, monkeypatch)
    (world / "site").mkdir()
    (world / "site" / "sitecustomize.py").write_text(SITE.format(file=str(bases.FILE)))
    command = [sys.executable, "-m", "training", "round", "--config", str(world / "lora.yaml"), "--hours", "0.1",
               "--exam", "chat:train", "--questions", "6", "stop.max_steps=60", "optimizer.lr=1e-2",
               "--json"]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": f"{world / 'site'}:{paths.REPOSITORY}"}
    data = paths.roots().data / "training"

    def killed_when(reached: Callable[[], object], **more: str) -> None:
        child = subprocess.Popen(
            command, cwd=world, env=environment | more, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )  # fmt: skip
        while not reached():
            assert child.poll() is None, "the round was over before it could be killed"
            time.sleep(0.005)
        steps = psutil.Process(child.pid).children(recursive=True)
        child.send_signal(signal.SIGKILL)
        child.communicate()
        assert steps and not psutil.wait_procs(steps, timeout=60)[1], "a killed round leaves no step behind"

    killed_when(lambda: list(data.glob("evaluations/*.partial.jsonl")), SLOWLY="1")
    [partial] = data.glob("evaluations/*.partial.jsonl")
    assert partial.read_bytes() and not list(data.glob("runs/*")), "it was the baseline that was cut off"
    killed_when(lambda: list(data.glob("runs/*/checkpoints/step_000004/manifest.json")))
    [run] = data.glob("runs/*")
    assert not (run / "checkpoints" / "step_000060").exists(), "it was training that was cut off"
    [path] = data.glob("rounds/*/round.json")
    assert files.read_json(path)["state"] == "running" and files.read_json(path)["baseline"]
    killed_when(lambda: list(data.glob("evaluations/*.partial.jsonl")), SLOWLY="1")
    assert len([*data.glob("runs/*")]) == 1 and (run / "checkpoints" / "step_000060").exists()

    done = subprocess.run(command, cwd=world, env=environment, capture_output=True)
    document = json.loads(done.stdout)
    assert [path] == [*data.glob("rounds/*/round.json")] and document["state"] == "completed"
    assert document["steps"] == 60 and document["run"] == run.name
    judged = document["verdict"]["verdict"]
    assert done.returncode == (0 if judged == "better" else 4) and document["beat"] == (judged == "better")
    assert document["baseline"]["exam"]["num_questions"] == document["result"]["exam"]["num_questions"] == 6
    assert "</svg>" in (path.parent / "report.html").read_text()


@pytest.mark.slow
def test_a_round_goes_on_from_the_latest_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """By the commands themselves; what was carried is measured as the run's own start, and judged against."""
    world = make_world(tmp_path, monkeypatch)
    (world / "site").mkdir()
    (world / "site" / "sitecustomize.py").write_text(SITE.format(file=str(bases.FILE)))
    environment = os.environ | {"PYTHONPATH": f"{world / 'site'}:{paths.REPOSITORY}"}

    def made(*arguments: str) -> dict:
        command = [sys.executable, "-m", "training", *arguments, "--json"]
        done = subprocess.run(command, cwd=world, env=environment, capture_output=True)
        assert done.returncode in (0, 4), done.stderr[-3000:].decode()
        return json.loads(done.stdout)

    carried = made("train", "--config", str(world / "lora.yaml"), "stop.max_steps=4")
    document = made("round", "--config", str(world / "lora.yaml"), "lora.from=latest", "--hours", "0.1")
    assert (document["carriedFrom"], document["state"]) == (carried["run"], "completed")
    assert document["baseline"]["model"]["label"].endswith("step_000000") and document["baseline"]["model"]["run"]
    assert document["verdict"]["allowed_to_differ"] == [] and document["run"] != carried["run"]
