"""The closed form: the instants of a training step, each a sum of terms, and the peak among them.

Every term is one function that gives bytes, equation and source. It imports no torch and reads no weights. What it
leaves out stands in `assumptions`. Legend in `training.calculator.plan`.
"""

from __future__ import annotations

from training.calculator import activations, runtime
from training.calculator.estimate import Estimate, Instant, Term
from training.calculator.plan import ADAPTER_BYTES, Plan
from training.recipe.model import Recipe

_NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
_EIGHT_BIT_STATE_BYTES = 1 + 4 / 256
_AUTOGRAD = "PyTorch's autograd: what is alive while this node runs"


def estimate(recipe: Recipe, *, on_cpu: bool | None = None) -> Estimate:
    """Estimate the peak memory of a recipe's step. Raises UserError where the model is not known.

    `on_cpu` says where it trains; None asks this machine, as the trainer does.
    """
    if on_cpu is None:
        from training.calculator import devices

        on_cpu = devices.trains_on_cpu(recipe)
    plan = Plan.of(recipe)
    moments = instants(plan)
    allocated = max(instant.num_bytes for instant in moments)
    return Estimate(
        parameters=plan.shape.parameters + (plan.trainable if plan.is_adapter else 0),
        trainable=plan.trainable,
        instants=moments,
        overhead=runtime.overhead(allocated, on_cpu=on_cpu, is_eager=plan.is_eager),
        assumptions=(*_assumptions(plan), *runtime.assumptions(on_cpu=on_cpu)),
    )


def instants(plan: Plan) -> tuple[Instant, ...]:
    """The moments of a step, from the second one on, when the optimizer's states exist."""
    standing = (weights(plan), optimizer_states(plan))
    held = (*standing, *_if(accumulated_gradients(plan)))
    saved = (*held, saved_activations(plan), *_if(attention_mask(plan)))
    return (
        Instant("load", (weights(plan),)),
        Instant("forward_end", (*saved, logits(plan))),
        Instant("loss_backward", (*saved, loss_backward(plan))),
        Instant("head_backward", (*saved, head_backward(plan), *_if(head_gradient(plan)))),
        Instant("layer_backward", (*saved, *_if(head_gradient(plan)), *layer_backward(plan))),
        Instant("first_layer_backward", (*standing, *_if(attention_mask(plan)), *first_layer_backward(plan))),
        Instant("backward_end", (*standing, gradients(plan), *_if(embedding_gradients(plan)))),
        Instant("optimizer_step", (*standing, gradients(plan), *_if(step_temporaries(plan)))),
        Instant("evaluation", (*standing, *_if(attention_mask(plan)), evaluation(plan))),
        Instant("checkpoint_save", standing),
    )


def _if(term: Term) -> tuple[Term, ...]:
    """The term where it is anything at all."""
    return (term,) if term.num_bytes else ()


# ---- what stands through the whole step


def weights(plan: Plan) -> Term:
    shape = plan.shape
    if plan.is_nf4:
        rest = (shape.parameters - shape.linear_weights) * (4 if plan.is_hf else 2)
        base, how = (
            round(shape.linear_weights * _NF4_BYTES) + rest,
            f"0.516 * linears + {4 if plan.is_hf else 2} * rest",
        )
        source = "QLoRA (arXiv 2305.14314, sec. 3): NF4 blocks of 64, scales in 8 bits by blocks of 256"
    else:
        base, how, source = shape.parameters * plan.e, "e * parameters", "size of the tensors"
    if plan.is_adapter:
        base, how = base + plan.trainable * ADAPTER_BYTES, f"{how} + 4 * adapters"
    return Term("weights", base, how, source)


def optimizer_states(plan: Plan) -> Term:
    if plan.recipe.optimizer.name == "adamw":
        return Term(
            "optimizer_states", 2 * plan.trainable_bytes, "2 * trained, in their type",
            "AdamW's two moments (arXiv 1711.05101)",
        )  # fmt: skip
    small = 0 if plan.is_adapter else plan.shape.small_parameters
    quantised = round(2 * (plan.trainable - small) * _EIGHT_BIT_STATE_BYTES)
    return Term(
        "optimizer_states", quantised + 8 * small, "2 * (1 + 4/256) * trained, 8 for tensors under 4,096",
        "8-bit optimizers by blocks of 256 (arXiv 2110.02861), as bitsandbytes keeps them; paged: as resident",
    )  # fmt: skip


def gradients(plan: Plan) -> Term:
    return Term("gradients", plan.trainable_bytes, "trained, in their type", "`.grad` has its parameter's type")


def accumulated_gradients(plan: Plan) -> Term:
    """Gradients of the micro-batches before this one; with one micro-batch they were freed by the last step."""
    return Term(
        "gradients", plan.trainable_bytes if plan.accumulates else 0, "trained, in their type",
        "batch.accumulate > 1 keeps `.grad` between micro-batches",
    )  # fmt: skip


# ---- forward


def saved_activations(plan: Plan) -> Term:
    shape, e = plan.shape, plan.e
    final_norm = plan.T * shape.hidden_size * (4 + (1 if plan.is_adapter else 2) * e)
    if plan.recipe.memory.gradient_checkpointing:
        stream = 4 if plan.is_nf4 and plan.is_hf else e
        stored = plan.T * shape.num_layers * stream * shape.hidden_size
        return Term(
            "activations", stored + final_norm, "T * (L * e*h + final norm)", "each layer's input (arXiv 1604.06174)"
        )
    stored = plan.T * shape.num_layers * activations.per_token_layer(plan)
    return Term(
        "activations", stored + final_norm, f"T * (L * [{activations.EQUATION}] + final norm)", activations.SOURCE
    )


def attention_mask(plan: Plan) -> Term:
    return Term(
        "attention_mask", activations.mask(plan), "B * S*S * (1 + e a layer)",
        "packed rows need a block-diagonal mask, which SDPA turns into an additive copy in each layer",
    )  # fmt: skip


def logits(plan: Plan) -> Term:
    each = plan.logit_bytes + 4 + (4 if plan.logit_bytes < 4 else 0)
    return Term(
        "logits_and_loss", plan.logit_tokens * plan.shape.vocab_size * each, f"{each} * V a token at once",
        "logits, their float32 copy, log-softmax (torch cross_entropy)",
    )  # fmt: skip


# ---- backward


def loss_backward(plan: Plan) -> Term:
    each = 12 + (plan.logit_bytes if plan.is_hf else 0)
    return Term(
        "logits_and_loss", plan.logit_tokens * plan.shape.vocab_size * each, f"{each} * V a token at once",
        "log-softmax and two float32 gradients; outputs kept alive in the hf profile",
    )  # fmt: skip


def head_backward(plan: Plan) -> Term:
    each = plan.logit_bytes + (plan.logit_bytes if plan.is_hf else 0) + (4 if plan.logit_bytes < 4 else 0)
    return Term(
        "logits_and_loss", plan.logit_tokens * plan.shape.vocab_size * each, f"{each} * V a token at once",
        "the logits' gradient, cast back to their type; outputs kept alive in the hf profile",
    )  # fmt: skip


def head_gradient(plan: Plan) -> Term:
    """The head's own gradient; a tied head's lives until the embedding's joins it."""
    trained = not plan.is_adapter
    return Term("head_gradient", plan.shape.embedding_parameters * plan.e if trained else 0, "e * V*h", _AUTOGRAD)


def layer_backward(plan: Plan) -> tuple[Term, ...]:
    """Gradients in flight in one layer; with checkpointing also the layer's activations, computed again."""
    flight = Term(
        "layer_backward", activations.in_flight(plan),
        "T * (2e*h + 2e*f), or attention's 4e*nq*d and scores once the feed-forward set is free", _AUTOGRAD,
    )  # fmt: skip
    again = layer_set(plan, "recomputed_layer") if plan.recipe.memory.gradient_checkpointing else None
    largest = max(linear.weight for linear in plan.shape.linears)
    dequantised = Term(
        "dequantised_weight",
        2 * largest if plan.is_nf4 else 0,
        "2 * largest linear",
        "bitsandbytes' MatMul4Bit.backward",
    )
    return (*_if(flight), *((again,) if again else ()), *_if(dequantised))


def first_layer_backward(plan: Plan) -> tuple[Term, ...]:
    """The layer whose backward comes last: every other layer's set is free, and all the layers' gradients stand."""
    missing = 0 if plan.is_adapter or plan.accumulates or plan.shape.tied else plan.shape.embedding_parameters * plan.e
    grown = Term("gradients", plan.trainable_bytes - missing, "trained but for an untied embedding", _AUTOGRAD)
    waiting = head_gradient(plan) if plan.shape.tied and plan.accumulates else None
    own_set = () if plan.recipe.memory.gradient_checkpointing else (layer_set(plan, "activations"),)
    return (grown, *(_if(waiting) if waiting else ()), *own_set, *layer_backward(plan))


def layer_set(plan: Plan, name: str) -> Term:
    """What one layer keeps for its backward."""
    return Term(name, plan.T * activations.per_token_layer(plan), f"T * [{activations.EQUATION}]", activations.SOURCE)


def embedding_gradients(plan: Plan) -> Term:
    """What stands beside `.grad` when the embedding's gradient arrives last."""
    if plan.is_adapter:
        copies = 0
    elif plan.shape.tied:
        copies = 3 if plan.accumulates else 2
    else:
        copies = 1 if plan.accumulates else 0
    return Term(
        "embedding_gradients", copies * plan.shape.embedding_parameters * plan.e, f"{copies} * e * V*h",
        "a tied head's and the embedding's contributions beside their sum",
    )  # fmt: skip


# ---- between steps


def step_temporaries(plan: Plan) -> Term:
    impl = plan.recipe.optimizer.impl if plan.recipe.optimizer.name == "adamw" else "fused"
    copies, how = {
        "fused": (0, "0"),
        "foreach": (plan.trainable_bytes, "one copy of what is trained"),
        "single": (2 * plan.shape.largest_tensor * plan.e, "twice the largest tensor: a root and a quotient"),
    }[impl]
    return Term("step_temporaries", copies, how, f"torch.optim.AdamW, {impl}")


def evaluation(plan: Plan) -> Term:
    """One layer at a time and nothing saved (at most what it would keep), or the logits of a micro-batch after it."""
    return max(layer_set(plan, "evaluated_layer"), logits(plan), key=lambda term: term.num_bytes)


def _assumptions(plan: Plan) -> tuple[str, ...]:
    recipe = plan.recipe
    lines = [
        f"{plan.B} x {plan.S} tokens a micro-batch, every position trained, no step longer than that",
        "the peak is that of the second step and later, when the optimizer's states exist",
        "a checkpoint is written from the tensors themselves, without copies on the device",
        "modules as transformers 5.24 writes them, without torch.compile and without fused kernels",
    ]
    if recipe.memory.loss_chunk == "auto":
        lines.append("memory.loss_chunk auto: the logits of the whole micro-batch at once")
    if plan.is_adapter:
        lines.append("adapters in float32, without autocast")
    if plan.is_nf4:
        rest = "float32 (PEFT's preparation)" if plan.is_hf else "16 bits"
        lines.append(f"NF4 with double quantisation; embedding, head and norms in {rest}")
    if recipe.optimizer.name == "paged_adamw8bit":
        lines.append("paged optimizer states counted as if they stayed on the device")
    if plan.is_flash:
        lines.append("FlashAttention's own scratch memory is not counted")
    return tuple(lines)
