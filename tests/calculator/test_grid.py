"""Formula and trace over a grid of small recipes: two ways to the same allocated peak.

Widths are powers of two, whose tensors fill the allocator's blocks: in models as small as these the rests of
half-filled ones, whose place hangs on the order of every request, would outweigh what is asked for.
"""

import json
import random
from itertools import product

import pytest

from training.calculator.families import FAMILIES
from training.calculator.formula import instants
from training.calculator.plan import Plan
from training.calculator.replay import replay
from training.recipe.load import load

CONFIG = {
    "vocab_size": 2048, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 4096,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
RECIPE = """name: small
method: {method}
model: {{config: config.json}}
stop: {{max_steps: 1}}
data: {{seq_len: 512, micro_batch: 4}}
batch: {{accumulate: {accumulate}}}
optimizer: {{impl: {impl}}}
memory: {{weights: {weights}, attention: {attention}, gradient_checkpointing: {checkpointing}, profile: hf}}
"""
WEIGHTS = {"full": "bf16", "lora": "bf16", "qlora": "nf4"}
AXES = (list(WEIGHTS), ["sdpa", "eager"], ["true", "false"], ["fused", "foreach"], [1, 2], [True, False])
_EACH = 16


def cells(family: str) -> list[tuple]:
    """Some of the family's recipes, always the same."""
    return random.Random(family).sample(list(product(*AXES)), _EACH)


def plan(folder, family: str, cell: tuple) -> Plan:
    method, attention, checkpointing, impl, accumulate, tied = cell
    config = CONFIG | {"model_type": family, "tie_word_embeddings": tied}
    config |= {"num_key_value_heads": 8} if family == "gpt_neox" else {}
    (folder / "config.json").write_text(json.dumps(config))
    text = RECIPE.format(
        method=method, accumulate=accumulate, impl=impl, weights=WEIGHTS[method], checkpointing=checkpointing,
        attention="eager" if family == "gemma2" else attention,
    )  # fmt: skip
    path = folder / "small.yaml"
    path.write_text(text + ("" if method == "full" else "lora: {rank: 8, dropout: 0}\n"))
    return Plan.of(load(path).recipe)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_formula_and_trace_agree_within_2_percent(tmp_path, family: str):
    from training.calculator.trace import trace

    for cell in cells(family):
        of = plan(tmp_path, family, cell)
        summed = max(instant.num_bytes for instant in instants(of, replay(of)))
        assert summed == pytest.approx(trace(of).allocated_bytes, rel=0.02), cell


def test_the_grid_has_at_least_200_recipes():
    assert len({(family, cell) for family in FAMILIES for cell in cells(family)}) >= 200
