"""Autograd on sizes: tensors without values, what an operation keeps for its backward, and the walk back.

A `Tensor` holds a block of an allocator for as long as something refers to it, as torch's do, so code that is written
like a module's forward pass makes its requests in the same order. `Tape.backward` walks the operations from the last
to the first, as PyTorch's engine does (torch/csrc/autograd/engine.cpp): an operation's gradients are made while its own
is there, then what it kept is given back, and two gradients of one tensor become their sum in a third.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from itertools import count

from training.calculator.allocator import ExactAllocator

PARAMETER = -1


class Tensor:
    """`elements` of `each` bytes. A view has a `base` and no block; a parameter has neither."""

    __slots__ = ("allocator", "base", "block", "each", "elements", "needs_grad", "part", "slot")

    def __init__(self, elements: int, each: int, slot: int, *, base: Tensor | None = None, needs_grad: bool = False):
        self.elements, self.each, self.slot, self.base, self.needs_grad = elements, each, slot, base, needs_grad
        self.allocator = self.block = None
        self.part = ""

    def __del__(self) -> None:
        if self.allocator is not None:
            self.allocator.free(self.block)

    @property
    def storage(self) -> Tensor:
        return self if self.base is None else self.base.storage

    @property
    def num_bytes(self) -> int:
        return self.elements * self.each


class Node:
    """An operation on the tape: whose gradients it takes and gives, and what it keeps."""

    __slots__ = ("backward", "inputs", "outputs", "saved")

    def __init__(self, outputs: tuple, inputs: tuple, saved: tuple, backward: Callable):
        self.outputs = [one.slot for one in outputs]
        self.inputs = [one.slot if one.needs_grad else None for one in inputs]
        self.saved, self.backward = saved, backward


class Tape:
    """Records operations where `keeps` is set; parameters' gradients go to `grads`, others wait by their slots."""

    def __init__(self, allocator: object):
        self.allocator = allocator
        self.nodes: list[Node] = []
        self.keeps = True
        self.part = ""
        self.grads: list[Tensor] = []
        self.waiting: dict[int, Tensor] = {}
        self.adds_up = False  # whether gradients of an earlier micro-batch are there, to which new ones are added
        self._slots = count()
        self._left = -1  # operations that keep something until nothing more is allocated, see `until`

    @contextlib.contextmanager
    def until(self, num_keeping: int) -> Iterator[None]:
        """Allocate nothing once as many operations have kept something: a recomputation stops there."""
        allocator, self._left = self.allocator, num_keeping
        yield
        self.allocator, self._left = allocator, -1

    @contextlib.contextmanager
    def named(self, part: str) -> Iterator[None]:
        """Count what is made within as one part of a block."""
        before, self.part = self.part, part
        yield
        self.part = before

    def saved_bytes(self, start: int = 0, end: int | None = None) -> dict[str, int]:
        """What some operations keep, by the part that made it; a storage counts once."""
        kept = {id(one.storage): one.storage for node in self.nodes[start:end] for one in node.saved}
        parts: dict[str, int] = {}
        for one in kept.values():
            if one.allocator is not None:
                parts[one.part] = parts.get(one.part, 0) + one.num_bytes
        return parts

    # ---- tensors

    def new(self, elements: int, each: int) -> Tensor:
        """A new tensor; its place is asked for now."""
        return self._placed(Tensor(elements, each, next(self._slots)))

    def _placed(self, tensor: Tensor) -> Tensor:
        tensor.block, tensor.allocator, tensor.part = self.allocator.new(tensor.num_bytes), self.allocator, self.part
        return tensor

    def like(self, tensor: Tensor, each: int | None = None) -> Tensor:
        return self.new(tensor.elements, each or tensor.each)

    def view(self, of: Tensor, elements: int) -> Tensor:
        """Some of a tensor's elements in its own storage."""
        return Tensor(elements, of.each, next(self._slots), base=of, needs_grad=of.needs_grad)

    def overwritten(self, of: Tensor) -> Tensor:
        """A tensor after an operation in place: a result of its own in the storage that was there."""
        return Tensor(of.elements, of.each, next(self._slots), base=of)

    @staticmethod
    def parameter(elements: int, each: int, is_trained: bool) -> Tensor:
        """A weight, whose own bytes are counted elsewhere."""
        return Tensor(elements, each, PARAMETER, needs_grad=is_trained)

    def waiting_parameter(self, elements: int, each: int, is_trained: bool) -> Tensor:
        """A weight that several operations share: its gradient waits by its slot until all have been there."""
        return Tensor(elements, each, next(self._slots), needs_grad=is_trained)

    # ---- operations

    def record(self, outputs: tuple, inputs: tuple, saved: tuple, backward: Callable) -> None:
        """Put an operation on the tape. `backward` takes its outputs' gradients and gives those of its inputs."""
        if self.keeps and any(one.needs_grad for one in inputs):
            for one in outputs:
                one.needs_grad = True
            self.nodes.append(Node(outputs, inputs, saved, backward))
            self._left -= bool(saved)
            if saved and self._left == 0:
                self.allocator = ExactAllocator()

    def elementwise(
        self, x: Tensor, *, each: int | None = None, saved: tuple = (), keeps_output: bool = False
    ) -> Tensor:
        """One new tensor of x's size forward and one backward: a scale, a cast, an activation."""
        out = self.like(x, each)
        elements, size = x.elements, x.each
        saved = (*saved, *((self.detached(out),) if keeps_output else ()))
        self.record((out,), (x,), saved, lambda g: (self.new(elements, size),))
        return out

    @staticmethod
    def detached(out: Tensor) -> Tensor:
        """The same storage, for the operation that made it to keep: autograd keeps no output of its own node."""
        return Tensor(out.elements, out.each, out.slot, base=out)

    def to(self, x: Tensor, each: int) -> Tensor:
        """A cast; nothing where the type is that already."""
        return x if x.each == each else self.elementwise(x, each=each)

    def multiply(self, x: Tensor, y: Tensor, each: int | None = None) -> Tensor:
        """x times y, either of which may be smaller and is spread; each is kept for the other's gradient."""
        elements, each = max(x.elements, y.elements), each or max(x.each, y.each)
        out = self.new(elements, each)
        saved = (*((y,) if x.needs_grad else ()), *((x,) if y.needs_grad else ()))
        sizes = [(one.elements, one.each) if one.needs_grad else None for one in (x, y)]

        def backward(g: Tensor) -> list:
            full = [self.new(elements, each) if size else None for size in sizes]
            return [self._fit(one, size) if size else None for one, size in zip(full, sizes, strict=True)]

        self.record((out,), (x, y), saved, backward)
        return out

    def _fit(self, grad: Tensor, size: tuple[int, int]) -> Tensor:
        """The engine sums a gradient to its input's shape and casts it to its type."""
        return grad if (grad.elements, grad.each) == size else self.new(*size)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """x + y of one size: both get the same gradient."""
        out = self.like(x, max(x.each, y.each))
        sizes = [(one.elements, one.each) for one in (x, y)]
        self.record((out,), (x, y), (), lambda g: [self._fit(g, size) for size in sizes])
        return out

    def shift(self, x: Tensor) -> Tensor:
        """x plus something that needs no gradient: x's own is the sum's."""
        out = self.like(x)
        self.record((out,), (x,), (), lambda g: (g,))
        return out

    def part_of(self, x: Tensor, elements: int) -> Tensor:
        """A slice: a view, whose gradient is written into one of x's full size."""
        out = self.view(x, elements)
        full, each = x.elements, x.each
        self.record((out,), (x,), (), lambda g: (self.new(full, each),))
        return out

    def split(self, x: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
        """Views of x side by side; their gradients are put together in one of x's size."""
        outs = tuple(self.view(x, size) for size in sizes)
        full, each = x.elements, x.each
        self.record(outs, (x,), (), lambda *g: (self.new(full, each),))
        return outs

    def cat(self, *parts: Tensor) -> Tensor:
        """The parts in one new tensor; their gradients are views of its own."""
        sizes = [one.elements for one in parts]
        out = self.new(sum(sizes), parts[0].each)
        self.record((out,), parts, (), lambda g: [self.view(g, size) for size in sizes])
        return out

    def matmul(self, x: Tensor, weight: Tensor, out_elements: int, bias: Tensor | None = None) -> Tensor:
        """x times a weight, and a bias; x is kept where the weight is trained."""
        out = Tensor(out_elements, x.each, next(self._slots))
        elements, each, trained = x.elements, x.each, weight.needs_grad
        gives = x.needs_grad

        def backward(g: Tensor) -> tuple:
            grad = self.new(elements, each) if gives else None
            return grad, self.like(weight) if trained else None, self.like(bias) if bias and trained else None

        inputs = (x, weight, bias) if bias else (x, weight)
        self.record((out,), inputs, (*((x,) if trained else ()), *((weight,) if gives else ())), backward)
        return self._placed(out)  # what is kept is kept before there is an output

    # ---- the walk back

    def backward(self, down_to: int = 0) -> None:
        """Run the operations whose outputs' gradients wait backward, from the last one until `down_to` are left."""
        while len(self.nodes) > down_to:
            node = self.nodes.pop()
            if not any(slot in self.waiting for slot in node.outputs):
                continue
            found = list(node.backward(*[self.waiting.pop(slot, None) for slot in node.outputs]))
            inputs = node.inputs
            del node  # what it kept goes before the sums are made
            for place, slot in enumerate(inputs):
                if slot is not None:
                    self.gather(slot, found[place])
                found[place] = None

    def gather(self, slot: int, grad: Tensor) -> None:
        """A gradient arrives: a parameter's at its `.grad`, another one where its tensor's operation will take it."""
        if slot == PARAMETER:
            if not self.adds_up:
                self.grads.append(grad)
        elif slot in self.waiting:
            self.waiting[slot] = self.like(grad)
        else:
            self.waiting[slot] = grad

    def rename(self, old: int, new: int) -> None:
        """Let a gradient wait for a tensor that was computed again."""
        self.waiting[new] = self.waiting.pop(old)

    def settle(self, slot: int) -> None:
        """A shared parameter's gradient is whole."""
        if slot in self.waiting:
            self.gather(PARAMETER, self.waiting.pop(slot))
