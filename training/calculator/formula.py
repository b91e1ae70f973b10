"""The closed form: the instants of a training step, each a sum of terms, and the peak among them.

Every term is one function that gives bytes, equation and source. It imports no torch and reads no weights. What it
leaves out stands in `assumptions`. Legend in `training.calculator.plan`.
"""

from __future__ import annotations

from training.calculator import activations, layers, runtime
from training.calculator import parallel as parallelism
from training.calculator.calibration import Calibration
from training.calculator.estimate import Estimate, Instant, Term
from training.calculator.parallel import Parallel
from training.calculator.plan import Plan
from training.calculator.standing import (
    accumulated_gradients,
    autocast_copies,
    gradients,
    load_temporaries,
    optimizer_states,
    rounding,
    rounding_of_all,
    step_temporaries,
    weights,
    workspaces,
)
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
    moments = instants(plan)
    overhead = runtime.overhead(plan, max(instant.num_bytes for instant in moments))
    return Estimate(
        parameters=plan.shape.parameters + (plan.trainable if plan.is_adapter else 0),
        trainable=plan.trainable,
        instants=moments,
        overhead=overhead,
        assumptions=(*parallelism.assumptions(plan), *_assumptions(plan), *runtime.assumptions(plan, overhead[1])),
    )


def instants(plan: Plan) -> tuple[Instant, ...]:
    """The moments of a step, from the second one on, when the optimizer's states exist; of one rank where several."""
    return parallelism.of_rank(plan, _alone(plan))


def _alone(plan: Plan) -> tuple[Instant, ...]:
    loaded, rest, scratch, moments = weights(plan), rounding(plan), _if(workspaces(plan)), optimizer_states(plan)
    states = 2 if plan.recipe.optimizer.name == "adamw" else 0
    copies = 1 if plan.recipe.optimizer.impl == "foreach" and states else 0
    is_recomputed = plan.recipe.memory.gradient_checkpointing

    def standing(more: int) -> tuple[Term, ...]:
        """What stands beside `more` tensors like each trained one."""
        rests = rounding_of_all(rest, plan, states + more)
        return (loaded, *_if(rests), *scratch, moments)

    held = (
        *standing(1 if plan.accumulates else 0), *_if(accumulated_gradients(plan)), *_if(autocast_copies(plan)),
    )  # fmt: skip
    kept, rests = (_if(term(plan)) for term in (kept_outputs, saved_rounding))
    mask = (positions(plan), *_if(attention_mask(plan)))
    saved = (*held, saved_activations(plan), *rests, *mask)
    in_layers = (*held, saved_layers(plan), *rests, *mask, *kept, *_if(head_gradient(plan)))
    last = (gradients(plan), *kept)
    joined, head = chunk_gradients(plan, 3), chunk_gradients(plan, 2) or _if(head_gradient(plan))
    at = {
        "load": (loaded, *_if(rest), *_if(load_temporaries(plan))),
        "layer_forward": (*held, saved_layers(plan), *mask, passing_layer(plan, 0)) if is_recomputed else (),
        "forward_end": (*saved, logits(plan)),
        "loss_backward": (*saved, *chunk_gradients(plan, 1), loss_backward(plan)),
        "head_backward": (*saved, *head, head_backward(plan)),
        "chunks_joined": (*saved, *joined) if joined else (),
        "layer_backward": (*in_layers, *layer_backward(plan)),
        "first_layer_backward": (*standing(1), *mask, *kept, *first_layer_backward(plan)),
        "backward_end": (*standing(1), *last, *_if(embedding_gradients(plan))),
        "optimizer_step": (*standing(1 + copies), *last, *_if(step_temporaries(plan))),
        "evaluation": (*standing(0), *evaluation(plan)),
        "checkpoint_save": standing(0),
    }
    return tuple(Instant(name, terms) for name, terms in at.items() if terms)


def _if(term: Term) -> tuple[Term, ...]:
    """The term where it is anything at all."""
    return (term,) if term.num_bytes else ()


# ---- forward


def saved_activations(plan: Plan) -> Term:
    """What the layers and the final norm keep, at the end of the forward pass."""
    stored = saved_layers(plan)
    final_norm = plan.T * plan.shape.hidden_size * (4 + (0 if plan.is_adapter else plan.z + plan.e))
    return Term("activations", stored.num_bytes + final_norm, f"{stored.equation} + final norm", stored.source)


def saved_layers(plan: Plan) -> Term:
    shape = plan.shape
    if plan.recipe.memory.gradient_checkpointing:
        stored = plan.T * shape.num_layers * plan.z * shape.hidden_size
        return Term("activations", stored, "T * L * z*h", "each layer's input (arXiv 1604.06174)")
    stored = plan.T * shape.num_layers * activations.per_token_layer(plan)
    return Term("activations", stored, f"T * L * [{activations.EQUATION}]", activations.SOURCE)


def saved_rounding(plan: Plan) -> Term:
    is_counted = not plan.on_cpu and not plan.recipe.memory.gradient_checkpointing
    size = layers.saved_rounding(plan) if is_counted else 0
    return Term("saved_rounding", size, "a few layers' requests replayed", "CUDACachingAllocator.cpp: should_split")


def attention_mask(plan: Plan, layers: int | None = None) -> Term:
    return Term(
        "attention_mask", activations.mask(plan, layers), "B * S*S * (1 + e a layer; eager: z)",
        "packed rows need a block-diagonal mask (SDPA: an additive copy in each layer); eager attention always has one",
    )  # fmt: skip


def positions(plan: Plan) -> Term:
    """The rotary tables of a step, which every layer reads; packed rows have positions of their own."""
    rows = plan.B if plan.recipe.data.packing else 1
    size = rows * plan.S * 2 * plan.z * plan.shape.head_dim
    return Term("positions", size, "2z*d a position", "cosines and sines (arXiv 2104.09864)")


def logits(plan: Plan) -> Term:
    """The plain step's model holds its logits while the loss works on a copy; the trainer's step lets go of them."""
    each = 8 + (plan.logit_bytes if plan.is_hf and plan.logit_bytes < 4 else 0)
    return Term(
        "logits_and_loss", plan.logit_tokens * plan.shape.vocab_size * each, f"{each} * V a token at once",
        "float32 logits and their log-softmax (torch cross_entropy), beside 16-bit ones that the model still holds",
    )  # fmt: skip


# ---- backward


def loss_backward(plan: Plan) -> Term:
    each = 12 + plan.kept_logit_bytes
    return Term(
        "logits_and_loss", plan.logit_tokens * plan.shape.vocab_size * each, f"{each} * V a token at once",
        "log-softmax and two float32 gradients, beside the logits where outputs are kept alive",
    )  # fmt: skip


def head_backward(plan: Plan) -> Term:
    each = plan.logit_bytes + plan.kept_logit_bytes + (4 if plan.logit_bytes < 4 else 0)
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
    """What a loss in chunks piles up while it goes back: the hidden states' gradients, and the head's.

    `heads` is 1 for the sum so far, 2 with the next chunk's beside it, 3 while the two are added up.
    """
    if plan.logit_tokens == plan.T:
        return ()
    hidden = Term("hidden_gradients", plan.T * plan.z * plan.shape.hidden_size, "T * z*h", "one part a chunk")
    one = head_gradient(plan)
    return hidden, *_if(Term(one.name, heads * one.num_bytes, f"{heads} * {one.equation}", one.source))


def layer_backward(plan: Plan) -> tuple[Term, ...]:
    """Gradients in flight in one layer; with checkpointing also the layer's activations, computed again."""
    flight = Term(
        "layer_backward", activations.in_flight(plan),
        "T * (2z*h + 2e*f) + an unpacked matrix, or attention's 4e*nq*d and scores with the feed-forward set free",
        _AUTOGRAD,
    )  # fmt: skip
    again = recomputed_layer(plan) if plan.recipe.memory.gradient_checkpointing else None
    return (*_if(flight), *((again,) if again else ()))


def first_layer_backward(plan: Plan) -> tuple[Term, ...]:
    """The layer whose backward comes last: every other layer's set is free, and those layers' gradients stand."""
    missing = plan.shape.layer_parameters + (0 if plan.shape.tied else plan.shape.embedding_parameters)
    if plan.is_adapter or plan.accumulates:
        missing = 0
    grown = Term(
        "gradients", plan.trainable_bytes - missing * plan.weight_bytes, "trained but for this layer and its input",
        _AUTOGRAD,
    )  # fmt: skip
    waiting = head_gradient(plan) if plan.shape.tied and plan.accumulates else None
    own_set = () if plan.recipe.memory.gradient_checkpointing else (layer_set(plan, "activations"),)
    return (grown, *(_if(waiting) if waiting else ()), *own_set, *layer_backward(plan))


def recomputed_layer(plan: Plan) -> Term:
    size = activations.recomputed(plan)
    return Term("recomputed_layer", size, f"T * [{activations.EQUATION}]", activations.SOURCE)


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
        "embedding_gradients", copies * plan.shape.embedding_parameters * plan.weight_bytes, f"{copies} * e * V*h",
        "a tied head's and the embedding's contributions beside their sum",
    )  # fmt: skip


# ---- between steps


def passing_layer(plan: Plan, streams: int) -> Term:
    """A layer whose modules keep nothing, beside `streams` residual streams that are not counted elsewhere."""
    each = streams * plan.z * plan.shape.hidden_size + activations.passing(plan)
    how = f"T * [{streams}z*h + e*h + max(3e*f, attention)]"
    return Term("passing_layer", plan.T * each, how, "what a layer's modules hold at once")


def evaluation(plan: Plan) -> tuple[Term, ...]:
    """One layer at a time with nothing saved, or the logits of a micro-batch behind the last hidden states."""
    hidden = 2 * plan.e * plan.T * plan.shape.hidden_size
    layer = (passing_layer(plan, 2), positions(plan), *_if(attention_mask(plan, layers=1)))
    head = (logits(plan), Term("hidden_states", hidden, "T * 2e*h", "all of them, and those that are trained on"))
    return max(layer, head, key=lambda terms: sum(term.num_bytes for term in terms))


def _assumptions(plan: Plan) -> tuple[str, ...]:
    recipe = plan.recipe
    lines = [
        f"{plan.B} x {plan.S} tokens a micro-batch, every position trained, no step longer than that",
        "the peak is that of the second step and later; the first has no states before its optimizer step",
        "a checkpoint is written from the tensors themselves, without copies on the device",
        "modules as transformers 5.24 writes them, without torch.compile and without fused kernels",
    ]
    if recipe.memory.loss_chunk == "auto":
        lines.append("memory.loss_chunk auto: the logits of the whole micro-batch at once")
    if plan.is_adapter:
        lines.append(f"adapters in {plan.recipe.memory.adapter_dtype}")
    if plan.is_nf4:
        scales = "double quantisation" if recipe.memory.double_quant else "float32 scales"
        rest = "float32, as PEFT's preparation lifts them" if plan.lifts_to_float32 else "16 bits"
        lines.append(f"NF4 with {scales}; embedding, head and norms in {rest}")
    if recipe.optimizer.name == "paged_adamw8bit":
        lines.append("paged optimizer states counted as if they stayed on the device")
    if plan.is_flash:
        lines.append("FlashAttention's scratch as that of SDPA's kernels: a float32 sum of the queries' gradient")
    return tuple(lines)
