"""The closed form: the instants of a training step, each a sum of terms, and the peak among them.

Every term is one function that gives bytes, equation and source. It imports no torch and reads no weights. What it
leaves out stands in `assumptions`. Legend in `training.calculator.plan`.
"""

from __future__ import annotations

from training.calculator import activations, runtime
from training.calculator import parallel as parallelism
from training.calculator.activations import Activations
from training.calculator.calibration import Calibration
from training.calculator.estimate import Estimate, Instant, Term
from training.calculator.parallel import Parallel
from training.calculator.plan import Plan
from training.calculator.replay import Replayed, replay
from training.calculator.standing import (
    accumulated_gradients,
    autocast_copies,
    gradients,
    load_temporaries,
    optimizer_states,
    rounding,
    step_temporaries,
    weights,
    workspaces,
)
from training.recipe import schema
from training.recipe.model import Recipe

_AUTOGRAD = "PyTorch's autograd: what is alive while this node runs"


def estimate(
    recipe: Recipe, *, on_cpu: bool | None = None, gpu: str | None = None, parallel: Parallel | None = None,
    calibration: Calibration | None = None,
) -> Estimate:  # fmt: skip
    """Estimate the peak memory of a recipe's step. Raises UserError where the model is not known.

    `on_cpu` says where it trains; None asks this machine, as the trainer does. `gpu` is the card's name, where known,
    and `calibration` what was measured of it, by default this machine's own record. `parallel` asks for one rank's
    share.
    """
    if on_cpu is None:
        from training.calculator import devices

        on_cpu = devices.trains_on_cpu(recipe)
    plan = Plan.of(recipe, on_cpu=on_cpu, gpu=gpu, parallel=parallel, calibration=calibration)
    replayed = None if on_cpu else replay(plan)
    moments = instants(plan, replayed)
    allocated = max(instant.num_bytes for instant in moments)
    overhead = runtime.overhead(plan, allocated, runtime.reserved_ratio(plan, allocated, replayed))
    return Estimate(
        parameters=plan.shape.parameters + (plan.trainable if plan.is_adapter else 0),
        trainable=plan.trainable,
        instants=moments,
        overhead=overhead,
        assumptions=(*parallelism.assumptions(plan), *_assumptions(plan), *runtime.assumptions(plan, overhead[1])),
    )


def instants(plan: Plan, replayed: Replayed | None = None) -> tuple[Instant, ...]:
    """The moments of a step, from the second one on, when the optimizer's states exist; of one rank where several.

    `replayed` tells what an allocator counts beside the bytes that are asked for; without it nothing is rounded.
    """
    return parallelism.of_rank(plan, _alone(plan, replayed))


def _alone(plan: Plan, replayed: Replayed | None) -> tuple[Instant, ...]:
    kept_by = Activations.of(plan)
    standing = (weights(plan), *_if(rounding(replayed)), *_if(workspaces(plan)), optimizer_states(plan))
    held = (*standing, *_if(accumulated_gradients(plan)), *_if(autocast_copies(plan)))
    mask, kept = (*_if(positions(plan)), *_if(attention_mask(plan))), _if(kept_outputs(plan))
    layers, is_recomputed = saved_layers(plan, kept_by), plan.recipe.memory.gradient_checkpointing
    saved = (*held, saved_activations(plan, kept_by), *mask)
    own_head = () if plan.accumulates and not plan.shape.tied else _if(head_gradient(plan))
    last = (*standing, gradients(plan), *kept)
    at_loss = (*saved, *_if(head_input(plan))) if plan.has_chunks else saved
    at = {
        "load": (weights(plan), *_if(load_temporaries(plan))),
        "layer_forward": (*held, layers, *mask, passing_layer(kept_by)) if is_recomputed else (),
        "forward_end": (*saved, *_if(head_input(plan)), *chunk_gradients(plan, 1), logits(plan)),
        "loss_backward": (*at_loss, *chunk_gradients(plan, 1), loss_backward(plan)),
        "head_backward": (*at_loss, *(chunk_gradients(plan, 2) or _if(head_gradient(plan))), head_backward(plan)),
        "chunks_end": (*saved, *chunk_gradients(plan, 1)) if plan.has_chunks else (),
        "norm_backward": (*saved, *own_head, norm_backward(kept_by)) if plan.has_chunks else (),
        "layer_backward": (*held, layers, *mask, *kept, *own_head, *layer_backward(plan, kept_by)),
        "first_layer_backward": (*standing, *mask, *kept, *first_layer_backward(plan, kept_by)),
        "backward_end": (*last, *_if(embedding_gradients(plan))),
        "optimizer_step": (*last, *_if(step_temporaries(plan))),
        "evaluation": (*standing, *evaluation(plan, kept_by)),
        "checkpoint_save": standing,
    }
    later = tuple(Instant(name, terms) for name, terms in at.items() if terms)
    return (*later, _first_step(later))


def _first_step(later: tuple[Instant, ...]) -> Instant:
    """The highest moment of the first step before its optimizer step: there are no states yet."""
    parts = ("forward", "backward")
    before = [instant for instant in later if any(part in instant.name for part in parts)]
    terms = [[term for term in instant.terms if term.name != "optimizer_states"] for instant in before]
    return Instant("first_step_backward", tuple(max(terms, key=lambda ones: sum(one.num_bytes for one in ones))))


def _if(term: Term) -> tuple[Term, ...]:
    """The term where it is anything at all."""
    return (term,) if term.num_bytes else ()


# ---- forward


def saved_activations(plan: Plan, kept: Activations) -> Term:
    """What the layers, the final norm and the head keep, at the end of the forward pass."""
    stored = saved_layers(plan, kept)
    last, told = kept.final_bytes, "" if plan.has_chunks else " and the head's input"
    return Term(
        "activations",
        stored.num_bytes + last,
        f"{stored.equation} + T * {last / plan.T:.10g} of the final norm{told}",
        stored.source,
    )


def _head_is_trained(plan: Plan) -> bool:
    return not plan.is_adapter or plan.adapts_head


def _head_input_bytes(plan: Plan) -> int:
    return plan.T * plan.z * plan.shape.hidden_size


def saved_layers(plan: Plan, kept: Activations) -> Term:
    shape = plan.shape
    if plan.recipe.memory.gradient_checkpointing:
        return stored_inputs(plan, shape.num_layers)
    stored = kept.first_layer_bytes + (shape.num_layers - 1) * kept.layer_bytes
    return Term("activations", stored, f"T * L * [{kept.equation(plan.T)}]", activations.SOURCE)


def stored_inputs(plan: Plan, num_layers: int) -> Term:
    """What checkpointing keeps."""
    size = plan.T * num_layers * plan.z * plan.shape.hidden_size
    return Term("activations", size, f"T * {num_layers} * z*h", "each layer's input (arXiv 1604.06174)")


def attention_mask(plan: Plan, *, is_passing: bool = False) -> Term:
    """The masks that stand; `is_passing` where layers keep nothing, so that one layer's copy is there at a time."""
    return Term(
        "attention_mask", activations.mask(plan, is_passing=is_passing), "B * S*S * (1 + e a layer; eager: z)",
        "packed rows need a block-diagonal mask (SDPA: an additive copy in each layer); eager attention always has one",
    )  # fmt: skip


def positions(plan: Plan) -> Term:
    """The rotary tables of a step, which every layer reads; packed rows have positions of their own."""
    size = activations.position_rows(plan) * plan.S * 2 * plan.z * plan.shape.rotary_dim
    return Term("positions", size, "2z*d a position", "cosines and sines (arXiv 2104.09864)")


def head_input(plan: Plan) -> Term:
    """The hidden states that have a label, which the trainer's step holds where the head does not keep them."""
    is_kept = plan.is_hf or (_head_is_trained(plan) and not plan.has_chunks)
    return Term("hidden_states", 0 if is_kept else _head_input_bytes(plan), "T * z*h", "the head's input")


def logits(plan: Plan) -> Term:
    """The plain step's model holds its logits while the loss works on a copy; the trainer's step lets go of them."""
    each = 8 + (plan.logit_bytes if plan.is_hf and plan.logit_bytes < 4 else 0) + plan.capped_logit_bytes
    return Term(
        "logits_and_loss", plan.logit_tokens * plan.shape.vocab_size * each, f"{each} * V a token at once",
        "float32 logits and their log-softmax (torch cross_entropy), beside 16-bit ones that the model still holds; "
        "of capped ones their tanh",
    )  # fmt: skip


# ---- backward


def loss_backward(plan: Plan) -> Term:
    own = schema.loss_bytes(plan.recipe.method)
    told = {12: "log-softmax and two float32 gradients", 8: "the logits and their float32 gradient"}.get(
        own, f"{own} B"
    )
    each = own + plan.kept_logit_bytes + plan.capped_logit_bytes
    return Term(
        "logits_and_loss", plan.logit_tokens * plan.shape.vocab_size * each, f"{each} * V a token at once",
        f"{told}, beside the logits where outputs are kept alive",
    )  # fmt: skip


def head_backward(plan: Plan) -> Term:
    e = plan.logit_bytes
    casts = e + (4 if e < 4 else 0)
    scales = 2 * e if plan.shape.logit_cap else 0
    adapter = 2 * plan.a + e if plan.adapts_head else 0
    each = max(casts, scales, adapter) + plan.kept_logit_bytes + plan.capped_logit_bytes
    return Term(
        "logits_and_loss", plan.logit_tokens * plan.shape.vocab_size * each, f"{each} * V a token at once",
        "the logits' gradient, cast back to their type, beside the logits where outputs are kept alive",
    )  # fmt: skip


def kept_outputs(plan: Plan) -> Term:
    """The logits, for as long as the caller holds the model's outputs."""
    each = plan.kept_logit_bytes
    return Term("kept_outputs", plan.logit_tokens * plan.shape.vocab_size * each, f"{each} * V a token", "ModelOutput")


def head_gradient(plan: Plan) -> Term:
    """The head's own gradient; a tied head's lives until the embedding's joins it."""
    trained = not plan.is_adapter
    return Term(
        "head_gradient", plan.shape.embedding_parameters * plan.weight_bytes if trained else 0, "e * V*h", _AUTOGRAD
    )


def chunk_gradients(plan: Plan, heads: int) -> tuple[Term, ...]:
    """What a loss in chunks makes going forward: the hidden states' gradients, and the head's.

    `heads` is 1 for the sum so far, 2 with a chunk's own beside it.
    """
    if not plan.has_chunks:
        return ()
    hidden, one = Term("hidden_gradients", _head_input_bytes(plan), "T * z*h", "of all chunks"), head_gradient(plan)
    return hidden, *_if(Term(one.name, heads * one.num_bytes, f"{heads} * {one.equation}", one.source))


def norm_backward(kept: Activations) -> Term:
    return Term("norm_backward", kept.norm_flight_bytes, "the final norm walked back, its gradients", _AUTOGRAD)


def layer_backward(plan: Plan, kept: Activations) -> tuple[Term, ...]:
    """Gradients in flight in one layer; with checkpointing also the layer's activations, computed again."""
    flight = Term("layer_backward", kept.flight_bytes, "one layer's operations walked back, their gradients", _AUTOGRAD)
    how = f"T * [{kept.equation(plan.T)}] without the input"
    again = Term("recomputed_layer", kept.recomputed_bytes, how, activations.SOURCE)
    return (flight, *_if(again))


def first_layer_backward(plan: Plan, kept: Activations) -> tuple[Term, ...]:
    """The layer whose backward comes last: every other layer's set is free, and all the other gradients stand."""
    missing = 0 if plan.accumulates else plan.layer_trainable_bytes
    if not (plan.is_adapter or plan.accumulates or plan.shape.tied):
        missing += plan.shape.embedding_parameters * plan.weight_bytes
    grown = Term("gradients", plan.trainable_bytes - missing, "trained but for this layer and the embedding", _AUTOGRAD)
    waiting = head_gradient(plan) if plan.shape.tied and plan.accumulates else None
    is_stored = plan.recipe.memory.gradient_checkpointing
    own_set = stored_inputs(plan, 1) if is_stored else layer_set(plan, kept, "activations")
    return (grown, *(_if(waiting) if waiting else ()), own_set, *layer_backward(plan, kept))


def layer_set(plan: Plan, kept: Activations, name: str) -> Term:
    """What one layer keeps for its backward."""
    return Term(name, kept.layer_bytes, f"T * [{kept.equation(plan.T)}]", activations.SOURCE)


def embedding_gradients(plan: Plan) -> Term:
    """What stands beside `.grad` when the embedding's gradient arrives last."""
    if plan.is_adapter:
        copies = 0
    elif plan.shape.tied:
        copies = 3 if plan.accumulates else 2
    else:
        copies = 1 if plan.accumulates else 0
    return Term(
        "embedding_gradients", copies * plan.shape.embedding_parameters * plan.weight_bytes, f"{copies} * e * V*h",
        "a tied head's and the embedding's contributions beside their sum",
    )  # fmt: skip


# ---- between steps


def passing_layer(kept: Activations) -> Term:
    """A layer whose modules keep nothing, beside its input."""
    return Term("passing_layer", kept.passing_bytes, "one layer's operations, nothing kept", activations.SOURCE)


def evaluation(plan: Plan, kept: Activations) -> tuple[Term, ...]:
    """One layer at a time with nothing saved, or the logits of a micro-batch behind the last hidden states."""
    streams = 2 * plan.T * plan.z * plan.shape.hidden_size
    stream = Term("hidden_states", streams, "T * 2z*h", "the layer's input, and the embedding's output")
    masks = (*_if(positions(plan)), *_if(attention_mask(plan, is_passing=True)))
    copies = 2 if plan.is_hf else 1
    hidden = copies * plan.e * plan.T * plan.shape.hidden_size
    head = (logits(plan), Term("hidden_states", hidden, f"T * {copies}e*h", "of the positions that have a label"))
    return max((stream, passing_layer(kept), *masks), head, key=lambda terms: sum(one.num_bytes for one in terms))


def _assumptions(plan: Plan) -> tuple[str, ...]:
    recipe = plan.recipe
    lines = [
        f"{plan.B} x {plan.S} tokens a micro-batch, every position trained, no step longer than that",
        "the peak is that of the second step and later; the first has no states before its optimizer step",
        "a checkpoint is written from the tensors themselves, without copies on the device",
        "modules as transformers 5.24 writes them, without torch.compile and without fused kernels",
    ]
    if recipe.memory.loss_chunk == "auto":
        lines.append(f"memory.loss_chunk auto: the logits of {plan.logit_tokens} positions at once")
    if recipe.memory.compile:
        lines.append("what a compiled step takes is not promised: this is the estimate of the plain one")
    if plan.is_adapter:
        lines.append(f"adapters in {plan.recipe.memory.adapter_dtype}")
    if plan.is_nf4:
        scales = "double quantisation" if recipe.memory.double_quant else "float32 scales"
        rest = "float32, as PEFT's preparation lifts them" if plan.lifts_to_float32 else "16 bits"
        lines.append(f"NF4 with {scales}; embedding, head and norms in {rest}")
    if recipe.optimizer.name == "paged_adamw8bit":
        lines.append("paged optimizer states are outside the allocator, and counted as if they stayed on the device")
    if plan.B > 1 and not (plan.has_mask or plan.is_flash or plan.is_eager):
        layers = 1 if recipe.memory.gradient_checkpointing else plan.shape.num_layers
        size = plan.B * plan.S * plan.S * (1 + plan.e * layers)
        lines.append(f"rows of one length; shorter ones among them bring a mask of {size / 2**20:.0f} MiB more")
    if plan.is_flash:
        lines.append("FlashAttention's scratch as that of SDPA's kernels: a float32 sum of the queries' gradient")
    return tuple(lines)
