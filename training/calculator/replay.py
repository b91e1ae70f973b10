"""A few training steps as requests to the caching allocator: what they reserve beyond what they hold at their peak.

The order of requests is that of transformers' Llama modules and of autograd's walk back: which temporary lives how long
decides what the allocator can use again. No torch, no tensors: sizes alone. Legend in `training.calculator.plan`.

What the formula adds up, this walks through: a test holds the allocated peaks of both against each other.
"""

from __future__ import annotations

from dataclasses import dataclass

from training.calculator import loading
from training.calculator.allocator import Block, CachingAllocator
from training.calculator.layers import Layers
from training.calculator.plan import Plan
from training.calculator.standing import LEAST_EIGHT_BIT, workspace_bytes
from training.calculator.timeline import Recorder, Timeline

_STEPS = 2
"""The second one has the optimizer's states; a third reserves nothing more."""


@dataclass(frozen=True)
class Replayed:
    """The peaks of both counts over all the steps."""

    allocated_bytes: int
    reserved_bytes: int

    @property
    def ratio(self) -> float:
        return self.reserved_bytes / self.allocated_bytes


def replay(plan: Plan) -> Replayed:
    """Load the model and train it for a few steps of the same size."""
    allocator = loading.loaded(plan)
    step = Step(plan, allocator)
    for _ in range(_STEPS):
        step.run()
    return Replayed(allocator.peak_allocated_bytes, allocator.peak_reserved_bytes)


def timeline(plan: Plan) -> Timeline:
    """The last of the replayed steps, event by event: the one with the optimizer's states."""
    recorder = Recorder()
    loading.load(recorder, plan)
    step = _MarkedStep(plan, recorder)
    for _ in range(_STEPS):
        recorder.restart()
        step.run()
    return recorder.timeline()


class Step(Layers):
    """The requests of one step; states and workspaces stay from the first one on."""

    def __init__(self, plan: Plan, allocator: CachingAllocator):
        super().__init__(plan, allocator)
        self.states: list[Block | None] | None = None
        self.workspaces = 0
        self.workspace_bytes = workspace_bytes(plan)

    def run(self) -> None:
        """One optimizer step; a second micro-batch stands for all that follow the first."""
        for micro_batch in range(2 if self.plan.accumulates else 1):
            self.adds_up = micro_batch > 0
            self.forward()
            self.backward()
            if micro_batch == 0 and self.plan.accumulates:
                self.free(self.logits)
        self.optimizer_step()

    def use_workspace(self, number: int) -> None:
        if self.workspaces < number:
            self.workspaces += 1
            self.new(self.workspace_bytes)

    # ---- forward

    def forward(self) -> None:
        plan, shape = self.plan, self.plan.shape
        self.inputs = [self.new(8 * plan.T) for _ in range(3)]
        x = self.new(plan.z * self.h)
        self.use_workspace(1)
        self.inputs += [self.new(plan.z * plan.S * shape.head_dim) for _ in range(2)]
        self.inputs.append(self.new(plan.z * plan.B * plan.S * plan.S) if plan.is_eager or plan.has_mask else None)
        self.stored, self.sets = [], []
        for _ in range(shape.num_layers):
            y, saved = self.layer(x, keep=not plan.recipe.memory.gradient_checkpointing)
            self.stored.append(x)
            self.sets.append(saved)
            x = y
        self.last = x
        self.norm_kept, hidden = self.norm(x, keep=True)
        self.head(hidden)

    def head(self, hidden: Block | None) -> None:
        plan = self.plan
        logits = plan.logit_tokens * plan.shape.vocab_size
        self.logits = self.new(plan.logit_bytes * logits)
        lifted = self.new(4 * logits) if plan.logit_bytes < 4 else None
        self.hidden = None if plan.is_adapter else hidden
        if plan.is_adapter:
            self.free(hidden)
        self.log_softmax = self.new(4 * logits)
        self.free(lifted)
        if not plan.keeps_outputs:
            self.free(self.logits)
            self.logits = None

    # ---- backward

    def backward(self) -> None:
        plan = self.plan
        self.use_workspace(2)
        logits = plan.logit_tokens * plan.shape.vocab_size
        first = self.new(4 * logits)
        grad = self.new(4 * logits)
        self.drop(first, self.log_softmax)
        if plan.logit_bytes < 4:
            cast = self.new(plan.logit_bytes * logits)
            self.free(grad)
            grad = cast
        g = self.new(plan.z * self.h)
        if not plan.is_adapter:
            self.head_grad = self.new(plan.shape.embedding_parameters * plan.weight_bytes)
        self.drop(grad, self.hidden)
        g = self.norm_backward(g, self.norm_kept)
        self.free(self.last)
        for x, saved in zip(reversed(self.stored), reversed(self.sets), strict=True):
            if plan.recipe.memory.gradient_checkpointing:
                y, saved = self.layer(x, keep=True)
                self.free(y)
            g = self.layer_backward(g, saved)
            self.free(x)
        if not plan.is_adapter:
            more = self.new(plan.shape.embedding_parameters * plan.weight_bytes)
            if plan.shape.tied:
                total = self.new(plan.shape.embedding_parameters * plan.weight_bytes)
                self.drop(more, self.head_grad)
                self.gain(total)
            else:
                self.gain(more)
                self.gain(self.head_grad)
        self.free(g)
        self.drop(*self.inputs)

    def optimizer_step(self) -> None:
        plan = self.plan
        sizes = list(loading.adapter_sizes(plan)) if plan.is_adapter else list(loading.weight_sizes(plan))
        if self.states is None:
            self.states = [self.new(self.state_bytes(size)) for size in sizes for _ in range(2)]
        is_foreach = plan.recipe.optimizer.name == "adamw" and plan.recipe.optimizer.impl == "foreach"
        copies = [self.new(size) for size in sizes] if is_foreach else []
        self.drop(*copies, *self.grads, self.logits)
        self.grads = []

    def state_bytes(self, tensor_bytes: int) -> int:
        """One moment of a tensor: in its type, or a byte an element and a scale for each 256."""
        plan = self.plan
        elements = tensor_bytes // (plan.a if plan.is_adapter else plan.weight_bytes)
        if plan.recipe.optimizer.name == "adamw":
            return tensor_bytes
        return elements + 4 * -(-elements // 256) if elements >= LEAST_EIGHT_BIT else 4 * elements


class _MarkedStep(Step):
    """A step that says which phase begins."""

    def __init__(self, plan: Plan, recorder: Recorder):
        super().__init__(plan, recorder)
        self.mark = recorder.mark

    def forward(self) -> None:
        self.mark("forward")
        super().forward()

    def backward(self) -> None:
        self.mark("head_backward")
        super().backward()

    def layer_backward(self, g: Block | None, saved: dict) -> Block | None:
        self.mark("layer_backward")
        return super().layer_backward(g, saved)

    def optimizer_step(self) -> None:
        self.mark("optimizer_step")
        super().optimizer_step()
