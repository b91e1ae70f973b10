"""Whole runs that start from a base: what they leave, how they go on, what they refuse."""

import itertools
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.engine.test_run import losses, train
from tests.objectives.tiny import manifest_of, resume_in_the_middle, train_in_any_split
from training.calculator import devices
from training.cli import main
from training.core import files, paths
from training.engine.assembly import Assembly
from training.engine.trainer import Trainer
from training.export import chain
from training.recipe import bases
from training.runs.events import read_events
from training.runs.folder import all_runs


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_a_method_learns_and_leaves_its_weights_alone(world: Path, method: str):
    """W6, W9, T9: the base by its hash; of an adapter the factors alone, never the base."""
    code, run = train(world / f"{method}.yaml")
    assert code == 0 and run.status() == "completed"
    assert losses(run)[8] < losses(run)[1] - 0.2
    step = run.step_folder(8)
    manifest = files.verify_manifest(step, "checkpoint")
    base = bases.find("tiny").require()
    assert manifest["base"] == {
        "name": "tiny", "revision": "local", "weights_sha256": base["weights_sha256"]
    }  # fmt: skip
    names = {path.name for path in step.iterdir()}
    expected = "model.safetensors" if method == "full" else "adapter_model.safetensors"
    assert {path.name for path in step.glob("*.safetensors")} == {expected}
    assert {"tokenizer.json", "chat_template.jinja", "tokenizer_manifest.json", "recipe.json"} <= names
    assert manifest["weights_sha256"] == files.sha256_file(step / expected)
    weights = load_file(step / expected)
    if method != "full":
        assert all(".lora_" in name for name in weights) and len(weights) == 2 * 2 * 7
        assert all(tensor.dtype.is_floating_point and tensor.element_size() == 4 for tensor in weights.values())
    summary = json.loads((run.path / "summary.json").read_text())
    assert summary["quantization"] == ("nf4" if method == "qlora" else None)
    base_parameters = 384 * 32 + 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64 + 2 * 32) + 32
    trained = sum(tensor.numel() for tensor in weights.values())
    assert summary["trainable_parameters"] == trained
    assert summary["parameters"] == base_parameters + (0 if method == "full" else trained)
    shutil.rmtree(paths.roots().tokenizers)  # the base's own lies in its folder
    links = {link.name: link.state for link in chain.walk(run.id)}
    assert links == dict.fromkeys(("weights", "base", "recipe", "run", "dataset", "tokenizer"), "ok")


def test_memory_is_judged_by_the_tokens_also_where_the_run_has_made_them(world: Path, monkeypatch):
    """Not by data.seq_len, which is longer than every record, nor refused by it."""
    rows = ("stop.max_steps=1", "data.seq_len=128", "data.micro_batch=64")
    _, first = train(world / "full.yaml", *rows)
    _, again = train(world / "full.yaml", *rows)
    assert first.record()["estimate_bytes"] == again.record()["estimate_bytes"]
    shutil.rmtree(next(paths.roots().datasets.glob("chat/*/tokens")))
    machine = devices.Device("a small machine", "cpu", first.record()["estimate_bytes"], 0)
    monkeypatch.setattr(devices, "this_machine", lambda: machine)
    assert train(world / "full.yaml", *rows)[0] == 0


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_a_resume_goes_on_bit_for_bit(world: Path, method: str):
    """W7: from a checkpoint in the middle of an epoch, with dropout: losses and weights of a run nobody stopped."""
    _, run = train(world / f"{method}.yaml")
    resume_in_the_middle(run)
    assert sum(1 for event in read_events(run.path, "step") if event["step"] == 7) == 2


def test_any_split_into_micro_batches_gives_one_run(world: Path):
    """B16: records of unequal length, padded or packed or alone: the same losses to 1e-5."""
    train_in_any_split(world / "lora.yaml", (), ("memory.attention=eager",))


def test_packing_sees_the_same_tokens(world: Path):
    code, run = train(world / "lora.yaml", "data.packing=true", "stop.max_steps=null", "stop.max_epochs=2")
    assert code == 0
    plain, other = train(world / "lora.yaml", "stop.max_steps=null", "stop.max_epochs=2")
    assert plain == 0
    summaries = [json.loads((one.path / "summary.json").read_text()) for one in (run, other)]
    assert summaries[0]["trained_tokens"] == summaries[1]["trained_tokens"]
    assert summaries[0]["steps"] < summaries[1]["steps"]
    firsts = [next(read_events(one.path, "validation"))["eval/loss_nats"] for one in (run, other)]
    assert firsts[0] != firsts[1]  # eight rows hold more records than eight records


def test_texts_are_trained_as_a_stream(world: Path):
    """A base goes on with plain texts, packed; what makes no sense for them is refused."""
    texts = ("data.dataset=texts", "data.loss_on=all")
    code, run = train(world / "lora.yaml", *texts, "data.packing=true", "stop.max_steps=4")
    assert code == 0 and losses(run)[4] < losses(run)[1]
    assert train(world / "lora.yaml", *texts)[0] == 2
    assert train(world / "lora.yaml", "data.dataset=texts", "data.packing=true")[0] == 2


def test_an_adapter_goes_on_with_its_own_shape(world: Path):
    """R9: rank, alpha and targets are the adapter's, whatever the recipe says; its weights are where it begins."""
    _, first = train(world / "lora.yaml", "lora.rank=3", "lora.alpha=5", "lora.targets=attention")
    best = list(read_events(first.path, "validation"))[-1]["eval/loss_nats"]
    for reference in ("latest", first.id, str(first.step_folder(8))):
        code, second = train(world / "lora.yaml", f"lora.from={reference}", "stop.max_steps=2")
        assert code == 0
        settings = files.read_json(second.step_folder(2) / "adapter_config.json")
        assert (settings["r"], settings["lora_alpha"]) == (3, 5)
        assert settings["target_modules"] == ["k_proj", "o_proj", "q_proj", "v_proj"]
        assert next(read_events(second.path, "validation"))["eval/loss_nats"] == best
        start = next(read_events(second.path, "start"))
        assert start["from"] == manifest_of(first.step_folder(8))["weights_sha256"]
    kept = (second.path / "recipe.yaml").read_text()
    assert "rank: 3  # the adapter in $DATA_ROOT/" in kept
    shutil.rmtree(first.path)
    shutil.rmtree(second.step_folder(2))
    second.update(status="lost")
    assert main(["resume", second.id]) == 0


def test_what_is_no_adapter_is_refused(world: Path, capsys: pytest.CaptureFixture):
    _, full = train(world / "full.yaml", "stop.max_steps=2")
    assert train(world / "lora.yaml", f"lora.from={full.id}")[0] == 2
    assert "no adapter lies there" in capsys.readouterr().err
    _, lora = train(world / "lora.yaml", "stop.max_steps=2")
    settings = lora.step_folder(2) / "adapter_config.json"
    plain = world / "plain"
    shutil.copytree(lora.step_folder(2), plain, ignore=shutil.ignore_patterns("manifest.json"))
    for change, word in (
        ({"use_dora": True}, "use_dora"),
        ({"r": None}, "no shape"),
        ({"bias": "all"}, "another kind"),
    ):
        files.write_json(plain / "adapter_config.json", files.read_json(settings) | change)
        assert train(world / "lora.yaml", f"lora.from={plain}")[0] == 2
        assert word in capsys.readouterr().err
    files.write_json(plain / "adapter_config.json", files.read_json(settings) | {"r": 7})
    assert train(world / "lora.yaml", f"lora.from={plain}")[0] == 5
    (lora.step_folder(2) / "adapter_model.safetensors").write_bytes(b"x")
    assert train(world / "lora.yaml", f"lora.from={lora.step_folder(2)}")[0] == 5


def test_a_base_with_other_bytes_is_refused(world: Path, capsys: pytest.CaptureFixture):
    weights = bases.find("tiny").folder / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert train(world / "lora.yaml")[0] == 5
    assert "bytes have changed" in capsys.readouterr().err


def test_a_base_that_is_not_there_is_named_with_the_command(world: Path, capsys: pytest.CaptureFixture):
    shutil.rmtree(bases.find("tiny").folder)
    assert train(world / "lora.yaml")[0] == 2
    assert "make base-fetch BASE=tiny" in capsys.readouterr().err
    assert main(["check", "--config", str(world / "lora.yaml")]) == 2
    assert train(world / "lora.yaml", "model.base=other")[0] == 2


def test_targets_that_match_nothing_list_what_exists(world: Path, capsys: pytest.CaptureFixture):
    assert train(world / "lora.yaml", "lora.targets=[q_prj]")[0] == 2
    assert "q_proj" in capsys.readouterr().err


def test_flash_attention_and_packing_take_one_row_at_a_time(world: Path, capsys: pytest.CaptureFixture):
    """B28: with more rows transformers' flash attention would let packed records see each other."""
    flash = ("memory.attention=flash_attention_2", "data.packing=true")
    assert train(world / "lora.yaml", *flash)[0] == 2
    assert "batches of one row alone" in capsys.readouterr().err


def test_an_adapters_checkpoint_is_evaluated(world: Path, capsys: pytest.CaptureFixture):
    _, run = train(world / "lora.yaml", "checkpoint.initial=true")
    capsys.readouterr()
    arguments = ["evaluate", str(run.step_folder(0)), run.id, "--split", "validation", "--json"]
    assert main(arguments) == 0
    before, after = json.loads(capsys.readouterr().out)["records"]
    assert after["score"]["loss_nats"] < before["score"]["loss_nats"]
    assert after["score"]["num_bytes"] == after["unigram"]["num_bytes"]
    assert after["score"]["num_tokens"] == after["unigram"]["num_tokens"]


def test_weights_that_are_not_finite_are_found_before_training(world: Path, capsys: pytest.CaptureFixture):
    import torch
    from safetensors.torch import save_file

    source = world / "data" / "models" / "tiny-source" / "model.safetensors"
    weights = load_file(source)
    weights["model.norm.weight"][3] = torch.nan
    save_file(weights, source, {"format": "pt"})
    assert main(["base-fetch", "tiny", "--pin"]) == 0
    capsys.readouterr()
    assert train(world / "full.yaml")[0] == 2
    assert "not finite" in capsys.readouterr().err


def test_without_bitsandbytes_the_command_that_is_named_trains_here(world: Path, monkeypatch, capsys):
    """QLoRA becomes LoRA in the type that this machine trains in."""
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    code, _ = train(world / "qlora.yaml")
    (told,) = [line for line in capsys.readouterr().err.splitlines() if line.lstrip().startswith("next ")]
    advised = told.partition(" train ")[2].split()
    assert code == 3 and "method=lora" in advised
    assert main(["train", *advised, "stop.max_steps=2"]) == 0
    run = all_runs()[0]
    assert run.summary()["method"] == "lora" and run.summary()["dtype"] == "float32"


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_the_frozen_base_has_the_same_bytes_after_training(world: Path, monkeypatch, method: str):
    """B53: every tensor that is not trained, packed ones and their scales included; the adapter has changed."""
    seen, on_step = [], Trainer.on_step

    def look(self, state, result):
        on_step(self, state, result)
        seen.append(_bytes_of(self.trainee.model))

    begin = Assembly.begin
    monkeypatch.setattr(Assembly, "begin", lambda self: (seen.append(_bytes_of(self.trainee.model)), begin(self))[1])
    monkeypatch.setattr(Trainer, "on_step", look)
    code, _ = train(world / f"{method}.yaml", "stop.max_steps=3", "optimizer.lr=0.1")
    assert code == 0 and len(seen) == 4
    assert all(frozen == seen[0][0] for frozen, _ in seen) and len(seen[0][0]) > 10
    assert all(one[1] != other[1] for one, other in itertools.pairwise(seen))


def _bytes_of(model) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """The frozen and the trained tensors, byte for byte."""
    halves: tuple[dict, dict] = ({}, {})
    trained = {name for name, one in model.named_parameters() if one.requires_grad}
    for name, tensor in model.state_dict().items():
        halves[name in trained][name] = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return halves
