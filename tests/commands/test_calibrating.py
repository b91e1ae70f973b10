"""`train-calibrate` as a person calls it, on a machine without a GPU."""

import json
import sys
from pathlib import Path

import pytest
import torch

from tests.calculator.test_devices import FakeNvml
from training.calculator import nvml
from training.cli import main
from training.core.paths import REPOSITORY

DEMO = "recipes/demo/pretrain-stdlib.yaml"


@pytest.fixture
def call(capsys, monkeypatch):
    """Call the command in this process, without a GPU; returns (exit code, `--json` document, what people read)."""
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setattr(nvml, "ask", lambda: nvml.Answer((), None, "no NVIDIA driver answers (none)"))

    def call(*arguments: str) -> tuple[int, dict, str]:
        code = main(["train-calibrate", "--config", DEMO, *arguments, "--json"])
        output = capsys.readouterr()
        return code, json.loads(output.out), output.err

    return call


@pytest.mark.slow
def test_the_demos_tensors_are_met_and_the_device_part_is_said_to_be_unmeasured(call, tmp_path: Path):
    target = tmp_path / "record.json"
    code, document, text = call("--out", str(target))
    rows = document["report"]["rows"]
    assert code == 0 and rows["device part"] == "not measured: no NVIDIA driver answers (none)"
    kept = json.loads(target.read_text())
    assert kept["kind"] == "cpu-calibration" and kept["comparisons"] == document["comparisons"]
    assert {one["name"]: one["measured_bytes"] for one in kept["comparisons"]}["weights"] == 4_196_608 * 4
    assert "saved_tensors" in text and "resident" in rows["process"]


@pytest.mark.slow
def test_an_estimate_that_is_far_off_ends_with_4_both_figures_and_what_to_do(call):
    """In rows of 8, a fourth of the positions has no label; the estimate counts each as trained."""
    code, document, text = call("data.seq_len=8", "data.micro_batch=64")
    peak = next(one for one in document["comparisons"] if one["name"] == "peak")
    assert code == 4 and not peak["passes"] and peak["difference"] > 0.01
    assert "NOT WITHIN THE LIMITS" in text and "measured" in document["report"]["rows"]["peak"]
    assert "make memfit" in document["report"]["rows"]["next"]


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_the_step_of_a_method_on_a_base_is_met_by_its_configuration_alone(capsys, tmp_path: Path, method: str):
    sizes = {"vocab_size": 2048, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    config = {"model_type": "llama", **sizes, **heads, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    path = tmp_path / "tune.yaml"
    weights = "nf4" if method == "qlora" else "fp32"
    path.write_text(
        f"name: tune\nmethod: {method}\nmodel: {{config: config.json}}\nstop: {{max_steps: 1}}\n"
        f"data: {{seq_len: 128, micro_batch: 2}}\nmemory: {{weights: {weights}}}\nbatch: {{accumulate: 2}}\n"
    )
    assert main(["train-calibrate", "--config", str(path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert max(abs(one["difference"]) for one in document["comparisons"]) <= 0.01


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks what happens where torch has no CUDA")
def test_a_gpu_that_torch_cannot_use_is_told(capsys, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    code = main(["train-calibrate", "--config", DEMO, "--json"])
    document = json.loads(capsys.readouterr().out)
    assert code == 3 and "Test GPU" in document["error"]["found"] and "LOCK=cuda" in document["error"]["next"]
