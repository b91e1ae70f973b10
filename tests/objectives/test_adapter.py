"""Adapters: PEFT's mathematics and PEFT's files, beside a base that stays as it is, in types that are stated."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.objectives.test_stream import VOCAB, tiny_llama
from training.calculator.probe import dtype_of
from training.core.errors import UserError
from training.objectives import adapter, nf4, targets
from training.objectives.trainee import Trainee
from training.recipe.model import Lora

IDS = torch.arange(3, 11)[None]


def lora(**changes) -> Lora:
    values = {"rank": 4, "alpha": 8.0, "dropout": 0.0, "targets": "all-linear", "from_": None}
    return Lora(**(values | changes))


def adapted(settings: Lora, dtype: torch.dtype = torch.float32, model=None) -> adapter.AdapterTrainee:
    model = model or tiny_llama()
    torch.manual_seed(3)
    names = adapter.attach(model, settings, dtype)
    return adapter.AdapterTrainee(model, {"name": "tiny"}, settings, names)


def filled(trainee: adapter.AdapterTrainee) -> adapter.AdapterTrainee:
    """Give the second factors values, which begin as zero."""
    torch.manual_seed(9)
    for name, tensor in trainee.weights().items():
        if "lora_B" in name:
            tensor.normal_(std=0.1)
    return trainee


def test_an_untrained_adapter_changes_nothing_and_only_adapters_are_trained():
    trainee = adapted(lora())
    assert torch.equal(trainee.model(IDS).logits, tiny_llama()(IDS).logits)
    trained = [name for name, parameter in trainee.model.named_parameters() if parameter.requires_grad]
    assert trained and all(".lora_" in name for name in trained)
    trainee.model(IDS).logits.sum().backward()
    assert all(p.grad is None for p in trainee.model.parameters() if not p.requires_grad)


@pytest.mark.parametrize("wanted", ["all-linear", "attention", ("q_proj", "lm_head")])
def test_peft_reads_what_is_saved_and_gives_the_same_logits_and_gradients(wanted, tmp_path: Path):
    """`adapter_config.json` and `adapter_model.safetensors` are PEFT's."""
    from peft import PeftModel

    mine = filled(adapted(lora(targets=wanted)))
    (tmp_path / "adapter_config.json").write_text(json.dumps(mine.settings()))
    save_file({name: tensor.clone() for name, tensor in mine.weights().items()}, tmp_path / "adapter_model.safetensors")
    theirs = PeftModel.from_pretrained(tiny_llama(), tmp_path, is_trainable=True)
    logits = [model(IDS).logits for model in (mine.model, theirs)]
    assert torch.allclose(*logits, atol=1e-6)
    for one in logits:
        one.square().sum().backward()
    own = {name: parameter.grad for name, parameter in mine.model.named_parameters() if parameter.requires_grad}
    found = {
        name.removeprefix("base_model.model.").replace(".default.weight", ""): parameter.grad
        for name, parameter in theirs.named_parameters()
        if parameter.requires_grad
    }  # fmt: skip
    assert own.keys() == found.keys()
    assert all(torch.allclose(own[name], found[name], atol=1e-4, rtol=1e-4) for name in own)
    again = adapted(lora(targets=wanted))
    again.load(tmp_path)
    assert torch.equal(again.model(IDS).logits, logits[0])


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_the_gradients_of_an_adapted_layer_are_right(dropout: float):
    """Against numbers, in float64, with one draw of the dropout."""
    torch.manual_seed(0)
    layer = adapter.Adapted(torch.nn.Linear(5, 3).double(), lora(dropout=dropout), torch.float64)
    adapter.draw(layer.lora_A)
    torch.nn.init.normal_(layer.lora_B)

    def run(x, a, b):
        torch.manual_seed(4)
        return torch.func.functional_call(layer, {"lora_A": a, "lora_B": b}, (x,))

    x = torch.randn(2, 4, 5, dtype=torch.float64, requires_grad=True)
    factors = [parameter.detach().clone().requires_grad_() for parameter in (layer.lora_A, layer.lora_B)]
    assert torch.autograd.gradcheck(run, (x, *factors))


def test_dropout_drops_the_share_and_keeps_the_mean():
    """The mean over many draws is the value without dropout; when it evaluates nothing is dropped."""
    layer = adapter.Adapted(torch.nn.Linear(64, 8), lora(dropout=0.25), torch.float32)
    adapter.draw(layer.lora_A)
    torch.nn.init.normal_(layer.lora_B)
    x = torch.randn(1, 64)
    whole = layer.eval()(x)
    torch.manual_seed(0)
    mean = layer.train()(x.repeat(20_000, 1)).mean(0)
    assert torch.allclose(mean, whole[0], atol=0.15 * (whole - layer.base(x)).abs().max().item())
    assert not torch.equal(layer(x), layer(x)) and torch.equal(layer.eval()(x), whole)


@pytest.mark.parametrize(("dtype", "wanted"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_the_type_of_an_adapter_is_the_declared_one(dtype: str, wanted: torch.dtype):
    """D6: beside a base in 16 bits the factors and their gradients have their own type, the answer the base's."""
    trainee = adapted(lora(), dtype_of(dtype), tiny_llama().to(torch.bfloat16))
    logits = trainee.model(IDS).logits
    assert logits.dtype == torch.bfloat16
    logits.float().square().sum().backward()
    trained = [parameter for parameter in trainee.model.parameters() if parameter.requires_grad]
    assert {one.dtype for one in trained} == {one.grad.dtype for one in trained} == {wanted}


def test_a_base_in_4_bits_holds_its_linears_and_nothing_else_so():
    """QLoRA: every linear but the head is packed, embedding and norms keep their type; the loss stays near."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, num_key_value_heads=1, **sizes))
    plain = model(IDS, labels=IDS).loss
    linears = list(targets.inner_linears(model))
    nf4.pack(model, torch.device("cpu"), torch.float32)
    types = {name: parameter.dtype for name, parameter in model.named_parameters()}
    assert {name.removesuffix(".weight") for name, one in types.items() if one == torch.uint8} == set(linears)
    assert types["lm_head.weight"] == types["model.embed_tokens.weight"] == torch.float32 and len(linears) == 14
    state = model.model.layers[0].mlp.up_proj.weight.quant_state
    assert state.quant_type == "nf4" and state.nested
    packed = model(IDS, labels=IDS).loss
    assert packed.item() == pytest.approx(plain.item(), rel=0.05) and packed.item() != plain.item()
    trainee = adapted(lora(), model=model)
    with torch.inference_mode():
        trainee.model.eval()(IDS)
    trainee.model.train()(IDS, labels=IDS).loss.backward()
    grads = [parameter.grad for parameter in trainee.model.parameters() if parameter.requires_grad]
    assert len(grads) == 28 and all(torch.isfinite(grad).all() for grad in grads)


# ---- where adapters stand


class Wrapped(torch.nn.Module):
    """A wrapper with exactly one linear inside."""

    def __init__(self, size: int):
        super().__init__()
        self.linear, self.gain = torch.nn.Linear(size, size), torch.nn.Parameter(torch.ones(size))

    def forward(self, x):
        return self.linear(x) * self.gain


class SomeAttention(torch.nn.Module):
    def __init__(self, wraps: bool):
        super().__init__()
        make = Wrapped if wraps else (lambda size: torch.nn.Linear(size, size))
        self.q_proj, self.out = make(4), torch.nn.Linear(4, 4)


class Block(torch.nn.Module):
    def __init__(self, wraps: bool = False):
        super().__init__()
        self.mixer, self.up, self.down = SomeAttention(wraps), torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)


class Whole(torch.nn.Module):
    def __init__(self, wraps: bool):
        super().__init__()
        self.vision_tower, self.audio_encoder = Block(), Block()
        self.layers = torch.nn.ModuleList([Block(wraps)])
        self.head = torch.nn.Linear(4, 9)

    def get_output_embeddings(self):
        return self.head


@pytest.mark.parametrize("wraps", [False, True])
def test_targets_are_found_in_the_model(wraps: bool):
    """R6: wrappers that hold exactly one linear, towers passed over, the head only where it is named."""
    model = Whole(wraps)
    query = "layers.0.mixer.q_proj" + (".linear" if wraps else "")
    out, up, down = "layers.0.mixer.out", "layers.0.up", "layers.0.down"
    assert targets.find(model, "all-linear") == [query, out, up, down]
    assert targets.find(model, "attention") == [query, out]
    assert targets.find(model, ("q_proj",)) == [query]
    assert targets.find(model, ("head", "layers.0.up")) == [up, "head"]
    for wrong in (("mixer",), ("q_proj", "nothing")):
        with pytest.raises(UserError, match="matches no layer") as caught:
            targets.find(model, wrong)
        assert "down" in caught.value.expected and wrong[-1] in caught.value.found


def test_names_that_would_mean_a_tower_too_are_saved_whole():
    model = Whole(False)
    assert targets.suffixes(model, ["layers.0.up"]) == ["layers.0.up"]
    assert targets.suffixes(tiny_llama(), targets.find(tiny_llama(), "attention")) == [
        "k_proj", "o_proj", "q_proj", "v_proj"
    ]  # fmt: skip


def test_a_model_without_linears_has_nothing_to_adapt():
    class Bare(torch.nn.Module):
        def get_output_embeddings(self):
            return None

    with pytest.raises(UserError, match="matches no layer"):
        targets.find(Bare(), "all-linear")


def test_a_tied_head_is_saved_once_and_an_untied_one_beside_its_embedding():
    from transformers import LlamaConfig, LlamaForCausalLM

    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    tied = Trainee(tiny_llama())
    assert head not in tied.weights() and embedding in tied.weights()
    config = LlamaConfig.from_dict(tied.settings() | {"tie_word_embeddings": False})
    assert {head, embedding} <= Trainee(LlamaForCausalLM(config)).weights().keys()


@pytest.mark.parametrize("by", ["ours", "peft"])
def test_a_model_that_has_an_adapter_is_not_wrapped_again(by: str):
    """B53: whatever the targets are, and whoever has put the first one there; the model stays as it was."""
    if by == "ours":
        model = adapted(lora(targets="attention")).model
    else:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(tiny_llama(), LoraConfig(r=2, target_modules=["q_proj"])).base_model.model
    before = [name for name, _ in model.named_modules()]
    for wanted in ("all-linear", "attention", ("up_proj",)):
        with pytest.raises(UserError, match="has an adapter already"):
            adapter.attach(model, lora(targets=wanted), torch.float32)
    assert [name for name, _ in model.named_modules()] == before
