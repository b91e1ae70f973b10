"""Each family through the real converter and a real server, proved in F32 and F16 against PyTorch's own layers."""

from pathlib import Path

import pytest
import torch

from tests.export.tiny_families import FAMILIES, write_family
from training.core.errors import IntegrityError
from training.export import export, positions, reference
from training.export.checkpoint import open_checkpoint
from training.export.probes import Prompt

IDS = [0, *range(7, 400, 9)]


@pytest.mark.parametrize("family", FAMILIES)
def test_layer_by_layer_is_what_transformers_computes(family: str, tmp_path: Path, tokenizer_files: Path):
    from transformers import AutoModelForCausalLM

    folder = write_family(tmp_path / family, family, tokenizer_files)
    found = reference.logprobs(open_checkpoint(str(folder)), [Prompt(IDS, list(range(1, len(IDS) + 1)))])
    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(torch.tensor([IDS])).logits[0]
    assert (torch.from_numpy(found) - torch.log_softmax(logits.double(), -1).float()).abs().max() < 2e-4


@pytest.mark.slow
@pytest.mark.usefixtures("llama_cpp")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_exported_and_proved(family: str, tmp_path: Path, tokenizer_files: Path):
    folder = write_family(tmp_path / family, family, tokenizer_files)
    outputs = export.export(
        open_checkpoint(str(folder)), ["F32", "F16"], name=f"tiny-{family.replace('phi3', 'phi-new')}"
    )
    for output in outputs:
        assert abs(output.manifest["bytes"] - output.manifest["planned_bytes"]) <= 0.01 * output.manifest["bytes"]
        assert output.manifest["parity"]["positions"] >= 256


# ---- what short prompts cannot tell


@pytest.mark.parametrize(
    ("config", "values", "what"),
    [
        ({"rope_theta": 1e6}, {"x.rope.freq_base": 1e4}, "rope.freq_base"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, {}, "rope scaling llama3"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, {}, "rope.scaling.type"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}},
         {"x.rope.scaling.type": "yarn", "x.rope.scaling.factor": 2.0}, "rope.scaling.factor"),
        ({"sliding_window": 4096, "max_position_embeddings": 32768}, {}, "attention.sliding_window"),
    ],
    ids=["theta", "llama3", "dynamic", "yarn", "window"],
)  # fmt: skip
def test_positions_that_differ_are_named(config: dict, values: dict, what: str):
    with pytest.raises(IntegrityError, match="places tokens otherwise") as failure:
        positions.require_equal(config, {"general.architecture": "x"} | values, frozenset())
    assert failure.value.where == what


@pytest.mark.parametrize(
    "config",
    [{"sliding_window": 4096, "max_position_embeddings": 4096}, {"sliding_window": 64, "use_sliding_window": False},
     {"sliding_window": 64, "layer_types": ["full_attention"]}, {"rope_scaling": {"rope_type": "default"}}],
)  # fmt: skip
def test_a_window_that_no_layer_has_is_none(config: dict):
    positions.require_equal({"max_position_embeddings": 4096} | config, {"general.architecture": "x"}, frozenset())
