"""A few training steps as requests to the caching allocator: what they reserve beyond what they hold at their peak.

The order of requests is that of transformers' Llama modules and of autograd's walk back: which temporary lives how long
decides what the allocator can use again. No torch, no tensors: sizes alone. Legend in `training.calculator.plan`.

What the formula adds up, this walks through: a test holds the allocated peaks of both against each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from training.calculator import activations, loading
from training.calculator import allocator as caching
from training.calculator.allocator import CachingAllocator
from training.calculator.blocks import Block
from training.calculator.plan import Plan
from training.calculator.tape import PARAMETER, Tape, Tensor
from training.calculator.timeline import Recorder, Timeline

LEAST_EIGHT_BIT = 4096
LEAST_PAGED = 100_000
"""bitsandbytes keeps smaller tensors' states in float32, and pages those of larger ones where it pages."""
_STEPS = 2
"""The second one has the optimizer's states; a third reserves nothing more."""


@dataclass(frozen=True)
class Replayed:
    """The peaks of both counts over all the steps."""

    allocated_bytes: int
    reserved_bytes: int
    rounding_bytes: int  # of what is allocated at its peak: what nobody asked for

    @property
    def ratio(self) -> float:
        return self.reserved_bytes / self.allocated_bytes


def replay(plan: Plan) -> Replayed:
    """Load the model and train it for a few steps of the same size."""
    allocator = loading.loaded(plan)
    step = Step(plan, allocator)
    for _ in range(_STEPS):
        step.run()
    return Replayed(allocator.peak_allocated_bytes, allocator.peak_reserved_bytes, allocator.peak_rounding_bytes)


def timeline(plan: Plan) -> Timeline:
    """The last of the replayed steps, event by event: the one with the optimizer's states."""
    recorder = Recorder(expands=plan.recipe.memory.expandable_segments)
    loading.load(recorder, plan)
    step = Step(plan, recorder, recorder.mark)
    for _ in range(_STEPS):
        recorder.restart()
        step.run()
    return recorder.timeline()


class Step:
    """The requests of one step; states and workspaces stay from the first one on."""

    def __init__(self, plan: Plan, allocator: CachingAllocator, mark: Callable[[str], None] = lambda phase: None):
        self.plan, self.allocator, self.tape = plan, allocator, Tape(allocator)
        self.block, self.mark = Block(plan, self.tape), mark
        self.outputs: Tensor | None = None
        self.states: list[caching.Block | None] | None = None
        self.workspaces = 0

    def run(self) -> None:
        """One optimizer step; a second micro-batch stands for all that follow the first."""
        for micro_batch in range(2 if self.plan.accumulates else 1):
            self.tape.adds_up = micro_batch > 0
            self.outputs = None
            self.micro_batch()
        self.optimizer_step()
        self.outputs = None

    def micro_batch(self) -> None:
        """Forward, loss and backward. What the caller holds afterwards are the outputs, where it keeps them."""
        inputs = self.inputs()
        mask = self.mask()
        *stored, last = self.forward()
        if not stored:
            del mask  # layers that are computed again read it again
        slot = last.slot
        (self.chunked_loss if self.plan.has_chunks else self.loss)(self.block.final_norm(last))
        del last
        self.use_workspace(2)
        self.backward(stored, slot)
        del inputs

    def use_workspace(self, number: int) -> None:
        if self.workspaces < number:
            self.workspaces += 1
            self.allocator.new(self.plan.workspace_bytes)

    # ---- forward

    def inputs(self) -> list[Tensor]:
        """Tokens, labels and positions; the rotation's angles."""
        plan, tape = self.plan, self.tape
        made = [tape.new(plan.T, 8) for _ in range(3)]
        rows = activations.position_rows(plan)
        made += [tape.new(rows * plan.S * plan.shape.rotary_dim, plan.z) for _ in range(2)]
        return made

    def mask(self) -> Tensor | None:
        """The attention mask, where attention takes one: additive for eager attention, else of bool."""
        plan = self.plan
        if plan.is_eager:
            return self.tape.new(plan.B * plan.S * plan.S * plan.num_masks, plan.z)
        return self.tape.new(plan.B * plan.S * plan.S, 1) if plan.has_mask else None

    def forward(self) -> list[Tensor]:
        """Each layer's input under checkpointing, and the last layer's output in any case."""
        plan, tape = self.plan, self.tape
        self.mark("forward")
        x = self.block.embed()
        self.embedding_nodes = len(tape.nodes)
        self.use_workspace(1)
        stored = []
        tape.keeps = not plan.recipe.memory.gradient_checkpointing
        for _ in range(plan.shape.num_layers):
            if not tape.keeps:
                stored.append(x)
            reaches = x.needs_grad or not plan.is_adapter or bool(plan.adapted)
            x = self.block.layer(x)
            x.needs_grad = x.needs_grad or reaches
        tape.keeps, self.head_node = True, len(tape.nodes)
        return [*stored, x]

    def chunked_loss(self, hidden: Tensor) -> None:
        """The gradients of hidden states and head, chunk by chunk; a second one stands for all that follow."""
        tape, embedding, below = self.tape, self.block.embedding.slot, len(self.tape.nodes)
        reaches, heads = tape.like(hidden), None
        adds_up, tape.adds_up, others = tape.adds_up, False, len(tape.grads)
        self.use_workspace(2)
        for _ in range(2):
            part = tape.view(hidden, self.plan.logit_tokens * self.plan.shape.hidden_size)
            self.loss(part)
            tape.backward(down_to=below)
            tape.waiting.pop(part.slot, None)
            found = [*tape.grads[others:], tape.waiting.pop(embedding, None)]
            del tape.grads[others:]
            heads = heads or found
            del found
        tape.adds_up = adds_up
        slot = hidden.slot
        del hidden, part
        *own, shared = heads
        del heads
        for head in own:
            tape.gather(PARAMETER, head)
        del own
        if shared is not None:
            tape.gather(embedding, shared)
        tape.gather(slot, reaches)

    def loss(self, hidden: Tensor) -> None:
        """Logits, their float32 copy and log-softmax; backward two gradients in float32."""
        tape = self.tape
        logits = self.block.logits(hidden)
        del hidden
        self.outputs = logits if self.plan.keeps_outputs else None
        lifted = tape.to(logits, 4)
        del logits
        log_softmax = tape.like(lifted)
        elements = lifted.elements

        def backward(g: Tensor) -> tuple:
            picked = tape.new(elements, 4)
            grad = tape.new(elements, 4)
            del picked
            return (grad,)

        loss = tape.new(1, 4)
        tape.record((loss,), (lifted,), (log_softmax,), backward)
        tape.gather(loss.slot, tape.like(loss))

    # ---- backward

    def backward(self, stored: list[Tensor], last_slot: int) -> None:
        """From the loss down; under checkpointing each layer is computed again when its output's gradient is there."""
        tape = self.tape
        self.mark("head_backward")
        tape.backward(down_to=self.head_node)
        self.mark("layer_backward")
        tape.backward(down_to=self.embedding_nodes)
        while stored and last_slot in tape.waiting:  # nothing is trained below where no gradient has come
            x = stored.pop()
            tape.rename(last_slot, self.block.layer_again(x).slot)
            tape.backward(down_to=self.embedding_nodes)
            last_slot = x.slot
            del x
        tape.backward()
        tape.settle(self.block.embedding.slot)
        tape.waiting.clear()

    def optimizer_step(self) -> None:
        self.mark("optimizer_step")
        plan, new = self.plan, self.allocator.new
        sizes = list(loading.adapter_sizes(plan)) if plan.is_adapter else list(loading.weight_sizes(plan))
        if self.states is None:
            self.states = [new(self.state_bytes(size)) for size in sizes for _ in range(2)]
        is_foreach = plan.recipe.optimizer.name == "adamw" and plan.recipe.optimizer.impl == "foreach"
        for copy in [new(size) for size in sizes] if is_foreach else []:
            self.allocator.free(copy)
        self.tape.grads.clear()

    def state_bytes(self, tensor_bytes: int) -> int:
        """One moment of a tensor: in its type, or a byte an element and a scale for each 256."""
        plan = self.plan
        elements = tensor_bytes // (plan.a if plan.is_adapter else plan.weight_bytes)
        if plan.recipe.optimizer.name == "adamw":
            return tensor_bytes
        is_paged = plan.recipe.optimizer.name == "paged_adamw8bit" and elements >= LEAST_PAGED
        scales = 4 * -(-elements // 256)
        return (scales if is_paged else elements + scales) if elements >= LEAST_EIGHT_BIT else 4 * elements
