"""Attention on a tape: the rotation of queries and keys, and the scores on each path.

Eager attention keeps its softmax; the fused kernels keep queries, keys, values, output and a statistic, and sum the
queries' gradient in float32. CUDA's softmax keeps its gradient times its output in float32 while it writes its own
gradient (SoftMax.cu, softmax_backward_cuda_out). Legend in `training.calculator.plan`.
"""

from __future__ import annotations

from training.calculator.plan import Plan
from training.calculator.tape import Tape, Tensor


class Attention:
    """What a block's attention does between its linears."""

    def __init__(self, plan: Plan, tape: Tape):
        self.plan, self.tape = plan, tape
        self.scores = plan.shape.num_heads * plan.T * plan.S

    # ---- rotary positions

    def turn(self, x: Tensor) -> Tensor:
        """x * cos + rotate_half(x) * sin, of a part of each head where only that is turned."""
        shape, tape = self.plan.shape, self.tape
        if not self._is_joined:
            return self._turn(x)
        turned = x.elements * shape.rotary_dim // shape.head_dim
        rotated, rest = tape.part_of(x, turned), tape.part_of(x, x.elements - turned)
        return tape.cat(self._turn(rotated), rest)

    def _turn(self, x: Tensor) -> Tensor:
        tape, each = self.tape, 4 if self.plan.shape.kind.float32_rotary else x.each
        by_cos = tape.elementwise(x, each=each)
        first, second = tape.part_of(x, x.elements // 2), tape.part_of(x, x.elements // 2)
        half = tape.cat(tape.elementwise(second), first)
        by_sin = tape.elementwise(half, each=each)
        del half, first, second
        out = tape.add(by_cos, by_sin)
        del by_cos, by_sin
        return tape.to(out, x.each)

    # ---- scores

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
        """The output and, on the eager path, the weights that the module hands back."""
        k, v = self._expanded(k), self._expanded(v)
        if self.plan.is_eager:
            return self._eager(q, k, v)
        out = self._fused(q, k, v)
        return (self.tape.shift(out) if self._is_joined else out), None

    @property
    def _is_joined(self) -> bool:
        """Whether queries were put together head by head: a fused kernel answers in their order, turned afterwards."""
        return self.plan.shape.kind.partial_rotary is not None

    def _expanded(self, x: Tensor) -> Tensor:
        """Keys or values for every query head: a copy, but for FlashAttention 2 and, without a mask, a CPU's."""
        tape, plan = self.tape, self.plan
        shares = plan.is_flash or (plan.on_cpu and not plan.is_eager and not plan.has_mask)
        if shares or plan.shape.num_heads == plan.shape.num_key_value_heads:
            return x
        out = tape.new(plan.T * plan.shape.query_size, x.each)
        elements, each = x.elements, x.each
        tape.record((out,), (x,), (), lambda g: (tape.new(elements, each),))
        return out

    def _fused(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        tape, plan, statistics = self.tape, self.plan, self.plan.shape.num_heads * self.plan.T
        with tape.named("mask"):
            additive = tape.new(plan.B * plan.S * plan.S, plan.e) if plan.has_mask else None
        out = tape.like(q)
        sizes = [(one.elements, one.each) for one in (q, k, v)]
        saved = (q, k, v, tape.detached(out), tape.new(statistics, 4))

        def backward(g: Tensor) -> list:
            sums = tape.new(statistics, 4)
            grads = [tape.new(*size) for size in sizes]
            scratch = tape.new(sizes[0][0], 4) if sizes[0][1] < 4 and not plan.on_cpu else None
            del sums, scratch
            return grads

        tape.record((out,), (q, k, v), (*saved, *((additive,) if additive else ())), backward)
        return out

    def _eager(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        tape, plan = self.tape, self.plan
        scores = self._product(q, k, self.scores)
        scores = tape.elementwise(scores)  # the scale
        if plan.shape.score_cap:
            scores = tape.elementwise(scores)
            scores = tape.elementwise(scores, keeps_output=True)
            scores = tape.elementwise(scores)
        scores = tape.shift(scores)  # the mask is added
        weights = self._softmax(scores)
        del scores
        if plan.shape.drops_scores:
            weights = tape.elementwise(weights, saved=(tape.new(self.scores, 1),))
        if v.base is not None and plan.B > 1:
            v = tape.shift(v)  # rows of a fused linear's output do not lie side by side
        flat = self._product(weights, v, plan.T * plan.shape.query_size)
        return tape.elementwise(flat), weights

    def _product(self, x: Tensor, y: Tensor, elements: int) -> Tensor:
        """A batched product of two tensors, both kept."""
        tape = self.tape
        out = tape.new(elements, x.each)
        sizes = [(one.elements, one.each) for one in (x, y)]
        tape.record((out,), (x, y), (x, y), lambda g: [tape.new(*size) for size in sizes])
        return out

    def _softmax(self, scores: Tensor) -> Tensor:
        """In float32 and cast back: one kernel on CUDA, a cast and a kernel on the CPU."""
        tape, on_cpu, each, elements = self.tape, self.plan.on_cpu, scores.each, scores.elements
        lifted = tape.to(scores, 4) if on_cpu else scores
        soft = tape.new(elements, 4)

        def backward(g: Tensor) -> tuple:
            scratch = None if on_cpu else tape.new(elements, 4)
            grad = tape.new(elements, lifted_each)
            del scratch
            return (grad,)

        lifted_each = lifted.each
        tape.record((soft,), (lifted,), (tape.detached(soft),), backward)
        del lifted
        return tape.to(soft, each)
