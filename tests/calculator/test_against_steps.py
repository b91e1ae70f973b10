"""The formula's tensors held against real training steps on the CPU, counted by PyTorch's profiler, byte for byte."""

import pytest

from training.calculator.formula import estimate
from training.recipe.model import Recipe

SMALL = (
    "model.arch.hidden_size=128",
    "model.arch.intermediate_size=384",
    "model.arch.num_hidden_layers=3",
)
SIZES = {  # each lets another instant win
    "activations": ("model.arch.vocab_size=512", "data.micro_batch=2", "data.seq_len=256"),
    "vocabulary": ("model.arch.vocab_size=16384", "data.micro_batch=1", "data.seq_len=64"),
    "logits": ("model.arch.vocab_size=4096", "data.micro_batch=2", "data.seq_len=256"),
}


def measured_bytes(recipe: Recipe) -> int:
    """The peak of allocated bytes in a second step of the trainer's kind: packed rows, one loss over all positions."""
    import torch
    from torch.profiler import profile
    from transformers import AutoConfig, AutoModelForCausalLM

    arch = dict(recipe.model.arch)
    family, _ = arch.pop("family"), arch.pop("rope_theta")
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[recipe.memory.weights]
    config = AutoConfig.for_model(family, **arch, use_cache=False)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=recipe.memory.attention).train()
    if recipe.memory.gradient_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(
        model.parameters(), fused=recipe.optimizer.impl == "fused", foreach=recipe.optimizer.impl == "foreach"
    )
    ids_BT = torch.randint(0, arch["vocab_size"], (recipe.data.micro_batch, recipe.data.seq_len))
    positions_BT = torch.arange(recipe.data.seq_len).expand_as(ids_BT) % (recipe.data.seq_len // 2)
    all_BT = torch.ones_like(ids_BT, dtype=torch.bool)

    def loss() -> torch.Tensor:
        hidden_BTD = model.base_model(input_ids=ids_BT, position_ids=positions_BT).last_hidden_state
        logits_NV = model.get_output_embeddings()(hidden_BTD[all_BT])
        return torch.nn.functional.cross_entropy(logits_NV.float(), ids_BT[all_BT], reduction="sum")

    def step() -> None:
        for _ in range(recipe.batch.accumulate):
            loss().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    states = [tensor for state in optimizer.state.values() for tensor in state.values()]
    now = sum(tensor.nbytes for tensor in (*model.parameters(), *states))
    with profile(profile_memory=True) as profiled:
        step()
    events = profiled.profiler.kineto_results.events()
    peak = now
    for _, num_bytes in sorted((one.start_ns(), one.nbytes()) for one in events if one.name() == "[memory]"):
        now += num_bytes
        peak = max(peak, now)
    return peak


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("weights", "attention", "tied", "accumulate"),
    [
        ("fp32", "sdpa", "true", 1),
        ("fp32", "eager", "false", 2),
        ("bf16", "sdpa", "false", 1),
        ("bf16", "eager", "true", 2),
    ],
)
def test_a_step_needs_what_the_formula_says(recipe, size, weights, attention, tied, accumulate):
    changed = recipe(
        *SMALL, *SIZES[size], f"memory.weights={weights}", f"memory.attention={attention}",
        f"model.arch.tie_word_embeddings={tied}", f"batch.accumulate={accumulate}",
    )  # fmt: skip
    assert estimate(changed, on_cpu=True).peak.allocated_bytes == pytest.approx(measured_bytes(changed), rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(("weights", "attention"), [("fp32", "sdpa"), ("bf16", "eager")])
def test_a_checkpointed_step_is_not_under_and_within_6_percent(recipe, weights, attention):
    changed = recipe(
        *SMALL, *SIZES["activations"], f"memory.weights={weights}", f"memory.attention={attention}",
        "memory.gradient_checkpointing=true", "batch.accumulate=2",
    )  # fmt: skip
    error = estimate(changed, on_cpu=True).peak.allocated_bytes / measured_bytes(changed) - 1
    assert 0 <= error < 0.06, error


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["foreach", "single"])
def test_the_optimizers_temporaries_are_counted(recipe, impl: str):
    changed = recipe(*SMALL, *SIZES["vocabulary"], "model.arch.tie_word_embeddings=false", f"optimizer.impl={impl}")
    assert estimate(changed, on_cpu=True).peak.allocated_bytes == pytest.approx(measured_bytes(changed), rel=0.02)
