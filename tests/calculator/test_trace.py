"""A step under fake tensors: against a published run, and against the formula."""

import pytest

from training.calculator import published
from training.calculator.formula import instants
from training.calculator.plan import Plan
from training.core.errors import Problems


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "allocated", "reserved"), [("F016", 0.001, 0.01), ("F014", 0.001, 0.01), ("F015", 0.002, 0.07)]
)
def test_published_runs_are_met(tmp_path, name: str, allocated: float, reserved: float):
    """SmolLM2-135M on a T4: fp16 LoRA with both attentions, and QLoRA (whose loader leaves other blocks free)."""
    from training.calculator.trace import trace

    row = next(row for row in published.rows() if row["id"] == name)
    measured = {one.kind: one.num_bytes for one in row.measured}
    traced = trace(Plan.of(row.recipe(tmp_path), gpu="T4"))
    assert traced.allocated_bytes == pytest.approx(measured["allocated"], rel=allocated)
    assert traced.reserved_bytes == pytest.approx(measured["reserved"], rel=reserved)
    assert set(traced.phases) == {"load", "forward", "backward", "optimizer_step"}


def test_a_step_that_is_not_the_plain_one_is_refused_with_every_reason(recipe):
    from training.calculator.trace import trace

    with pytest.raises(Problems) as caught:
        trace(Plan.of(recipe("optimizer.name=adamw8bit")))
    text = str(caught.value)
    assert all(key in text for key in ("memory.profile", "optimizer.name", "data.packing"))


SMALL = """name: small
method: {method}
model: {{config: config.json}}
stop: {{max_steps: 1}}
data: {{seq_len: 512, micro_batch: 2}}
batch: {{accumulate: {accumulate}}}
optimizer: {{impl: {impl}}}
memory: {{weights: {weights}, attention: {attention}, gradient_checkpointing: {checkpointing}, profile: hf}}
"""
CONFIG = {
    "vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 2,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("qwen2", True), ("qwen3", False), ("mistral", True)])
def test_formula_and_trace_agree(tmp_path, method, attention, checkpointing, family, tied):
    import json

    from training.calculator.trace import trace
    from training.recipe.load import load

    config = CONFIG | {"model_type": family, "tie_word_embeddings": tied, "head_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    path = tmp_path / "small.yaml"
    weights = {"full": "bf16", "lora": "bf16", "qlora": "nf4"}[method]
    text = SMALL.format(
        method=method, weights=weights, attention=attention, checkpointing=str(checkpointing).lower(), impl="foreach",
        accumulate=1 + tied,
    )  # fmt: skip
    path.write_text(text + ("" if method == "full" else "lora: {rank: 8, dropout: 0}\n"))
    plan = Plan.of(load(path).recipe)
    traced = trace(plan).allocated_bytes
    assert max(one.num_bytes for one in instants(plan)) == pytest.approx(traced, rel=0.02)
