"""Each family through the real converter and a real server, proved in F32 and F16 against PyTorch's own layers."""

from pathlib import Path

import pytest
import torch

from tests.export.tiny_families import FAMILIES, write_family
from training.core import files
from training.core.errors import IntegrityError
from training.export import export, plan, positions, reference
from training.export.checkpoint import open_checkpoint
from training.export.probes import Prompt
from training.llamacpp import convert

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
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
        ({"rope_scaling": LLAMA3, "hidden_size": 64, "num_attention_heads": 4}, {},
         "rope scaling llama3: rope_freqs.weight"),
        ({"rope_scaling": {"type": "longrope", "long_factor": [1.0, 2.0], "short_factor": [1.0, 1.0]}}, {},
         "rope scaling longrope: rope_factors_long.weight"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, {}, "rope.scaling.type"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}},
         {"x.rope.scaling.type": "yarn", "x.rope.scaling.factor": 2.0}, "rope.scaling.factor"),
        ({"sliding_window": 4096, "max_position_embeddings": 32768}, {}, "attention.sliding_window"),
    ],
    ids=["theta", "llama3", "longrope", "dynamic", "yarn", "window"],
)  # fmt: skip
def test_positions_that_differ_are_named(config: dict, values: dict, what: str):
    with pytest.raises(IntegrityError, match="places tokens otherwise") as failure:
        positions.require_equal(config, {"general.architecture": "x"} | values, {})
    assert failure.value.where == what


@pytest.mark.parametrize(
    "config",
    [{"sliding_window": 4096, "max_position_embeddings": 4096}, {"sliding_window": 64, "use_sliding_window": False},
     {"sliding_window": 64, "layer_types": ["full_attention"]}, {"rope_scaling": {"rope_type": "default"}}],
)  # fmt: skip
def test_a_window_that_no_layer_has_is_none(config: dict):
    positions.require_equal({"max_position_embeddings": 4096} | config, {"general.architecture": "x"}, {})


@pytest.mark.parametrize(
    "change", [{}, {"factor": 2.0}, {"original_max_position_embeddings": 128}, {"high_freq_factor": 3.0}]
)
def test_the_frequencies_of_llama3_are_those_of_transformers(change: dict):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = LLAMA3 | {"rope_theta": 5e5} | change
    config = LlamaConfig(
        hidden_size=512, num_attention_heads=4, max_position_embeddings=512, rope_parameters=dict(rope)
    )
    stretched, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 1 / 5e5 ** (torch.arange(0, 128, 2) / 128)
    found = positions._llama3({"hidden_size": 512, "num_attention_heads": 4}, rope, 5e5)
    torch.testing.assert_close(torch.tensor(found), plain / stretched, rtol=1e-5, atol=0)
    assert len(set(positions._rounded(found))) > 4


@pytest.mark.slow
@pytest.mark.usefixtures("llama_cpp")
@pytest.mark.parametrize(
    ("family", "changes"),
    [("llama", [{"factor": 2.0}, {"low_freq_factor": 2.0}, {"original_max_position_embeddings": 32}]),
     ("llama-yarn", [{"factor": 2.0}, {"original_max_position_embeddings": 32}, {"beta_fast": 16.0}])],
)  # fmt: skip
def test_a_converter_that_writes_another_rope_is_found(
    family: str, changes: list[dict], tmp_path: Path, tokenizer_files: Path
):
    """By the numbers: the tensor, or the scaling, is there all the same."""
    folder = write_family(tmp_path / family, family, tokenizer_files)
    checkpoint, config = open_checkpoint(str(folder)), files.read_json(folder / "config.json")
    target = export._Target("F32", tmp_path / "x.gguf", "0", plan.make(checkpoint, "F32", "llama"))
    for number, change in enumerate([{}, *changes]):
        rope = config["rope_parameters"] | change
        files.write_json(folder / "config.json", config | {"rope_parameters": rope})
        work = tmp_path / f"work-{number}"
        work.mkdir()
        with convert.Conversion.start(
            folder, {"F32": work / "x.gguf"}, tokenizer=folder, pre_tokenizer="llama-bpe", add_bos=True, name="x",
            workspace=work,
        ) as conversion:  # fmt: skip
            conversion.wait()
        files.write_json(folder / "config.json", config)
        if not change:
            export._inspect(work / "x.gguf", open_checkpoint(str(folder)), target)
            continue
        with pytest.raises(IntegrityError, match="places tokens otherwise") as failure:
            export._inspect(work / "x.gguf", open_checkpoint(str(folder)), target)
        assert "scal" in failure.value.where, change
