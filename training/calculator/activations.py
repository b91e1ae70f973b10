"""What a layer keeps for its backward and what its backward needs beside it, from one block on a tape.

The tape's operations are those of transformers' modules (`training.calculator.blocks`), so the figures hold for each
family and each attention path; a test holds them against real tensors. Legend in `training.calculator.plan`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from training.calculator.allocator import ExactAllocator
from training.calculator.blocks import Block
from training.calculator.plan import Plan
from training.calculator.tape import Tape, Tensor

SOURCE = "what the modules' operations keep for autograd; the reference form is Megatron's (arXiv 2205.05198, eq. 2)"
MASK = "mask"


@dataclass(frozen=True)
class Activations:
    """Bytes of one micro-batch; what masks take is told by `mask` alone."""

    layer: dict[str, int]  # what one layer keeps, by the part that made it
    first_layer_bytes: int  # less where nothing before it is trained
    final_bytes: int  # of the final norm, and of the head's input but where the loss goes in chunks
    flight_bytes: int  # the most that a layer's backward holds beyond its set
    norm_flight_bytes: int  # the same of the final norm
    recomputed_bytes: int  # a layer's set beyond its stored input, under checkpointing
    passing_bytes: int  # the most that a layer holds beyond its input where it keeps nothing

    @classmethod
    def of(cls, plan: Plan) -> Activations:
        """Run two layers, the final norm and the head forward, and the second layer backward."""
        first = _Walk(plan).keeps(Block.layer, not plan.is_adapter or plan.adapts_embedding)
        layer = _Walk(plan).keeps(Block.layer)
        final = _Walk(plan).keeps(Block.final_norm if plan.has_chunks else Block.head)
        flight, recomputed = _Walk(plan).flight()
        norm_flight, passing = _Walk(plan).norm_flight(), _Walk(plan).passing()
        return cls(layer, sum(first.values()), sum(final.values()), flight, norm_flight, recomputed, passing)

    @property
    def layer_bytes(self) -> int:
        return sum(self.layer.values())

    def equation(self, tokens: int) -> str:
        """The parts of a layer's set a token."""
        return " + ".join(f"{name} {size / tokens:.10g}" for name, size in self.layer.items())


class _Walk:
    """One block on a tape of its own, with a counter."""

    def __init__(self, plan: Plan):
        self.plan, self.counter = plan, ExactAllocator()
        self.tape = Tape(self.counter)
        self.tape.adds_up = plan.accumulates
        self.block = Block(plan, self.tape)

    def keeps(self, part: Callable, needs_grad: bool = True) -> dict[str, int]:
        """What a part of the model keeps, its input among it where an operation reads that again."""
        part(self.block, self._stream(needs_grad))
        saved = self.tape.saved_bytes()
        return {name: size for name, size in saved.items() if name != MASK}

    def flight(self) -> tuple[int, int]:
        """The most in a layer's backward beyond its set, and the set beyond its input."""
        is_stored = self.plan.recipe.memory.gradient_checkpointing
        x, grad = self._stream(), self._stream()
        run = self.block.layer_again if is_stored else self.block.layer
        stored, slot = x.num_bytes, run(x).slot
        if not is_stored:
            del x
            self.counter.peak_allocated_bytes = 0  # of the way back alone
        kept = self.counter.allocated_bytes - grad.num_bytes
        self.tape.gather(slot, grad)
        del grad
        copies = self.tape.saved_bytes().get(MASK, 0)
        self.tape.backward()
        return self.counter.peak_allocated_bytes - kept, kept - stored - copies if is_stored else 0

    def norm_flight(self) -> int:
        """The most in the final norm's backward beyond its set."""
        x, grad = self._stream(), self._stream()
        slot = self.block.final_norm(x).slot
        del x
        self.counter.peak_allocated_bytes = 0  # of the way back alone
        kept = self.counter.allocated_bytes - grad.num_bytes
        self.tape.gather(slot, grad)
        del grad
        self.tape.backward()
        return self.counter.peak_allocated_bytes - kept

    def passing(self) -> int:
        """The most that a layer which keeps nothing holds beyond its input, its mask's copy apart."""
        x = self._stream()
        self.tape.keeps = False
        self.block.layer(x)
        return self.counter.peak_allocated_bytes - x.num_bytes - mask_copy(self.plan)

    def _stream(self, needs_grad: bool = True) -> Tensor:
        with self.tape.named("norms"):
            x = self.tape.new(self.block.h, self.plan.z)
        x.needs_grad = needs_grad
        return x


def passing_flight(plan: Plan) -> int:
    """The same where a parameter's gradient goes as soon as it has come."""
    walk = _Walk(plan)
    walk.tape.adds_up = True
    return walk.flight()[0]


def mask(plan: Plan, *, is_passing: bool = False) -> int:
    """The attention masks of a batch, where attention takes one as a tensor.

    Packed rows, and a window that is shorter than the rows: one of bool, and SDPA's additive copy in every layer that
    reads it. Eager attention: an additive one, causal or not, and a second one where some layers have a window. Who
    computes a layer again keeps its mask for that, and who keeps nothing (`is_passing`) has it while layers run; else
    it is gone when the layers are done.
    """
    scores = plan.B * plan.S * plan.S
    is_there = is_passing or plan.recipe.memory.gradient_checkpointing
    if plan.is_eager:
        return scores * plan.z * plan.num_masks if is_there else 0
    if not plan.has_mask:
        return 0
    return scores + mask_copy(plan) if is_there else mask_copy(plan) * plan.num_masked_layers


def mask_copy(plan: Plan) -> int:
    """SDPA's additive mask in one layer."""
    return plan.B * plan.S * plan.S * plan.e if plan.has_mask and not plan.is_eager else 0


def position_rows(plan: Plan) -> int:
    """Rows of positions that differ: packed rows have their own."""
    return plan.B if plan.recipe.data.packing else 1
