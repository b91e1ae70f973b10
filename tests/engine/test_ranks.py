"""Several processes that train one run together, over gloo: the same losses, the same checkpoints, one decision."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from tests.engine.nursery import Nursery
from tests.engine.test_resume import same
from tests.engine.test_run import losses, start_child, wait_for_step
from tests.objectives.test_added_rows import extend
from tests.objectives.tiny import make_world
from training.calculator import devices
from training.calculator.devices import Device
from training.cli import main
from training.core import files, paths
from training.recipe import bases
from training.runs.events import read_events
from training.runs.folder import RunFolder, all_runs

WINDOWS = ("data.micro_batch=2", "batch.accumulate=3", "stop.max_steps=12", "evaluate.every_steps=5",
           "evaluate.records=5", "checkpoint.every_steps=5")  # fmt: skip
"""Windows of three micro-batches, a shorter one at each epoch's end, and five rows to validate: nothing is even."""
TWO = ("--ranks", "2")
SHARDED = ("--ranks", "2", "--parallel", "fsdp2")
BOTH = pytest.mark.parametrize("together", [TWO, SHARDED], ids=["ddp", "fsdp2"])
STOPPED = """
from training.engine.trainer import Trainer
from training.runs.events import read_events
Trainer.stop_requested = lambda self: "pause" if len(list(read_events(self.folder.path, "step"))) >= {step} else None
"""


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery() as started:
        yield started


def train(nursery: Nursery, recipe: Path, *arguments: str, before: str = "") -> RunFolder:
    """Train to the end; returns the run."""
    assert nursery.run("train", "--config", str(recipe), *arguments, before=before) == 0
    return all_runs()[0]


def tensors(run: RunFolder) -> dict:
    """The last checkpoint's weights and moments."""
    folder = run.step_folder(run.steps()[-1])
    weights = next(path for path in folder.glob("*.safetensors"))
    return load_file(weights) | load_file(folder / "state" / "optimizer.safetensors")


def alike(one: RunFolder, other: RunFolder) -> None:
    """Losses, norms, rates and validations to 1e-5, and weights and moments as near as rounding lets them be."""
    for kind in ("step", "validation"):
        mine, theirs = (list(read_events(run.path, kind)) for run in (one, other))
        assert len(mine) == len(theirs) > 0
        for seen, wanted in zip(mine, theirs, strict=True):
            differs = {"time", "event", "memory/peak_bytes", "speed/tokens_per_second"}
            names = {name for name, value in wanted.items() if value is not None} - differs
            assert names == {name for name, value in seen.items() if value is not None} - differs
            for name in names:
                assert seen[name] == pytest.approx(wanted[name], abs=1e-5, rel=1e-5), (kind, wanted["step"], name)
    mine, theirs = tensors(one), tensors(other)
    assert mine.keys() == theirs.keys()
    for name, wanted in theirs.items():
        assert mine[name].shape == wanted.shape and mine[name].dtype == wanted.dtype
        assert mine[name].sub(wanted).abs().max() <= 2e-4, name  # Adam's step lifts rounding where a gradient is near 0


def bases_here() -> str:
    """What lets a command of the nursery's find the bases of the test."""
    return f"from pathlib import Path; from training.recipe import bases; bases.FILE = Path({str(bases.FILE)!r})"


@BOTH
def test_two_processes_pretrain_as_one_does(recipe: Path, nursery: Nursery, together: tuple[str, ...]):
    alone = train(nursery, recipe, *WINDOWS)
    run = train(nursery, recipe, *WINDOWS, *together)
    alike(run, alone)
    summary = run.summary()
    assert summary["processes"] == 2 and alone.summary()["processes"] == 1
    assert files.verify_manifest(run.step_folder(12), "checkpoint")["weights_sha256"]


def test_three_processes_of_which_some_have_nothing_to_do(recipe: Path, nursery: Nursery):
    windows = [value.replace("accumulate=3", "accumulate=4") for value in WINDOWS]
    alone = train(nursery, recipe, *windows)
    alike(train(nursery, recipe, *windows, "--ranks", "3"), alone)
    alike(train(nursery, recipe, *windows, "--ranks", "3", "--parallel", "fsdp2"), alone)


@BOTH
def test_two_processes_tune_a_base_as_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nursery: Nursery, together: tuple[str, ...]
):
    """Adapters beside a base that no process trains, and every weight of it with checkpointed layers."""
    world = make_world(tmp_path, monkeypatch)
    both = {
        "lora": ("lora.dropout=0", "memory.loss_chunk=8"),
        "full": ("memory.gradient_checkpointing=true", "memory.loss_chunk=8"),
    }
    for method, more in both.items():
        arguments = (nursery, world / f"{method}.yaml", "batch.accumulate=3", *more)
        alike(train(*arguments, *together, before=bases_here()), train(*arguments, before=bases_here()))


def test_two_processes_share_a_window_beside_a_base_in_4_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nursery: Nursery
):
    """QLoRA, each with the whole base: `fsdp2` refuses it."""
    arguments = (nursery, make_world(tmp_path, monkeypatch) / "qlora.yaml", "batch.accumulate=3", "lora.dropout=0")
    run = train(*arguments, *TWO, before=bases_here())
    alike(run, train(*arguments, before=bases_here()))
    assert run.summary()["processes"] == 2 and run.summary()["quantization"] == "nf4"


@pytest.mark.slow
def test_two_compiled_processes_train_as_a_plain_one_does(recipe: Path, nursery: Nursery):
    alike(train(nursery, recipe, *WINDOWS, "memory.compile=true", *TWO), train(nursery, recipe, *WINDOWS))


def test_rows_of_added_tokens_are_kept_from_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nursery: Nursery):
    """They belong to the root, and to the head with it, which is tied."""
    world = make_world(tmp_path, monkeypatch)
    extend()
    arguments = (nursery, world / "lora.yaml", "tokenizer.path=more", "lora.dropout=0", "checkpoint.initial=true")
    run = train(*arguments, *SHARDED, before=bases_here())
    alike(run, train(*arguments, before=bases_here()))
    name = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
    first, last = (load_file(run.step_folder(step) / "adapter_model.safetensors")[name] for step in (0, 8))
    assert not first.equal(last)


def test_one_process_at_a_time_has_the_whole_model_in_memory(recipe: Path, nursery: Nursery, tmp_path: Path):
    """From its first weight to the last shard; a second one would find the first one's mark."""
    marked = f"""
import os, time
from training.engine import sharding
from training.objectives import architecture
whole, shard, mark = architecture.random, sharding.shard, {str(tmp_path / "whole")!r}
def build(*given):
    os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
    time.sleep(0.5)
    return whole(*given)
def parted(*given):
    root = shard(*given)
    os.unlink(mark)
    return root
architecture.random, sharding.shard = build, parted
"""
    assert train(nursery, recipe, *WINDOWS, *SHARDED, before=marked).status() == "completed"


def test_a_checkpoint_moves_between_one_process_and_several(recipe: Path, nursery: Nursery):
    """One writes, two go on; then in shards; then one again."""
    alone = train(nursery, recipe, *WINDOWS)
    arguments = ("train", "--config", str(recipe), *WINDOWS)
    assert nursery.run(*arguments, before=STOPPED.format(step=3)) == 130
    run = all_runs()[0]
    assert nursery.run("resume", run.id, *TWO, before=STOPPED.format(step=6)) == 130
    assert run.record()["parallel"] == {"kind": "ddp", "ranks": 2} and run.steps()[-1] == 6
    assert nursery.run("resume", run.id, *SHARDED, before=STOPPED.format(step=9)) == 130
    assert run.record()["parallel"] == {"kind": "fsdp2", "ranks": 2} and run.steps()[-1] == 9
    assert nursery.run("resume", run.id, "--ranks", "1") == 0 and run.record()["parallel"] is None
    alike(run, alone)


@BOTH
def test_as_many_processes_go_on_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nursery: Nursery, together: tuple[str, ...]
):
    """Dropout included: each process's draws go on where they were. Without a word, as many as before go on."""
    world = make_world(tmp_path, monkeypatch)
    recipe, overrides = world / "lora.yaml", ("lora.dropout=0.5", "evaluate.every_steps=5")
    wanted = train(nursery, recipe, *overrides, *together, before=bases_here())
    stopped = f"{bases_here()}\n{STOPPED.format(step=5)}"
    assert nursery.run("train", "--config", str(recipe), *overrides, *together, before=stopped) == 130
    run = all_runs()[0]
    assert nursery.run("resume", run.id, before=bases_here()) == 0
    same(run, wanted)


@BOTH
def test_a_signal_to_the_first_process_saves_what_all_have_trained(
    recipe: Path, nursery: Nursery, together: tuple[str, ...]
):
    endless = [value.replace("max_steps=12", "max_steps=100000") for value in WINDOWS]
    process = nursery.start("train", "--config", str(recipe), *endless, *together)
    run = wait_for_step(2)
    os.kill(process, signal.SIGTERM)
    assert nursery.code() == 130 and run.status() == "paused"
    assert run.steps()[-1] == max(losses(run))


@BOTH
def test_the_first_process_has_the_clock(recipe: Path, nursery: Nursery, together: tuple[str, ...]):
    """Minutes to validate and save, and hours to end: the others' clocks, an hour fast, change nothing."""
    fast = """
import os, time
plain = time.monotonic
time.monotonic = lambda: plain() * (1 + 600 * (os.environ.get("RANK") == "1"))
"""
    values = (
        "stop.max_steps=100000", "stop.max_hours=0.002", "evaluate.every_steps=null", "evaluate.every_minutes=0.02",
        "checkpoint.every_steps=null", "checkpoint.every_minutes=0.03",
    )  # fmt: skip
    run = train(nursery, recipe, *values, *together, before=fast)
    summary = run.summary()
    assert summary["stop_reason"] == "hours" and 2 <= summary["trained_seconds"] <= 60
    assert len(list(read_events(run.path, "validation"))) > 2 and list(read_events(run.path, "plan"))


SICK = """
import os, torch
from training.objectives.stream import StreamRows
plain = StreamRows.loss
def loss(self, model, tensors):
    nats = plain(self, model, tensors)
    self.num_passes = getattr(self, "num_passes", 0) + torch.is_grad_enabled()
    hit = os.environ.get("RANK") == "1" and self.num_passes in {passes}
    {what}
    return nats
StreamRows.loss = loss
"""


@BOTH
def test_a_loss_that_is_not_finite_in_one_process_skips_the_step_in_all(
    recipe: Path, nursery: Nursery, together: tuple[str, ...]
):
    sick = SICK.format(passes="(5,)", what="nats = nats * float('nan') if hit else nats")
    run = train(nursery, recipe, *WINDOWS, *together, before=sick)
    (event,) = read_events(run.path, "skipped")
    assert len(losses(run)) == 11 and 0 < len(event["lines"]) < 51 and event["loss"] == "nan"
    assert run.summary()["skipped_steps"] == 1


def test_memory_that_runs_out_in_one_process_lowers_the_micro_batch_of_all(recipe: Path, nursery: Nursery):
    alone = train(nursery, recipe, *WINDOWS)
    out = SICK.format(passes="(4, 5)", what='if hit: raise MemoryError("can\'t allocate memory")')
    run = train(nursery, recipe, *WINDOWS, *TWO, before=out)
    alike(run, alone)
    assert [one["micro_batch"] for one in read_events(run.path, "out_of_memory")] == [1, 1]
    assert run.summary()["micro_batch"] == 1


def test_memory_that_runs_out_between_shards_ends_the_run_with_a_way_out(recipe: Path, nursery: Nursery):
    """The others wait in the middle of a pass for a block that does not come."""
    out = SICK.format(passes="(5,)", what='if hit: raise MemoryError("can\'t allocate memory")').replace('"1"', '"0"')
    assert nursery.run("train", "--config", str(recipe), *WINDOWS, *SHARDED, before=out) == 4
    (run,) = all_runs()
    assert "out of memory while other processes wait" in run.record()["error"] and run.status() == "failed"
    assert "ARGS=memory.gradient_checkpointing=true" in run.record()["error"] and run.steps() == [0]


def test_a_record_that_is_too_much_for_one_process_is_left_out_by_all(recipe: Path, nursery: Nursery):
    out = SICK.format(passes="range(4, 9)", what='if hit: raise MemoryError("can\'t allocate memory")')
    run = train(nursery, recipe, *WINDOWS, "memory.gradient_checkpointing=true", *TWO, before=out)
    skipped = run.summary()["skipped_records"]
    assert skipped and skipped == sum(len(one["lines"]) for one in read_events(run.path, "record_skipped"))


# ---- what is refused


def refused(capsys: pytest.CaptureFixture, recipe: Path, *arguments: str, code: int = 2) -> str:
    """What is said of a command that is refused with this exit code and leaves no run."""
    assert main(["train", "--config", str(recipe), *arguments]) == code and not all_runs()
    return capsys.readouterr().err


def test_more_processes_than_micro_batches(recipe: Path, capsys: pytest.CaptureFixture):
    said = refused(capsys, recipe, "--ranks", "3")
    assert "more processes than micro-batches" in said and "batch.accumulate=3" in said


def test_more_processes_than_gpus(recipe: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    card = Device("a card", "cuda", 8 << 30, 0)
    monkeypatch.setattr(devices, "gpus", lambda: (card,))
    said = refused(capsys, recipe, *TWO, code=3)
    assert "more processes than GPUs" in said and said.rstrip().splitlines()[-2].endswith("--ranks 1")


def test_what_shards_cannot_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    world = make_world(tmp_path, monkeypatch)
    capsys.readouterr()
    said = refused(capsys, world / "qlora.yaml", *SHARDED)
    assert "weights in 4 bits are not sharded" in said and "--parallel ddp" in said
    said = refused(capsys, world / "full.yaml", "optimizer.name=adamw8bit", "memory.compile=auto", *SHARDED)
    assert "states in 8 bits are not sharded" in said and "memory.compile=false" in said


def test_one_process_is_not_parallel_and_none_is_none(recipe: Path, capsys: pytest.CaptureFixture):
    assert "one rank is not parallel" in refused(capsys, recipe, "--parallel", "fsdp2")
    assert "no rank at all" in refused(capsys, recipe, "--ranks", "0")


def test_processes_share_the_memory_of_a_machine(recipe: Path, capsys: pytest.CaptureFixture, monkeypatch):
    """What fits once does not fit twice."""
    machine = Device("this machine's memory", "cpu", 900 << 20, 0)
    monkeypatch.setattr(devices, "this_machine", lambda: machine)
    said = refused(capsys, recipe, *TWO, code=4)
    assert "does not fit" in said and "a share of this machine's memory, for one of 2" in said


# ---- who starts them


@pytest.mark.slow
def test_torchrun_starts_them_too(recipe: Path, nursery: Nursery):
    """Each process is the command; the first one makes the run, or finds it, and the other follows it."""
    alone = train(nursery, recipe, *WINDOWS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "training"]
    command += ["train", "--config", str(recipe), *WINDOWS]

    def torchrun(*more: str) -> subprocess.CompletedProcess:
        environment, both = os.environ | {"OMP_NUM_THREADS": "1"}, [*command, *more]
        return subprocess.run(both, cwd=paths.REPOSITORY, env=environment, capture_output=True, text=True, timeout=300)

    done = torchrun()
    assert done.returncode == 0, done.stderr
    run = all_runs()[0]
    assert len(all_runs()) == 2 and run.id != alone.id and f"followed  {run.id}" in done.stderr
    assert run.record()["parallel"] == {"kind": "ddp", "ranks": 2} and run.status() == "completed"
    alike(run, alone)
    again = torchrun("--reuse")
    assert again.returncode == 0 and f"followed  {run.id}" in again.stderr and len(all_runs()) == 2, again.stderr


@pytest.mark.slow
@BOTH
def test_a_process_that_is_killed_ends_all_and_the_run_goes_on(
    recipe: Path, nursery: Nursery, together: tuple[str, ...]
):
    """The supervisor's own processes, one of them killed in the middle of a step."""
    overrides = [value.replace("max_steps=12", "max_steps=60") for value in WINDOWS]
    alone = train(nursery, recipe, *overrides)
    child = start_child(recipe, *overrides, *together, stderr=subprocess.PIPE)
    run = wait_for_step(7, known=1, seconds=240)
    _, second = sorted(pid for pid in children_of(child.pid) if is_engine(pid))
    os.kill(second, signal.SIGKILL)
    said = child.communicate(timeout=120)[1].decode()
    assert child.returncode == 4 and "process 1 of 2" in said and f"make resume RUN={run.id}" in said
    assert run.status() == "failed" and run.worker() is None
    assert nursery.run("resume", run.id) == 0
    seen = {event["step"]: event["train/loss_nats"] for event in read_events(run.path, "step")}
    assert seen == pytest.approx(losses(alone), abs=1e-5)


def children_of(parent: int) -> list[int]:
    return [child.pid for child in psutil.Process(parent).children()]


def is_engine(pid: int) -> bool:
    return "training.engine.child" in Path(f"/proc/{pid}/cmdline").read_text()
