"""TRL's loop on our rows: the native losses, our run folder, a resume bit for bit; and what is refused, and where."""

import importlib
import importlib.metadata
import importlib.util
import math
import re
import tomllib
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.engine.test_resume import same, stopped_at
from tests.engine.test_run import losses, train
from tests.objectives.tiny import make_world, manifest_of
from training.calculator import devices, fit, history, nvml
from training.calculator.devices import Device
from training.calculator.parallel import Parallel
from training.cli import main
from training.core import files, paths
from training.engine import trainable
from training.engine.trainer import Trainer
from training.recipe.load import load
from training.runs.events import read_events
from training.runs.folder import RunFolder

GPU = Device("NVIDIA GeForce RTX 3080", "cuda", 10 << 30, 0)
SHORT_WINDOWS = ("data.micro_batch=8", "stop.max_steps=null", "stop.max_epochs=2", "checkpoint.keep=9")
"""Windows of 16 of 36 rows: an epoch ends in one of 4, of a single micro-batch."""


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return make_world(tmp_path, monkeypatch)


def events(run: RunFolder, kind: str, *keys: str) -> list[tuple]:
    return [(event["step"], *(event[key] for key in keys)) for event in read_events(run.path, kind)]


# ---- TRL


@pytest.mark.parametrize(
    ("method", "overrides"),
    [
        ("lora", ("lora.dropout=0", *SHORT_WINDOWS)),
        ("lora", ("lora.dropout=0", "memory.gradient_checkpointing=true", "optimizer.grad_clip=0")),
        ("qlora", ("lora.dropout=0", "lora.targets=attention")),
        ("full", ("optimizer.name=adamw8bit", "schedule.warmup=3 steps", *SHORT_WINDOWS)),
    ],
)
def test_trl_has_the_native_losses(world: Path, with_trl, monkeypatch, method: str, overrides: tuple[str, ...]):
    """T10, T11: the same rows, rates, norms and validations, and weights in the same files; nobody is told of it."""
    from trl.trainer import base_trainer

    told = []
    monkeypatch.setattr(base_trainer, "send_telemetry", lambda *args, **given: told.append(args))
    _, own = train(world / f"{method}.yaml", *overrides)
    code, theirs = train(world / f"{method}.yaml", "backend=trl", *overrides)
    assert code == 0 and told == []
    assert losses(theirs) == pytest.approx(losses(own), abs=1e-5)
    steps = [events(run, "step", "train/lr", "train/tokens", "train/bits_per_byte") for run in (own, theirs)]
    assert steps[1] == [pytest.approx(step, abs=1e-5) for step in steps[0]]
    norms = [events(run, "step", "train/grad_norm") for run in (own, theirs)]
    assert norms[1] == [pytest.approx(norm, rel=1e-3) for norm in norms[0]]
    checked = [events(run, "validation", "eval/loss_nats", "best") for run in (own, theirs)]
    assert checked[1] == [pytest.approx(one, abs=1e-5) for one in checked[0]]

    assert own.summary().keys() == theirs.summary().keys()
    differs = {key for key, value in own.summary().items() if theirs.summary()[key] != value}
    assert (own.summary()["backend"], theirs.summary()["backend"]) == ("native", "trl")
    assert differs <= {
        "run", "backend", "compiled", "trained_seconds", "tokens_per_second", "best_loss_nats", "peak_bytes",
        "estimate_bytes",
    }  # fmt: skip
    assert next(read_events(theirs.path, "start"))["trl"] == "1.16.0"
    last = [run.step_folder(run.summary()["steps"]) for run in (own, theirs)]
    files.verify_manifest(last[1], "checkpoint")
    names = [{path.name for path in folder.rglob("*")} for folder in last]
    assert names[0] == names[1] and manifest_of(last[0]).keys() == manifest_of(last[1]).keys()
    weights = [load_file(folder / own.summary()["weights"]) for folder in last]
    assert weights[0].keys() == weights[1].keys()
    assert all(tensor.allclose(weights[1][name], atol=1e-4) for name, tensor in weights[0].items())
    settings = "config.json" if method == "full" else "adapter_config.json"
    assert files.read_json(last[0] / settings) == files.read_json(last[1] / settings)


@pytest.mark.parametrize("method", ["lora", "full"])
def test_trl_goes_on_bit_for_bit(world: Path, with_trl, monkeypatch, method: str):
    """T11: with dropout, from inside an epoch, from its end and from a step right behind it."""
    overrides = ("backend=trl", "evaluate.every_steps=2", *(["lora.dropout=0.5"] if method == "lora" else []))
    overrides += SHORT_WINDOWS
    _, wanted = train(world / f"{method}.yaml", *overrides)
    assert sorted(losses(wanted)) == list(range(1, 7))
    same(stopped_at(world / f"{method}.yaml", [1, 3, 4], monkeypatch, *overrides), wanted)


def test_hours_and_patience_end_a_run_of_trl(world: Path, with_trl):
    overrides = ("backend=trl", "stop.max_steps=null", "stop.max_hours=0.001", "evaluate.every_steps=null")
    code, run = train(world / "lora.yaml", *overrides)
    assert code == 0 and run.summary()["stop_reason"] == "hours" and list(read_events(run.path, "plan"))
    overrides = ("backend=trl", "optimizer.lr=1e-12", "evaluate.every_steps=1", "stop.patience=2")
    code, run = train(world / "lora.yaml", *overrides)
    assert code == 0 and run.summary()["stop_reason"] == "patience" and run.summary()["steps"] == 2


def test_either_backend_goes_on_from_the_others_adapter(world: Path, with_trl):
    """R9: the files are one format; the first validation is the last one of the run that it goes on from."""
    for first, second in (("trl", "native"), ("native", "trl")):
        _, run = train(world / "lora.yaml", f"backend={first}", "lora.rank=3")
        code, later = train(world / "lora.yaml", f"backend={second}", f"lora.from={run.id}", "stop.max_steps=2")
        assert code == 0
        wanted = events(run, "validation", "eval/loss_nats")[-1][1]
        assert events(later, "validation", "eval/loss_nats")[0][1] == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("told", ["not finite", "out of memory"])
def test_what_the_loop_would_get_over_ends_a_run_of_trl(world: Path, with_trl, capsys, monkeypatch, told: str):
    """SFTTrainer has no lower rung and skips no step: exit 4 before the update, and the last checkpoint goes on to the
    losses of a run without it."""
    import trl

    _, wanted = train(world / "lora.yaml", "backend=trl")
    compute = trl.SFTTrainer.compute_loss

    def sick(self, *args, **given):
        if self.state.global_step < 5:
            return compute(self, *args, **given)
        if told == "out of memory":
            raise MemoryError("can't allocate memory")
        return compute(self, *args, **given) * math.inf

    with monkeypatch.context() as patch:
        patch.setattr(trl.SFTTrainer, "compute_loss", sick)
        code, run = train(world / "lora.yaml", "backend=trl")
    assert code == 4 and told in capsys.readouterr().err
    assert run.status() == "failed" and run.steps()[-1] == 4
    assert main(["resume", run.id]) == 0 and losses(run) == losses(wanted)


def test_nothing_is_estimated_of_another_backends_step(world: Path, with_trl, monkeypatch, capsys):
    """memfit says so; a run keeps no estimate, and is no part of the record that estimates are held against."""
    monkeypatch.setattr(nvml, "ask", lambda: nvml.Answer((), None, "no driver"))
    path = world / "lora.yaml"
    told = [fit.fit(load(path, overrides)).estimate.assumptions for overrides in ((), ("backend=trl",))]
    (more,) = set(told[1]) - set(told[0])
    assert more.startswith("the step of backend native") and set(told[0]) < set(told[1])
    assert main(["memfit", "--config", str(path), "backend=trl"]) == 0
    assert "trl, whose step may take more" in capsys.readouterr().err
    _, run = train(path, "backend=trl", "stop.max_steps=2")
    assert "nothing is estimated" in capsys.readouterr().err
    assert run.summary()["estimate_bytes"] is None and history.of_device(devices.this_machine()) == ()
    assert main(["runs", run.id]) == 0


# ---- what is refused


def refused(path: Path, *overrides: str) -> str:
    return "\n".join(str(problem) for problem in trainable.problems(load(path, overrides)))


def test_what_trl_does_not_do_with_our_rows_is_refused(world: Path, with_trl):
    """Each by one message, with its key; the plain recipe by none, and no native one by these."""
    path = world / "lora.yaml"
    assert refused(path, "backend=trl") == ""
    for override, words in (
        ("data.packing=true", "packs otherwise"),
        ("tokenizer.path=tiny", "no rows of added tokens"),
        ("memory.loss_chunk=64", "chunks of its own"),
        ("memory.loss_kernel=liger", "a loss of its own"),
        ("memory.compile=auto", "not compiled"),
        ("memory.weights=fp16", "scales no loss"),
    ):
        told = refused(path, "backend=trl", override)
        assert words in told and f"found    {override.replace('=', ': ')}" in told and "or backend: native" in told
        assert words not in refused(path, override)


def test_trl_tunes_a_base_and_trains_nothing_else(world: Path, with_trl, recipe: Path):
    told = refused(recipe, "backend=trl")
    assert "method: pretrain" in told and "data.packing" not in told


def test_an_adapter_on_the_head_is_not_for_trl(world: Path, with_trl, capsys):
    assert train(world / "lora.yaml", "backend=trl", "lora.targets=[lm_head]")[0] == 2
    assert "SFTTrainer trains no adapter on the head" in capsys.readouterr().err


def test_several_processes_are_for_the_native_backend(world: Path):
    both = [load(world / "lora.yaml", ("batch.accumulate=2", f"backend={name}")) for name in ("native", "trl")]
    told = [trainable.parallel_problems(one, Parallel("ddp", 2)) for one in both]
    assert not told[0] and ["trains in one process" in str(problem) for problem in told[1]] == [True]


def test_packages_that_are_missing_are_named_with_what_brings_them(world: Path, capsys, monkeypatch):
    """Exit 3 as for anything that the machine lacks, before a run is made."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in ("trl", "unsloth") else find(name))
    code, run = train(world / "lora.yaml", "backend=trl")
    told = capsys.readouterr().err
    assert code == 3 and run is None and "needs packages of its own" in told and "make setup EXTRA=trl" in told
    assert train(world / "lora.yaml", "backend=trl", "memory.compile=true")[0] == 2


def test_a_resume_without_the_packages_leaves_the_run_as_it_was(world: Path, with_trl, capsys, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "stop_requested", lambda _: "pause")
        code, run = train(world / "lora.yaml", "backend=trl")
    assert code == 130
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "trl" else find(name))
    assert main(["resume", run.id]) == 3 and "make setup EXTRA=trl" in capsys.readouterr().err
    assert run.status() == "paused"


def test_unsloth_is_refused_without_a_gpu_with_the_reason(world: Path, monkeypatch):
    """T10: CUDA alone; in 4 bits or not quantized; 8 bits are no type that there is."""
    monkeypatch.setattr(nvml, "ask", lambda: nvml.Answer((), None, "no NVIDIA driver"))
    told = refused(world / "qlora.yaml", "backend=unsloth")
    assert "for CUDA GPUs" in told and "no NVIDIA driver" in told and "backend=native" in told
    told = refused(world / "lora.yaml", "backend=unsloth")
    assert "memory.weights: fp32" in told and "nf4 or bf16" in told
    assert main(["check", "--config", str(world / "qlora.yaml"), "backend=unsloth", "memory.weights=int8"]) == 2


def test_an_unsloth_that_asks_for_other_packages_is_refused(world: Path, with_trl, monkeypatch):
    """As release 2026.10.9 does: its own requirements are held against what is here."""
    monkeypatch.setattr(devices, "gpus", lambda: (GPU,))
    find, version = importlib.util.find_spec, importlib.metadata.version
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "unsloth" or find(name))
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "9.9" if name == "unsloth" else version(name))
    asked = ["transformers<=5.17.0,>=4.52", "numpy", 'mlx; sys_platform == "darwin"', "nowhere-to-be-found>=1"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: asked)
    told = refused(world / "qlora.yaml", "backend=unsloth")
    assert "transformers <=5.17.0,>=4.52, and 5.24.0 is here; nowhere-to-be-found, which is not here" in told
    assert "numpy" not in told and "mlx" not in told
    asked[:] = ["transformers>=4.52"]
    assert refused(world / "qlora.yaml", "backend=unsloth") == ""


# ---- the extras


@pytest.mark.parametrize("name", ["trl", "liger"])
def test_an_extras_lock_holds_what_the_project_names_and_nothing_of_the_others(name: str):
    def pinned(lock: str) -> dict[str, str]:
        text = (paths.REPOSITORY / "docker" / f"{lock}.lock").read_text()
        assert all("--hash=sha256:" in entry for entry in re.split(r"\n(?=\S)", text.strip()))
        return dict(re.findall(r"^([a-z0-9-]+)==(\S+)", text, flags=re.M))

    project = tomllib.loads((paths.REPOSITORY / "pyproject.toml").read_text())["project"]
    wanted = dict(pin.split("==") for pin in project["optional-dependencies"][name])
    assert pinned(name) == wanted
    assert not wanted.keys() & (pinned("cpu").keys() | pinned("cuda").keys())
