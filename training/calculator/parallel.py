"""One rank's share of a step under data parallelism: the instants of one process, changed term by term.

DDP: the whole model, and buckets that hold a second copy of the gradients from the first step on (its default;
with `gradient_as_bucket_view` they are the gradients). FSDP2: `fully_shard` on each block and on the model, which
reshards a block after its forward and backward pass, and the root's own parameters (embedding, head, last norm) only at
the end. Source: torch 2.13, torch/nn/parallel/distributed.py and torch/distributed/fsdp/_fully_shard. A test runs both.

What a rank holds of FSDP2 beside its shards: a block's parameters and the buffer that the next one is gathered in
(forward: the last one was); in the backward pass a block's gradients, and those of the block before in the buffer from
which they are reduced; the root's gradients, until its turn comes last. Legend in `training.calculator.plan`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from training.calculator import activations
from training.calculator.estimate import Instant, Term
from training.calculator.plan import Plan
from training.core.errors import UserError
from training.core.report import again

KINDS = ("ddp", "fsdp2")
NCCL_BYTES = 512 << 20
"""Assumed, not measured: NCCL takes buffers of 4 MiB (NCCL_BUFFSIZE) for each channel, peer and protocol."""

_DDP = "DistributedDataParallel's reducer: buckets of 25 MiB, a second copy of the gradients"
_FSDP2 = "fully_shard of each block and the model: FSDPParamGroup"
_SHARDED = ("weights", "gradients", "optimizer_states", "step_temporaries")
_BLOCKS_GATHERED = {
    "layer_forward": 2, "forward_end": 1, "loss_backward": 1, "head_backward": 1, "chunks_end": 1,
    "norm_backward": 1, "layer_backward": 2, "first_layer_backward": 2, "backward_end": 0, "evaluation": 2,
}  # fmt: skip
"""Beside the root's parameters, which are gathered at each of these instants."""

_BLOCKS_NOT_REDUCED = {"first_layer_backward": 2, "backward_end": 0}
"""At these the root's gradients and those of the last blocks are whole still, unless shards of earlier micro-batches
stand beside them. The block before the last holds most: the last one's parameters are gathered beside its own."""


@dataclass(frozen=True)
class Parallel:
    """A kind of data parallelism over so many ranks, each with a device and a micro-batch of its own."""

    kind: str  # "ddp" | "fsdp2"
    ranks: int

    def to_json(self) -> dict:
        return {"kind": self.kind, "ranks": self.ranks}


def of_arguments(kind: str | None, ranks: int) -> Parallel | None:
    """The parallelism asked for; None for one rank. Raises UserError where the kind or the ranks are missing."""
    if ranks < 1:
        raise UserError("no rank at all", where="--ranks", found=ranks, expected="1 or more")
    if ranks == 1 and kind is not None:
        raise UserError("one rank is not parallel", where="--parallel", found=kind, next_command=again("--ranks", "2"))
    if ranks > 1 and kind is None:
        raise UserError(
            "how the ranks share the work is not said", where="--ranks", found=ranks,
            expected=" or ".join(f"--parallel {one}" for one in KINDS), next_command=again("--parallel", "fsdp2"),
        )  # fmt: skip
    return Parallel(kind, ranks) if ranks > 1 else None


def of_rank(plan: Plan, moments: tuple[Instant, ...]) -> tuple[Instant, ...]:
    """One rank's instants. Raises UserError for 4-bit weights under FSDP2."""
    if plan.parallel is None:
        return moments
    if plan.parallel.kind == "ddp":
        buckets = Term("gradient_buckets", plan.trainable_bytes, "trained, in their type", _DDP)
        return tuple(one if one.name == "load" else Instant(one.name, (*one.terms, buckets)) for one in moments)
    if plan.is_nf4:
        raise UserError(
            "4-bit weights are not estimated in shards", where="--parallel", found="fsdp2 with memory.weights nf4",
            expected="ddp, or 16-bit weights", next_command=again("--parallel", "ddp"),
        )  # fmt: skip
    return tuple(_sharded_instant(plan, one) for one in moments)


def assumptions(plan: Plan) -> tuple[str, ...]:
    """What stands behind one rank's figures."""
    if plan.parallel is None:
        return ()
    kind, ranks = plan.parallel.kind, plan.parallel.ranks
    lines = [f"one of {ranks} ranks under {kind}, with a micro-batch and a device of its own"]
    if not plan.on_cpu:
        lines.append(f"NCCL's buffers as {NCCL_BYTES >> 20} MiB: assumed, not measured")
    if kind == "ddp":
        lines.append("gradient_as_bucket_view is off, as by default; on, it saves a copy of the gradients")
    else:
        lines.append("loaded and saved in shards; a block's parameters gathered again for its backward pass")
    return tuple(lines)


# ---- FSDP2


def _sharded_instant(plan: Plan, instant: Instant) -> Instant:
    ranks, terms = plan.parallel.ranks, []
    missing = None if plan.is_adapter or plan.accumulates else _BLOCKS_NOT_REDUCED.get(instant.name)
    for term in instant.terms:
        if term.name == "gradients" and missing is not None:
            blocks = max(0, plan.shape.num_layers - missing)
            how = f"{blocks} blocks / {ranks}"
            terms.append(replace(term, num_bytes=-(-blocks * _block_bytes(plan) // ranks), equation=how))
        elif term.name in _SHARDED:
            terms.append(replace(term, num_bytes=-(-term.num_bytes // ranks), equation=f"({term.equation}) / {ranks}"))
        elif term.name == "layer_backward":
            terms.append(replace(term, num_bytes=activations.passing_flight(plan)))
        elif term.name not in ("head_gradient", "embedding_gradients"):
            terms.append(term)
    if instant.name == "first_layer_backward":
        terms.append(_saved_below(plan, instant))
    terms += [_gathered(plan, instant.name), _unreduced(plan, instant.name)]
    return Instant(instant.name, tuple(term for term in terms if term.num_bytes))


def _gathered(plan: Plan, name: str) -> Term:
    """Whole parameters: the root's, and those of blocks in use or on their way."""
    blocks = _BLOCKS_GATHERED.get(name)
    size = 0 if blocks is None else _root_bytes(plan) + blocks * _block_bytes(plan)
    return Term("gathered_parameters", size, f"root + {blocks} * block", _FSDP2)


def _unreduced(plan: Plan, name: str) -> Term:
    """Whole gradients: of a block and of the one being reduced, and of what the root has so far."""
    embedding = 0 if plan.is_adapter else plan.shape.embedding_parameters * plan.weight_bytes
    block = plan.trainable_bytes // plan.shape.num_layers if plan.is_adapter else _block_bytes(plan)
    root = 0 if plan.is_adapter else _root_bytes(plan)
    at_end = root + 2 * embedding if plan.shape.tied else root  # a tied one's two contributions beside their sum
    size, how = {
        "loss_backward": (embedding if plan.has_chunks else 0, "head"),
        "head_backward": (embedding * (2 if plan.has_chunks else 1), "head, of chunks a sum and one"),
        "chunks_end": (embedding, "head"),
        "norm_backward": (embedding, "head"),
        "layer_backward": (2 * block + embedding, "2 * block + head"),
        "first_layer_backward": (2 * block + embedding, "2 * block + head"),
        "backward_end": (block + at_end, "block + root, tied with its contributions"),
    }.get(name, (0, "none"))
    return Term("unreduced_gradients", size, how, _FSDP2)


def _saved_below(plan: Plan, instant: Instant) -> Term:
    """What the last block's backward will read, beside that of the one before it: as much again, or a stored input."""
    size = sum(term.num_bytes for term in instant.terms if term.name == "activations")
    if plan.recipe.memory.gradient_checkpointing:
        size = plan.T * plan.z * plan.shape.hidden_size
    return Term("saved_below", size, "a layer's set, or T * z*h", _FSDP2)


def _root_bytes(plan: Plan) -> int:
    shape = plan.shape
    return (shape.embedding_parameters + shape.head_parameters + sum(shape.final_norm_sizes)) * plan.weight_bytes


def _block_bytes(plan: Plan) -> int:
    """A block's parameters and adapters, as the mean of all."""
    whole = plan.shape.parameters * plan.weight_bytes - _root_bytes(plan)
    adapters = plan.trainable_bytes if plan.is_adapter else 0
    return -(-(whole + adapters) // plan.shape.num_layers)
