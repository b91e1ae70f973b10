"""Whole runs: the folder that a run leaves, resuming bit for bit, and what damage does to it."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.conftest import small_disk
from training.calculator import nvml
from training.cli import main
from training.core import files, paths
from training.core.errors import UserError
from training.engine import checkpoint
from training.engine.pulse import Pulse
from training.engine.trainer import Trainer
from training.objectives.stream import StreamRows
from training.runs.events import read_events
from training.runs.folder import RunFolder, all_runs, resolve_checkpoint


def train(recipe: Path, *overrides: str) -> tuple[int, RunFolder | None]:
    """Train by the command; returns its exit code and the newest run, where there is one."""
    code = main(["train", "--config", str(recipe), *overrides])
    return code, next(iter(all_runs()), None)


def start_child(recipe: Path, *overrides: str, stderr=subprocess.DEVNULL) -> subprocess.Popen:
    """Train in a process of its own, which signals can be sent to."""
    command = [sys.executable, "-m", "training", "train", "--config", str(recipe), *overrides]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=paths.REPOSITORY, env=environment, stderr=stderr, stdout=subprocess.DEVNULL)


def wait_for_step(step: int, known: int = 0, seconds: float = 60.0) -> RunFolder:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for run in all_runs()[: len(all_runs()) - known]:
            if any(event["step"] >= step for event in read_events(run.path, "step")):
                return run
        time.sleep(0.02)
    raise AssertionError(f"no run reached step {step}")


def losses(run: RunFolder) -> dict[int, float]:
    """The loss of each step; where a step was done twice, both must agree."""
    found: dict[int, float] = {}
    for event in read_events(run.path, "step"):
        assert found.setdefault(event["step"], event["train/loss_nats"]) == event["train/loss_nats"]
    return found


def final_weights(run: RunFolder) -> str:
    return files.read_manifest(run.step_folder(run.steps()[-1]), "checkpoint")["weights_sha256"]


def test_a_run_leaves_a_whole_folder(recipe: Path):
    code, run = train(recipe)
    assert code == 0 and run.status() == "completed"
    names = {path.name for path in run.path.iterdir()}
    assert {"recipe.yaml", "run.json", "events.jsonl", "environment.json", "summary.json", "checkpoints"} <= names
    assert run.steps() == [0, 8, 12]
    manifest = files.verify_manifest(run.step_folder(12), "checkpoint")
    assert manifest["dataset"] == run.record()["dataset"] and manifest["tokenizer"]["pre_tokenizer"] == "llama-bpe"
    assert manifest["weights_sha256"] == files.sha256_file(run.step_folder(12) / "model.safetensors")
    assert manifest["recipe_sha256"] == run.record()["recipe_sha256"]
    kinds = {path.suffix for path in run.path.rglob("*") if path.is_file()}
    assert kinds <= {".json", ".jsonl", ".yaml", ".safetensors", ".jinja"}
    summary = json.loads((run.path / "summary.json").read_text())
    assert summary["steps"] == 12 and summary["stop_reason"] == "steps" and summary["device"] == "cpu"
    assert sorted(losses(run)) == list(range(1, 13)) and losses(run)[12] < losses(run)[1]


def test_a_long_validation_and_a_long_save_show_that_they_move(recipe: Path, monkeypatch):
    """D8: the limit is of a batch and of a file, not of the whole; a hang inside one shows still."""
    stages = []
    beat = Pulse.beat

    def seen(self, stage, step):
        stages.append(stage)
        beat(self, stage, step)

    monkeypatch.setattr(Pulse, "beat", seen)
    _, run = train(recipe, "stop.max_steps=4", "evaluate.records=4", "checkpoint.background=false")
    num_validations, num_batches = len(list(read_events(run.path, "validation"))), 4 // 2
    assert num_validations == 2 and stages.count("validation") == num_validations * (1 + num_batches)
    assert run.steps() == [0, 4] and stages.count("saving") == 2 * (1 + 4)


def test_a_run_enters_this_machines_record_of_estimates(recipe: Path, capsys: pytest.CaptureFixture, monkeypatch):
    monkeypatch.setattr(nvml, "ask", lambda: nvml.Answer((), None, "no driver"))
    _, run = train(recipe)
    summary = files.read_json(run.path / "summary.json")
    capsys.readouterr()
    assert main(["memfit", "--config", str(recipe), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    (past,) = document["record"]
    assert past["run"] == run.id and past["peak_bytes"] == summary["peak_bytes"]
    assert past["estimate_bytes"] == document["peak"]["device_bytes"] == summary["estimate_bytes"]
    over = past["estimate_bytes"] / past["peak_bytes"] - 1  # under 0 where the tests' own process is a large one
    assert document["report"]["rows"]["on this machine"] == f"1 run, estimate over peak {over:+.1%}".replace("%", " %")


def test_the_checkpoint_is_what_transformers_loads(recipe: Path):
    from transformers import AutoModelForCausalLM

    _, run = train(recipe, "stop.max_steps=4")
    model = AutoModelForCausalLM.from_pretrained(run.step_folder(4))
    assert type(model).__name__ == "LlamaForCausalLM" and model.config.tie_word_embeddings
    assert model.config.eos_token_id is not None and model.num_parameters() > 12_000


@pytest.mark.slow
def test_an_interrupted_run_goes_on_bit_for_bit(recipe: Path):
    """B01, B04, B05: SIGINT saves and leaves the run paused; the resumed losses are those of the unbroken run."""
    child = start_child(recipe, "stop.max_steps=200", "checkpoint.every_steps=50")
    run = wait_for_step(7)
    child.send_signal(signal.SIGINT)
    assert child.wait(60) == 130 and run.status() == "paused"
    stopped_at = run.steps()[-1]
    assert run.latest().name == f"step_{stopped_at:06d}"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    resume = [sys.executable, "-m", "training", "resume", run.id]
    assert subprocess.run(resume, cwd=paths.REPOSITORY, env=environment, stderr=subprocess.DEVNULL).returncode == 0
    unbroken = start_child(recipe, "stop.max_steps=200", "checkpoint.every_steps=50")
    assert unbroken.wait(120) == 0
    other = next(found for found in all_runs() if found.id != run.id)
    assert losses(run) == losses(other) and final_weights(run) == final_weights(other)
    assert [event["eval/loss_nats"] for event in read_events(run.path, "validation")] == [
        event["eval/loss_nats"] for event in read_events(other.path, "validation")
    ]


def test_a_loss_that_is_not_finite_ends_the_run_with_lines_and_a_way_out(recipe: Path, monkeypatch, capsys):
    """Exit 4, the lines of the split in the message and in the events; the last good checkpoint stays."""
    plain = StreamRows.loss

    def sick(self, model, tensors):
        nats = plain(self, model, tensors)
        return nats * float("nan") if torch.is_grad_enabled() and model.training and step[0] > 6 else nats

    step = [0]
    on_step = Trainer.on_step

    def count(self, state, result):
        step[0] = state.step
        on_step(self, state, result)

    monkeypatch.setattr(StreamRows, "loss", sick)
    monkeypatch.setattr(Trainer, "on_step", count)
    code, run = train(recipe, "stop.max_steps=100")
    told = capsys.readouterr().err
    assert code == 4 and run.status() == "failed" and "5 steps in a row, 5 in all" in told
    monkeypatch.setattr(StreamRows, "loss", plain)
    assert run_advice(told) == 0 and all_runs()[0].status() == "completed"
    assert f"make train CONFIG={paths.for_people(run.path / 'recipe.yaml')} ARGS=optimizer.lr=0.0015" in told
    skipped = list(read_events(run.path, "skipped"))
    assert [event["step"] for event in skipped] == [8, 9, 10, 11, 12] and all(event["lines"] for event in skipped)
    assert f"lines {', '.join(str(line) for line in skipped[-1]['lines'][:8])}" in told
    assert run.latest(checkpoint.STATE_KIND).name == "step_000008"  # a state that was saved though its step was skipped


def test_where_no_row_fits_the_next_command_asks_what_would(recipe: Path, monkeypatch, capsys):
    """A lower learning rate frees no memory; what is advised is run."""
    passes = [0]

    def too_much(self, model, tensors):
        passes[0] += model.training
        if model.training and passes[0] > 12:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return plain(self, model, tensors)

    plain = StreamRows.loss
    monkeypatch.setattr(StreamRows, "loss", too_much)
    code, _ = train(recipe, "stop.max_steps=100")
    told = capsys.readouterr().err
    assert code == 4 and "5 steps in a row" in told and "no row fitted the memory" in told
    assert "optimizer.lr" not in told and "not finite" not in told
    assert run_advice(told) == 0


def run_advice(told: str) -> int:
    """Run the command that an error names as the next one, as a shell and make would; returns its exit code."""
    (line,) = [line for line in told.splitlines() if line.lstrip().startswith("next ")]
    _, target, *pairs = shlex.split(line.split(None, 1)[1])
    given = dict(pair.split("=", 1) for pair in pairs)
    return main([target, "--config", os.path.expandvars(given["CONFIG"]), *shlex.split(given.get("ARGS", ""))])


@pytest.mark.parametrize("damage", ["half", "zero", "folder", "pointer", "state"])
def test_a_damaged_newest_checkpoint_is_passed_over(recipe: Path, damage: str, capsys: pytest.CaptureFixture):
    """B10, B11: the newest complete older one is used, with a warning, and the run still ends as it would have."""
    _, run = train(recipe, "stop.max_steps=8", "checkpoint.keep=5")
    wanted = final_weights(run)
    newest = run.step_folder(8)
    weights = newest / "model.safetensors"
    if damage == "half":
        weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    elif damage == "zero":
        for path in newest.rglob("*"):
            if path.is_file():
                path.write_bytes(b"")
    elif damage == "folder":
        shutil.rmtree(newest)
    elif damage == "pointer":
        (run.checkpoints / "latest.json").write_text("")
    else:
        (newest / "state" / "optimizer.safetensors").write_bytes(b"x")
    run.update(status="lost")
    assert main(["resume", run.id]) == 0
    assert "warning" in capsys.readouterr().err
    assert run.status() == "completed" and final_weights(run) == wanted


def test_the_newest_is_chosen_by_number(recipe: Path):
    """B15: 900 and 1000 and a folder that is no step; the pointer is gone."""
    _, run = train(recipe, "stop.max_steps=4")
    for step in (90, 900, 1000):
        folder = shutil.copytree(run.step_folder(4), run.step_folder(step))
        files.write_json(folder / files.MANIFEST, files.read_json(folder / files.MANIFEST) | {"step": step})
    shutil.copytree(run.step_folder(4), run.checkpoints / "handpicked")
    (run.checkpoints / "latest.json").unlink()
    assert run.latest().name == "step_001000"


def test_a_moved_run_folder_still_works(recipe: Path, tmp_path: Path):
    """B10 (b): nothing in it is absolute."""
    _, run = train(recipe, "stop.max_steps=4")
    moved = tmp_path / "elsewhere"
    shutil.move(run.path, moved)
    assert resolve_checkpoint(str(moved)).parent.parent == moved
    RunFolder(moved).update(status="lost")
    assert main(["resume", str(moved)]) == 0


def test_a_checkpoint_is_named_by_its_run_and_step(recipe: Path):
    _, run = train(recipe, "stop.max_steps=4", "checkpoint.keep=9", "checkpoint.every_steps=2")
    wanted = run.step_folder(2)
    assert resolve_checkpoint(f"{run.id}/{wanted.name}") == resolve_checkpoint(str(run.path / wanted.name)) == wanted
    with pytest.raises(UserError, match="no such checkpoint") as caught:
        resolve_checkpoint(f"{run.id}/step_000003")
    assert wanted.name in caught.value.expected and caught.value.next_command == f"make runs RUN={run.id}"


def test_a_best_that_is_the_untrained_start_is_told(recipe: Path, caplog: pytest.LogCaptureFixture):
    """A run that stopped before its first validation, whose model nobody means by its name."""
    _, run = train(recipe, "stop.max_steps=4", "checkpoint.initial=true")
    run.point("best", 0)
    assert resolve_checkpoint(run.id) == run.step_folder(0)
    assert f"the best checkpoint of run {run.id} is its start; {run.id}/latest is step 4" in caplog.text
    caplog.clear()
    assert resolve_checkpoint(f"{run.id}/best") == run.step_folder(0)
    assert resolve_checkpoint(f"{run.id}/latest") == run.step_folder(4) and not caplog.text


def test_no_checkpoint_at_all_is_an_error_and_not_a_fresh_start(recipe: Path):
    _, run = train(recipe, "stop.max_steps=4")
    shutil.rmtree(run.checkpoints)
    run.update(status="lost")
    assert main(["resume", run.id]) == 5
    with pytest.raises(UserError, match="no complete checkpoint"):
        resolve_checkpoint(run.id)


def test_a_full_disk_during_a_save_keeps_the_last_checkpoint(recipe: Path, own_roots: Path):
    """B13: a real file system with room for some saves and no more."""
    with small_disk(paths.roots().runs, "1500k"):
        code, run = train(recipe, "checkpoint.keep=50", "stop.max_steps=60", "checkpoint.every_steps=2")
        assert code == 3 and run.status() == "failed"
        newest = run.latest(checkpoint.STATE_KIND)
        assert newest is not None and run.pointed("latest") == newest
        assert not list(run.checkpoints.glob(".*"))


def test_lines_in_a_file_are_plain_and_come_at_once(recipe: Path, tmp_path: Path):
    """B76: no carriage return, no escape; each step on a line of its own."""
    log = tmp_path / "log"
    with log.open("wb") as file:
        assert start_child(recipe, stderr=file).wait(60) == 0
    text = log.read_bytes()
    assert b"\r" not in text and b"\x1b" not in text
    lines = [line for line in text.decode().splitlines() if line.startswith("train: ")]
    parts = r"epoch [01]\.\d\d  loss \S+ nats  \S+ bits/byte  lr \S+e-0\d  \S+ tokens/s  \S+ MiB"
    assert len(lines) == 12 and all(re.search(rf" of 12 \(\d+ %\) step  {parts}( |$)", line) for line in lines)
    assert all(line.endswith(" s left") for line in lines[:-1])


def test_the_same_recipe_is_reused_and_another_is_not(recipe: Path):
    _, run = train(recipe)
    assert main(["train", "--config", str(recipe), "--reuse"]) == 0
    assert [found.id for found in all_runs()] == [run.id]
    assert main(["train", "--config", str(recipe), "--reuse", "seeds.train=43"]) == 0
    assert len(all_runs()) == 2


@pytest.mark.slow
def test_a_second_run_waits_and_says_for_whom(recipe: Path, tmp_path: Path):
    first = start_child(recipe, "stop.max_steps=400", "evaluate.every_steps=400", "checkpoint.every_steps=400")
    wait_for_step(1)
    log = tmp_path / "log"
    with log.open("wb") as file:
        second = start_child(recipe, "stop.max_steps=2", stderr=file)
        time.sleep(6)
        assert second.poll() is None or first.poll() is not None
        assert first.wait(120) == 0 and second.wait(120) == 0
    who = rf"waiting for the machine, held by training tiny \(process {first.pid}, .*training train --config .*, for "
    assert re.search(who, log.read_text())


@pytest.mark.parametrize(
    ("overrides", "code", "word"),
    [
        (["model.arch.vocab_size=300"], 2, "more entries than the model has rows"),
        (["data.dataset=nothing"], 2, "no such dataset"),
        (["tokenizer.path=nothing"], 2, "no such tokenizer"),
        (["memory.weights=bf16"], 3, "a CPU trains in fp32 alone"),
    ],
)
def test_bad_settings_are_told_with_their_exit_code(recipe: Path, overrides, code, word, capsys):
    assert main(["train", "--config", str(recipe), *overrides]) == code
    assert word in capsys.readouterr().err


def test_a_changed_recipe_in_the_run_folder_is_refused(recipe: Path):
    _, run = train(recipe, "stop.max_steps=4")
    path = run.path / "recipe.yaml"
    path.write_text(path.read_text().replace("max_steps: 4", "max_steps: 8"))
    run.update(status="paused")
    assert main(["resume", run.id]) == 5


def test_checkpointing_and_chunks_change_memory_and_not_the_losses(recipe: Path):
    _, plain = train(recipe)
    _, other = train(recipe, "memory.gradient_checkpointing=true", "memory.loss_chunk=16")
    pairs = zip(losses(plain).values(), losses(other).values(), strict=True)
    assert all(mine == pytest.approx(theirs, abs=1e-5) for mine, theirs in pairs)


PLANNING_ALONE = (
    "memory.profile=hf", "memory.double_quant=false", "memory.kbit_upcast=true",
    "memory.keep_outputs=true", "memory.autocast=true",
)  # fmt: skip


@pytest.mark.parametrize("override", PLANNING_ALONE, ids=lambda text: text.split("=")[0])
def test_what_the_trainer_does_not_do_is_refused_and_not_passed_over(recipe: Path, override: str, capsys):
    assert main(["train", "--config", str(recipe), override]) == 2
    assert "not be trained by this version" in capsys.readouterr().err and all_runs() == []


@pytest.mark.parametrize(
    ("overrides", "code", "word"),
    [
        (["optimizer.name=paged_adamw8bit"], 3, "paged optimizer states"),
        (["memory.weights=fp16"], 2, "cannot be held in float16"),
    ],
)
def test_what_cannot_be_held_here_is_refused_before_anything_is_loaded(recipe: Path, overrides, code, word, capsys):
    assert main(["train", "--config", str(recipe), *overrides]) == code
    assert word in capsys.readouterr().err and all_runs() == []


@pytest.mark.parametrize("foreign", ["run", "step", "state"])
def test_a_checkpoint_that_is_not_the_runs_own_is_passed_over(recipe: Path, foreign: str, capsys):
    """Its bytes are right and it is not what the run made at that step."""
    _, other = train(recipe, "seeds.train=7", "stop.max_steps=8", "checkpoint.keep=9")
    _, run = train(recipe, "stop.max_steps=8", "checkpoint.keep=9")
    wanted = final_weights(run)
    newest = run.step_folder(8)
    source = {"run": other.step_folder(8), "step": run.step_folder(4), "state": run.step_folder(4) / "state"}[foreign]
    target = newest / "state" if foreign == "state" else newest
    shutil.rmtree(target)
    shutil.copytree(source, target)
    run.update(status="lost")
    assert main(["resume", run.id]) == 0
    assert "passed over" in capsys.readouterr().err and final_weights(run) == wanted


def test_what_does_not_fit_is_refused_before_anything_is_allocated(recipe: Path, capsys: pytest.CaptureFixture):
    big = ("model.arch.hidden_size=131072", "model.arch.intermediate_size=524288", "model.arch.num_hidden_layers=200")
    assert main(["train", "--config", str(recipe), *big]) == 4
    assert "does not fit this machine" in capsys.readouterr().err and all_runs() == []


def test_a_damaged_record_hides_no_other_run(recipe: Path, capsys: pytest.CaptureFixture):
    _, run = train(recipe, "stop.max_steps=2")
    damaged = run.path.with_name("99990101-000000-damaged-0000")
    damaged.mkdir()
    (damaged / "run.json").write_text("")
    assert main(["runs"]) == 0
    text = capsys.readouterr().err
    assert "damaged" in text and run.id in text
    assert main(["train", "--config", str(recipe), "stop.max_steps=2", "--reuse"]) == 0
    assert len(all_runs()) == 2
