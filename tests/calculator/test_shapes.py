"""Parameter counts, exact against transformers' own models, and what is refused."""

import pytest

from training.calculator import shapes
from training.calculator.families import FAMILIES
from training.core.errors import Problems, UserError
from training.recipe import bases

_NO_HEAD_DIM = ("gpt_neox", "phi", "phi3")  # whose rotation goes by the width and the heads
LLAMA = {
    "model_type": "llama", "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip


def test_the_bases_have_their_published_sizes():
    known = bases.load()
    assert shapes.from_config(known["smollm2-135m-instruct"].config, "").parameters == 134_515_008
    assert shapes.from_config(known["qwen3-8b"].config, "").parameters == 8_190_735_360


def test_a_count_by_hand():
    layer = 64 * 64 * 2 + 2 * 64 * 32 + 3 * 64 * 96 + 2 * 64
    assert shapes.from_config(LLAMA, "").parameters == 2 * 100 * 64 + 3 * layer + 64
    assert shapes.from_config(LLAMA | {"tie_word_embeddings": True}, "").parameters == 100 * 64 + 3 * layer + 64


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"tie_word_embeddings": True},
        {"head_dim": 24},
        {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True, "use_bias": False, "use_qkv_bias": True},
        {"num_key_value_heads": 4, "use_parallel_residual": True},
    ],
    ids=str,
)
def test_the_count_is_that_of_transformers_own_model(family: str, change: dict):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    own = {"num_key_value_heads": 4} if family == "gpt_neox" else {}
    change = {key: value for key, value in change.items() if key != "head_dim" or family not in _NO_HEAD_DIM}
    config = AutoConfig.for_model(
        **(LLAMA | {"tie_word_embeddings": False, "pad_token_id": 0} | change | own | {"model_type": family})
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = shapes.from_config(config.to_dict(), family)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    linears = {
        name.split(".")[-1]: part
        for name, part in model.base_model.layers[0].named_modules()
        if isinstance(part, torch.nn.Linear)
    }
    assert {one.name: (one.in_features, one.out_features) for one in shape.linears} == {
        name: (part.in_features, part.out_features) for name, part in linears.items()
    }


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"model_type": "mamba"}, "does not know the architecture 'mamba'"),
        ({"model_type": None}, "model_type is no name"),
        ({"text_config": {"hidden_size": 1}}, "nests"),
        ({"quantization_config": {"bits": 4}}, "quantised already"),
        ({"hidden_size": None, "vocab_size": "many"}, "(2)"),
        ({"num_key_value_heads": 3}, "not divisible"),
        ({"num_attention_heads": 5, "num_key_value_heads": 5}, "not divisible"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window"),
    ],
    ids=str,
)
def test_what_the_formula_does_not_know_is_refused_by_name(change: dict, part: str):
    with pytest.raises(UserError) as caught:
        shapes.from_config(LLAMA | change, "config.json")
    assert part in str(caught.value)
    may_be_traced = "mamba" in part or "sliding" in part
    assert isinstance(caught.value, shapes.UnknownShape) is may_be_traced


@pytest.mark.parametrize("value", ["8", [8], {"a": 1}, 1.5, True, 0, -1, 10**40], ids=repr)
@pytest.mark.parametrize("key", ["num_key_value_heads", "head_dim", "hidden_size", "max_position_embeddings"])
def test_a_size_that_is_none_is_refused_by_name(key: str, value: object):
    with pytest.raises(Problems, match="no estimate") as refusal:
        shapes.from_config(LLAMA | {key: value}, "x")
    assert key in str(refusal.value)


@pytest.mark.parametrize("family", [["llama"], {"a": 1}, None, 3], ids=repr)
def test_a_family_that_is_no_name_is_refused(family: object):
    with pytest.raises(Problems, match="model_type is no name"):
        shapes.from_config({"model_type": family}, "x")


@pytest.mark.parametrize(
    ("family", "key"),
    [("qwen2", "num_key_value_heads"), ("qwen3", "head_dim"), ("mistral", "num_key_value_heads"),
     ("gemma", "num_key_value_heads"), ("starcoder2", "num_key_value_heads")],
)  # fmt: skip
def test_a_size_that_transformers_would_fill_in_must_be_stated(family: str, key: str):
    """Its own default would be another number than the one that the configuration seems to say."""
    whole = LLAMA | {"model_type": family, "hidden_act": "silu", "num_key_value_heads": 2, "head_dim": 16}
    shapes.from_config(whole, "config.json")
    with pytest.raises(UserError) as caught:
        shapes.from_config({name: value for name, value in whole.items() if name != key}, "config.json")
    assert f"{key} is not stated" in str(caught.value)


def test_more_layers_than_can_be_walked_through_are_refused():
    with pytest.raises(UserError) as caught:
        shapes.from_config(LLAMA | {"num_hidden_layers": 10_000}, "config.json")
    assert "at most 1000" in str(caught.value)
