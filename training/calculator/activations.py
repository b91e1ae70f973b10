"""Bytes that one token leaves behind in one layer for the backward pass, by attention path and by what is trained.

The coefficients are those of Hugging Face's Llama-type modules, read from traces of their saved tensors (the trace is
repeated by a test). Legend in `training.calculator.plan`.
"""

from __future__ import annotations

from training.calculator.plan import Plan

EQUATION = "norms 2h(4+2z) + q e*nq*d + k,v 2e*nk*d + attention e*nq*d + mlp 4e*f"
SOURCE = "saved tensors of transformers' Llama modules; the reference form is Megatron's (arXiv 2205.05198, eq. 2)"


def per_token_layer(plan: Plan) -> int:
    """Saved bytes of one token in one layer without checkpointing, the mask apart."""
    saved = _norms(plan) + _attention(plan) + _feed_forward(plan)
    return saved + _adapters(plan)


def _norms(plan: Plan) -> int:
    """Two norms: the float32 input, the normalised copy where the gain is trained, the output for its linears."""
    h, e, z = plan.shape.hidden_size, plan.e, plan.z
    normalised = 0 if plan.is_adapter else z * h
    saved = 2 * (4 * h + normalised)
    saved += sum(e * h for consumers in (_QKV, _GATE_UP) if _keeps_input(plan, consumers))
    if plan.shape.query_key_norms:
        heads = (plan.shape.num_heads + plan.shape.num_key_value_heads) * plan.shape.head_dim
        saved += heads * (4 + (0 if plan.is_adapter else z))
    return saved


def _attention(plan: Plan) -> int:
    """q, k, v and the output; the softmax's statistics, or on the eager path the softmax itself."""
    e, nq = plan.e, plan.shape.num_heads
    saved = e * plan.query_width + 2 * e * plan.key_width
    if plan.is_eager:
        return saved + _eager_output(plan) + nq * plan.S * (4 + (e if e < 4 else 0))
    return saved + e * plan.query_width + 4 * nq


def _eager_output(plan: Plan) -> int:
    """On the eager path the output is kept only by the linear that reads it, not for an adapter of another type."""
    return plan.e * plan.query_width if _keeps_input(plan, ("o_proj",)) else 0


def _feed_forward(plan: Plan) -> int:
    """gate, its silu, up, and their product where the down projection trains its weight or adapter on it."""
    f, e = plan.shape.intermediate_size, plan.e
    return 3 * e * f + (e * f if _keeps_input(plan, ("down_proj",)) else 0)


_QKV, _GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")


def _keeps_input(plan: Plan, consumers: tuple[str, ...]) -> bool:
    """Whether linears' shared input is kept in the weights' type: for their gradients, or for adapters of that type."""
    if not plan.is_adapter:
        return True
    return plan.e == plan.a and any(one.name in consumers for one in plan.adapted)


def _adapters(plan: Plan, names: tuple[str, ...] | None = None) -> int:
    """Each adapted linear keeps its rank-r product, and its input in the adapter's type where that differs."""
    if not plan.is_adapter:
        return 0
    own_input = plan.e != plan.a
    dropout = plan.recipe.lora.dropout > 0
    total = 0
    for one in plan.adapted:
        if names is not None and one.name not in names:
            continue
        total += plan.a * plan.recipe.lora.rank
        total += plan.a * one.in_features if own_input or dropout else 0
        total += one.in_features if dropout else 0  # the dropout's mask, a byte an element
    return total


def mask(plan: Plan, layers: int | None = None) -> int:
    """The attention mask of a batch, where attention takes one as a tensor; `layers` keep it, by default all that do.

    Packed rows: one of bool, and SDPA's additive copy in every layer. Eager attention: an additive one, causal or not.
    """
    scores = plan.B * plan.S * plan.S
    if plan.is_eager:
        return scores * plan.z
    if not plan.has_mask:
        return 0
    if layers is None:
        layers = 1 if plan.recipe.memory.gradient_checkpointing else plan.shape.num_layers
    return scores * (1 + layers * plan.e)


def recomputed(plan: Plan) -> int:
    """A layer's set under checkpointing: a float32 stream's first norm reads the stored input itself."""
    return plan.T * (per_token_layer(plan) - (4 * plan.shape.hidden_size if plan.z == 4 else 0))


def passing(plan: Plan) -> int:
    """The most bytes of one token in a layer that keeps nothing, its input apart: feed-forward half or attention."""
    shape, e = plan.shape, plan.e
    keys = 2 * shape.num_key_value_heads * shape.head_dim + 2 * plan.key_width
    scores = shape.num_heads * (plan.S * (8 if e == 4 else 10) if plan.is_eager else 4)
    attention = e * (2 * plan.query_width + keys) + scores
    return e * shape.hidden_size + max(3 * e * shape.intermediate_size, attention)


def in_flight(plan: Plan, *, with_gradients: bool = True) -> int:
    """The most that one layer's backward holds beyond its saved set: in its feed-forward half, or in its attention.

    The down projection's gradient stands by then; when attention goes backward the feed-forward half has given its set
    back, and all its gradients stand (`with_gradients`: they are not counted elsewhere). A 4-bit matrix is unpacked for
    its own product alone, so none is while attention goes backward.
    """
    shape, trained = plan.shape, not plan.is_adapter
    stream = plan.z * shape.hidden_size
    feed_forward = plan.T * (2 * stream + 2 * plan.e * shape.intermediate_size)
    feed_forward += 2 * max(linear.weight for linear in shape.linears) if plan.is_nf4 else 0
    streams = 2 * stream if trained else stream
    attention = plan.T * (streams + _attention_in_flight(plan) - _free_in_attention(plan))
    if trained and with_gradients and not plan.accumulates:
        gradient = plan.weight_bytes * shape.hidden_size * shape.intermediate_size
        feed_forward, attention = feed_forward + gradient, attention + 3 * gradient
    return max(feed_forward, attention)


def _free_in_attention(plan: Plan) -> int:
    """The second norm, the feed-forward half, and what only the output projection and the values' product kept."""
    h = plan.shape.hidden_size
    free = _feed_forward(plan) + 4 * h + (0 if plan.is_adapter else plan.z * h)
    free += plan.e * h if _keeps_input(plan, _GATE_UP) else 0
    if plan.is_adapter:
        free += _adapters(plan, ("o_proj", *_GATE_UP, "down_proj"))
    if plan.is_eager and not plan.on_cpu:
        free += _eager_output(plan) + plan.e * plan.query_width  # and the values, once the scores have their gradient
    return free


def _attention_in_flight(plan: Plan) -> int:
    """Gradients of q, k, v and the output beside attention's set, or those of the scores on the eager path.

    CUDA's softmax keeps its gradient times its output in float32 while it writes its own gradient (SoftMax.cu,
    softmax_backward_cuda_out); its fused kernels sum the queries' gradient in float32.
    """
    e, nq = plan.e, plan.shape.num_heads
    if plan.on_cpu:
        scores = nq * plan.S * (8 - (e if e < 4 else 0)) if plan.is_eager else 0
        return 4 * e * plan.query_width + scores
    if plan.is_eager:
        return e * plan.query_width + nq * plan.S * (8 if e < 4 else 12)
    return (4 * e + (4 if e < 4 else 0)) * plan.query_width
