"""Bytes that one token leaves behind in one layer for the backward pass, by attention path and by what is trained.

The coefficients are those of Hugging Face's Llama-type modules, read from traces of their saved tensors (the trace is
repeated by a test). Legend in `training.calculator.plan`.
"""

from __future__ import annotations

from training.calculator.plan import ADAPTER_BYTES, Plan

EQUATION = "norms 2h(4+2e) + q e*nq*d + k,v 2e*nk*d + attention e*nq*d + mlp 4e*f"
SOURCE = "saved tensors of transformers' Llama modules; the reference form is Megatron's (arXiv 2205.05198, eq. 2)"


def per_token_layer(plan: Plan) -> int:
    """Saved bytes of one token in one layer without checkpointing, the mask apart."""
    saved = _norms(plan) + _attention(plan) + _feed_forward(plan)
    return saved + _adapters(plan)


def _norms(plan: Plan) -> int:
    """Two norms: the float32 input, the normalised copy where the gain is trained, the output for its linears."""
    h, e = plan.shape.hidden_size, plan.e
    normalised = 0 if plan.is_adapter else e * h
    saved = 2 * (4 * h + normalised)
    saved += sum(e * h for consumers in (_QKV, _GATE_UP) if _keeps_input(plan, consumers))
    if plan.shape.query_key_norms:
        heads = (plan.shape.num_heads + plan.shape.num_key_value_heads) * plan.shape.head_dim
        saved += heads * (4 + (0 if plan.is_adapter else e))
    return saved


def _attention(plan: Plan) -> int:
    """q, k, v and the output; the softmax's statistics, or on the eager path the softmax itself."""
    e, nq = plan.e, plan.shape.num_heads
    saved = e * plan.query_width + 2 * e * plan.key_width + e * plan.query_width
    if plan.is_eager:
        return saved + nq * plan.S * (4 + (e if e < 4 else 0))
    return saved + 4 * nq


def _feed_forward(plan: Plan) -> int:
    """gate, its silu, up, and their product where the down projection trains its weight or adapter on it."""
    f, e = plan.shape.intermediate_size, plan.e
    return 3 * e * f + (e * f if _keeps_input(plan, ("down_proj",)) else 0)


_QKV, _GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")


def _keeps_input(plan: Plan, consumers: tuple[str, ...]) -> bool:
    """Whether linears' shared input is kept in the weights' type: for their gradients, or for adapters of that type."""
    if not plan.is_adapter:
        return True
    return plan.e == ADAPTER_BYTES and any(one.name in consumers for one in plan.adapted)


def _adapters(plan: Plan) -> int:
    """Each adapted linear keeps its rank-r product, and its input in the adapter's type where that differs."""
    if not plan.is_adapter:
        return 0
    own_input = plan.e != ADAPTER_BYTES
    dropout = plan.recipe.lora.dropout > 0
    total = 0
    for one in plan.adapted:
        total += ADAPTER_BYTES * plan.recipe.lora.rank
        total += ADAPTER_BYTES * one.in_features if own_input or dropout else 0
        total += one.in_features if dropout else 0  # the dropout's mask, a byte an element
    return total


def mask(plan: Plan) -> int:
    """The block-diagonal mask of packed rows: one of bool for the batch, and an additive copy in every layer."""
    if not plan.has_mask:
        return 0
    layers = 1 if plan.recipe.memory.gradient_checkpointing else plan.shape.num_layers
    copies = 0 if plan.is_eager else layers * plan.e
    return plan.B * plan.S * plan.S * (1 + copies)


def in_flight(plan: Plan) -> int:
    """The most that one layer's backward holds beyond its saved set: in its feed-forward half, or in its attention.

    When attention goes backward the feed-forward half has given its set back, and its weights' gradients stand.
    """
    e, shape = plan.e, plan.shape
    stream = 2 * e * shape.hidden_size
    feed_forward = plan.T * (stream + 2 * e * shape.intermediate_size)
    scores = shape.num_heads * plan.S * (8 - (e if e < 4 else 0)) if plan.is_eager else 0
    attention = plan.T * (stream + 4 * e * plan.query_width + scores - _feed_forward(plan) - _norms(plan) // 2)
    if not plan.is_adapter and not plan.accumulates:
        attention += 3 * e * shape.hidden_size * shape.intermediate_size
    return max(feed_forward, attention)
