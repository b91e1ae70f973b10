"""The terms by hand, published traces, monotony, and what an estimate always says of itself."""

import itertools
import json

import pytest

from training.calculator import activations, advice, devices, solve
from training.calculator.activations import Activations
from training.calculator.formula import estimate
from training.calculator.plan import Plan
from training.core.errors import UserError
from training.recipe.bases import Base
from training.recipe.load import load

GIB = 1 << 30
ONE_B = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192,
    "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
    "max_position_embeddings": 131072, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture
def one_b(recipe, monkeypatch):
    """Plans of a published 1 B shape at 2,048 tokens, as its traces had it: a mask in every layer."""
    base = Base("one-b", "hub:a/b", "1", "MIT", {"x": "0"}, ONE_B)
    monkeypatch.setattr("training.recipe.bases.load", lambda: {"one-b": base})

    def plan(*overrides: str, method: str = "full") -> Plan:
        return Plan.of(recipe("data.seq_len=2048", "data.packing=true", *overrides, base="one-b", method=method))

    return plan


def test_the_terms_of_a_small_model_by_hand(recipe):
    """4.2 M parameters in float32, 2 x 256 tokens: each term written out."""
    terms = {term.name: term.num_bytes for term in estimate(recipe(), on_cpu=True).ranking[0].terms}
    per_layer = 2 * (256 * 12 + 4) + 4 * 256 + 8 * 256 + 4 * 256 + 16 * 768 + 4 * 4
    assert terms == {
        "weights": 4_196_608 * 4,
        "optimizer_states": 4_196_608 * 8,
        "activations": 512 * (4 * per_layer + 12 * 256 + 4),
        "attention_mask": 2 * 256 * 256 * 4 * 4,
        "positions": 512 * 2 * 4 * 64,
        "logits_and_loss": 512 * 4096 * 12,
    }


@pytest.mark.parametrize(
    ("overrides", "method", "traced"),
    [
        ((), "full", 118_912),
        (("memory.attention=eager",), "full", 507_904),
        (("lora.dropout=0", "memory.profile=hf"), "lora", 168_512),
        (("lora.dropout=0", "memory.profile=hf", "lora.targets=[q_proj, v_proj]"), "lora", 102_656),
    ],
)
def test_saved_bytes_of_a_token_in_a_layer_are_those_of_published_traces(one_b, overrides, method: str, traced: int):
    plan = one_b(*overrides, method=method)
    mask_of_a_token = 0 if plan.is_eager else 2 * plan.S
    roots = 2 * 4  # of the norms, which the traces did not count
    layer = Activations.of(plan).layer
    assert sum(layer.values()) == plan.T * (traced - mask_of_a_token + roots)


def test_paged_states_lie_outside_the_allocator(recipe):
    """Of 4.2 M parameters the 2,304 of the norms are small; every matrix has more than 100,000 elements or 65,536."""
    of = [estimate(recipe(f"optimizer.name={name}"), on_cpu=False) for name in ("adamw8bit", "paged_adamw8bit")]
    plain, paged = ({term.name: term.num_bytes for term in one.instants[-2].terms} for one in of)
    outside = {term.name: term.num_bytes for term in of[1].overhead}["paged_states"]
    narrow = 4 * 2 * 256 * 128 + 4 * 2 * 256 * 256
    assert outside == 2 * (4_196_608 - 9 * 256 - narrow)
    assert plain["optimizer_states"] - paged["optimizer_states"] == outside


def test_the_first_step_has_no_states(recipe):
    instants = {one.name: one for one in estimate(recipe(), on_cpu=True).instants}
    first, later = instants["first_step_backward"], instants["loss_backward"]
    assert later.num_bytes - first.num_bytes == 8 * 4_196_608


def test_an_adapter_on_the_head_and_the_embedding_counts(recipe):
    def trained(*targets: str) -> int:
        of = recipe(f"lora.targets=[{', '.join(targets)}]", "lora.rank=8", base="smollm2-135m-instruct", method="lora")
        return estimate(of, on_cpu=False).trainable

    rows = 8 * (49152 + 576)
    assert trained("q_proj", "lm_head") == trained("q_proj", "embed_tokens") == trained("q_proj") + rows


def test_a_window_shorter_than_the_rows_brings_masks(tmp_path, recipe):
    import json

    from training.recipe.load import load

    config = {
        "model_type": "gemma3_text", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16,
        "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 128,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    path = tmp_path / "windows.yaml"
    path.write_text("name: windows\nmethod: full\nmodel: {config: config.json}\nstop: {max_steps: 1}\n")

    def mask(length: int) -> int:
        return activations.mask(Plan.of(load(path, [f"data.seq_len={length}"]).recipe))

    assert (mask(127), mask(128)) == (0, 128 * 128 * 2 * 5)  # five of six layers, in 16 bits


def test_nf4_weighs_what_was_measured(recipe):
    """Qwen3-8B: 0.516 bytes for each element of the blocks' matrices, 16 bits for the rest, float32 adapters."""
    quantised = recipe("memory.weights=nf4", base="qwen3-8b", method="qlora")
    load = estimate(quantised, on_cpu=False).instants[0].terms[0].num_bytes
    linears = 36 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 12288)
    adapters = 36 * 16 * ((4096 + 4096) * 2 + (4096 + 1024) * 2 + (4096 + 12288) * 3)
    assert load == pytest.approx(linears * 0.515869 + (8_190_735_360 - linears) * 2 + adapters * 4, rel=1e-4)


def test_the_optimizer_instant_is_the_textbook_16_bytes_a_parameter(recipe):
    """B72: weights, gradients and both moments of 124,439,808 parameters are counted from the start."""
    moments = {one.name: one.num_bytes for one in estimate(recipe(), on_cpu=True).instants}
    assert moments["optimizer_step"] == 16 * 4_196_608
    shape = ("vocab_size=50464", "hidden_size=768", "intermediate_size=4288", "num_hidden_layers=7",
             "num_attention_heads=12", "num_key_value_heads=12")  # fmt: skip
    small = estimate(recipe(*(f"model.arch.{one}" for one in shape)), on_cpu=True)
    step = next(one for one in small.instants if one.name == "optimizer_step")
    terms = {term.name: term.num_bytes for term in step.terms}
    assert small.parameters == 124_439_808 and step.num_bytes == 1_991_036_928
    assert terms["optimizer_states"] / (1 << 20) == pytest.approx(949.4, abs=0.05)


@pytest.mark.parametrize(("vocabulary", "tokens"), [(4096, 8192), (50257, 640), (151936, 192), (1 << 24, 64)])
def test_by_default_the_logits_of_as_many_positions_exist_as_128_mib_hold(recipe, vocabulary: int, tokens: int):
    def at_once(micro_batch: int, *more: str) -> int:
        changed = (f"model.arch.vocab_size={vocabulary}", f"data.micro_batch={micro_batch}", "data.seq_len=256")
        return Plan.of(recipe(*changed, *more), on_cpu=True).logit_tokens

    assert at_once(64) == tokens
    assert at_once(64, "memory.loss_chunk=0") == 64 * 256 and at_once(64, "memory.loss_chunk=100") == 100
    assert at_once(1) == min(tokens, 256)


@pytest.mark.parametrize(
    ("batch", "length", "vocabulary", "sixteen", "thirty_two"),
    [(8, 1024, 50257, 785.3, 1570.5), (1, 4096, 151936, 1187.0, 2374.0)],
)
def test_evaluation_has_its_logits(recipe, batch, length, vocabulary, sixteen, thirty_two):
    """B69: one tensor of logits in 16 and in 32 bits, to a tenth of a MiB; more batches need no more."""
    fixed = ("model.arch.max_position_embeddings=8192", "model.arch.hidden_size=64", "model.arch.num_hidden_layers=1",
             "memory.loss_chunk=0")  # fmt: skip
    changed = (*fixed, f"data.micro_batch={batch}", f"data.seq_len={length}", f"model.arch.vocab_size={vocabulary}")

    def evaluation(*more: str) -> int:
        moments = {one.name: one for one in estimate(recipe(*changed, *more), on_cpu=True).instants}
        return next(term for term in moments["evaluation"].terms if term.name == "logits_and_loss").num_bytes

    # in either type: the float32 logits and their log-softmax; 16-bit ones have gone by then
    mib = 1 << 20
    assert evaluation("memory.weights=bf16") / 4 / mib == pytest.approx(sixteen, abs=0.05)
    assert evaluation("memory.weights=fp32") / 2 / mib == pytest.approx(thirty_two, abs=0.05)
    assert evaluation("evaluate.records=10000") == evaluation("evaluate.records=1")


def test_terms_add_up_and_every_one_has_its_equation_and_source(recipe):
    for weights, attention, tied in itertools.product(("fp32", "bf16"), ("sdpa", "eager"), ("true", "false")):
        changed = recipe(
            f"memory.weights={weights}", f"memory.attention={attention}", f"model.arch.tie_word_embeddings={tied}"
        )
        result = estimate(changed, on_cpu=False)
        document = result.to_json()
        assert sum(document["terms"].values()) == result.peak.allocated_bytes == max(document["instants"].values())
        assert document["peak"]["phase"] in document["instants"]
        assert result.peak.allocated_bytes < result.peak.reserved_bytes < result.peak.device_bytes
        assert all(term.equation and term.source for one in result.instants for term in one.terms)
        assert result.assumptions


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("data.micro_batch", range(2, 34, 4)),
        ("data.seq_len", range(16, 512, 31)),
        ("model.arch.num_hidden_layers", range(1, 30, 4)),
    ],
)
def test_more_never_needs_less(recipe, key: str, values: range):
    for checkpointing, attention in itertools.product(("true", "false"), ("sdpa", "eager")):
        fixed = (
            f"memory.gradient_checkpointing={checkpointing}", f"memory.attention={attention}",
            "model.arch.max_position_embeddings=512",
        )  # fmt: skip
        needs = [estimate(recipe(*fixed, f"{key}={value}"), on_cpu=True).peak.device_bytes for value in values]
        assert needs == sorted(needs) and needs[0] < needs[-1]


def test_a_target_that_matches_nothing_is_told_with_those_that_exist(recipe):
    with pytest.raises(UserError, match="matches no layer") as caught:
        estimate(recipe("lora.targets=[qkv]", base="smollm2-135m-instruct", method="lora"), on_cpu=False)
    assert "q_proj" in str(caught.value)


# ---- levers and sizes


@pytest.mark.parametrize(("variable", "key"), [("batch", "data.micro_batch"), ("seq", "data.seq_len")])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_largest_size_is_the_border_itself(recipe, variable: str, key: str, attention: str):
    device = devices.Device("a card", "cuda", 4 * GIB, 0)
    fixed = ("model.arch.max_position_embeddings=1000000", f"memory.attention={attention}")
    found = solve.largest(recipe(*fixed), variable, device, max_positions=None, on_cpu=False)

    def need(value: int) -> int:
        return estimate(recipe(*fixed, f"{key}={value}"), on_cpu=False).peak.device_bytes

    assert need(found.value) == found.device_bytes <= device.usable_bytes < need(found.value + 1)


def test_the_largest_rank_is_the_border_itself(recipe):
    changed = recipe("data.seq_len=512", "memory.weights=nf4", base="qwen3-8b", method="qlora")
    device = devices.Device("a card", "cuda", 16 * GIB, 0)
    found = solve.largest(changed, "rank", device, max_positions=None, on_cpu=False)

    def need(rank: int) -> int:
        return estimate(advice.with_size(changed, rank=rank), on_cpu=False).peak.device_bytes

    assert 1 < found.value < 4096
    assert need(found.value) == found.device_bytes <= device.usable_bytes < need(found.value + 1)
    with pytest.raises(UserError, match="no adapter"):
        solve.largest(recipe(), "rank", device, max_positions=None, on_cpu=False)


def test_solving_says_when_nothing_fits_and_when_positions_end(recipe):
    small = devices.Device("a small card", "cuda", GIB, 0)
    assert solve.largest(recipe(), "batch", small, max_positions=None, on_cpu=False).value is None
    large = devices.Device("a large card", "cuda", 80 * GIB, 0)
    ended = solve.largest(recipe(), "seq", large, max_positions=512, on_cpu=False)
    assert (ended.value, ended.limit) == (512, "the model's positions")
    with pytest.raises(UserError, match="nothing to solve against"):
        solve.largest(recipe(), "batch", None, max_positions=None, on_cpu=False)


def test_levers_are_priced_by_the_estimate_itself(recipe):
    long = ("data.seq_len=512", "model.arch.max_position_embeddings=512")
    heavy = (*long, "data.micro_batch=16", "memory.weights=bf16", "optimizer.impl=foreach", "memory.attention=eager")
    now = estimate(recipe(*heavy), on_cpu=False)
    found = advice.levers(recipe(*heavy), now, None, on_cpu=False)
    assert {lever.override for lever in found} == {
        "data.micro_batch=8 batch.accumulate=2",
        "data.seq_len=256",
        "memory.gradient_checkpointing=true",
        "memory.attention=sdpa",
        "optimizer.name=adamw8bit",
        "optimizer.impl=fused",
        "memory.loss_chunk=128",
    }
    for lever in found:
        pulled = dict(pair.split("=") for pair in (*heavy, *lever.override.split()))
        then = estimate(recipe(*(f"{key}={value}" for key, value in pulled.items())), on_cpu=False)
        assert then.peak.device_bytes == lever.device_bytes == now.peak.device_bytes - lever.saved_bytes
    costs = [lever.cost for lever in found]
    assert costs == sorted(costs, key=advice._COSTS.index) and costs[0] == "nothing" and costs[-1] == "shorter context"


def test_eight_bit_states_are_advised_on_a_gpu_alone(recipe):
    wide = recipe("model.arch.vocab_size=100000", "data.seq_len=16", "memory.weights=fp32")
    on_gpu, on_cpu = (
        {one.override for one in advice.levers(wide, estimate(wide, on_cpu=cpu), None, on_cpu=cpu)}
        for cpu in (False, True)
    )
    assert "optimizer.name=adamw8bit" in on_gpu and "optimizer.name=adamw8bit" not in on_cpu


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
@pytest.mark.parametrize("checkpointing", ["true", "false"])
def test_adapters_beside_the_blocks_alone_are_planned(recipe, target, checkpointing):
    """With nothing trained in the blocks, no layer is computed again behind a head's adapter."""
    of = recipe(
        f"lora.targets=[{target}]", f"memory.gradient_checkpointing={checkpointing}", base="smollm2-135m-instruct",
        method="lora",
    )  # fmt: skip
    found = estimate(of, on_cpu=False)
    assert found.trainable == of.lora.rank * (49_152 + 576)
    assert found.peak.reserved_bytes > found.peak.allocated_bytes > 2 * 134_515_008


def test_what_a_model_does_not_allow_is_no_lever(tmp_path):
    """gemma2's capped scores have no path in SDPA."""
    config = {
        "model_type": "gemma2", "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "attn_logit_softcapping": 50.0,
        "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 1024,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    path = tmp_path / "capped.yaml"
    path.write_text("name: capped\nmethod: full\nmodel: {config: config.json}\nstop: {max_steps: 1}\n")
    eager = load(path, ["memory.attention=eager"]).recipe
    found = {lever.override for lever in advice.levers(eager, estimate(eager, on_cpu=False), None, on_cpu=False)}
    assert "memory.gradient_checkpointing=true" in found and "memory.attention=sdpa" not in found
    with pytest.raises(UserError, match="caps its scores"):
        estimate(load(path).recipe, on_cpu=False)
