"""Linear layers on a tape: plain ones, those of an NF4 base, and the adapters beside them.

PEFT's lora.Linear casts the input to the adapter's type, keeps what it dropped of it, and casts the sum back to the
layer's; the trainer's keeps the input itself, drops again in the backward pass, and adds in place
(training/objectives/adapter.py). bitsandbytes' Linear4bit casts its input to 16 bits and unpacks the weight for one
product, forward and backward; on a CPU it does so in float32. Legend in `training.calculator.plan`.
"""

from __future__ import annotations

from training.calculator.plan import Plan
from training.calculator.shapes import Linear
from training.calculator.tape import Tape, Tensor


class Linears:
    """A block's linear layers by their names, and the head."""

    def __init__(self, plan: Plan, tape: Tape):
        self.plan, self.tape = plan, tape
        self.known = {one.name: one for one in (*plan.shape.linears, plan.shape.head)}
        self.adapted = {one.name for one in (*plan.adapted, *plan.adapted_outside)}

    def parameter(self, elements: int) -> Tensor:
        """A weight of the base, which an adapter leaves as it is."""
        return self.tape.parameter(elements, self.plan.weight_bytes, not self.plan.is_adapter)

    def __call__(self, name: str, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """The output of a linear and of its adapter; `weight` is one that it shares."""
        one = self.known[name]
        return self._adapted(one, x, weight) if name in self.adapted else self._base(one, x, weight)

    def _base(self, one: Linear, x: Tensor, weight: Tensor | None) -> Tensor:
        is_packed = self.plan.is_nf4 and one.name != self.plan.shape.head.name
        return self._packed(one, x) if is_packed else self._plain(one, x, weight)

    def _plain(self, one: Linear, x: Tensor, weight: Tensor | None) -> Tensor:
        tape, tokens = self.tape, x.elements // one.in_features
        weight = weight or self.parameter(one.weight)
        bias = self.parameter(one.out_features) if one.bias else None
        return tape.matmul(tape.to(x, self.plan.e), weight, tokens * one.out_features, bias)

    def _packed(self, one: Linear, x: Tensor) -> Tensor:
        tape, each, gives = self.tape, x.each, x.needs_grad
        elements, out_elements = x.elements, x.elements // one.in_features * one.out_features

        def product(g: Tensor | None, taken: int, given: int) -> Tensor:
            inner = each if self.plan.on_cpu else 2
            cast = tape.new(taken, 2) if each != inner else None
            unpacked = tape.new(one.weight, inner)
            half = tape.new(given, inner)
            del cast, unpacked, g
            return tape.new(given, each) if each != inner else half

        out = product(None, elements, out_elements)
        tape.record((out,), (x,), (), lambda g: (product(g, out_elements, elements) if gives else None,))
        return out

    def _adapted(self, one: Linear, x: Tensor, weight: Tensor | None) -> Tensor:
        return self._peft(one, x, weight) if self.plan.is_hf else self._own(one, x, weight)

    def _own(self, one: Linear, x: Tensor, weight: Tensor | None) -> Tensor:
        """B A (keep x) * scale in the adapter's type, added in place."""
        tape, a, rank = self.tape, self.plan.a, self.plan.recipe.lora.rank
        tokens, out = x.elements // one.in_features, self._base(one, x, weight)
        ins, outs, gives = (x.elements, x.each), (out.elements, out.each), (out.needs_grad, x.needs_grad)
        with tape.named("adapters"):
            keep = (tape.new(x.elements, 1),) if self.plan.recipe.lora.dropout > 0 else ()
            own = self._kept(ins)
            low = tape.new(tokens * rank, a)
            low = tape.new(tokens * rank, a)  # times the scale
            del own
            added = tape.new(out.elements, a)
            del added
        factors = [tape.parameter(rank * size, a, True) for size in (one.in_features, one.out_features)]

        def backward(g: Tensor) -> list:
            wide = tape.new(outs[0], a) if outs[1] != a else None
            grad_up, grad_low = tape.like(factors[1]), tape.new(tokens * rank, a)
            grad_low = tape.new(tokens * rank, a)
            again = self._kept(ins)
            grad_down = tape.like(factors[0])
            del again
            grad = tape.new(ins[0], a) if gives[1] else None
            grad = tape.new(*ins) if grad and ins[1] != a else grad
            del wide, grad_low
            return [g if gives[0] else None, grad, grad_down, grad_up]

        total = tape.overwritten(out)
        tape.record((total,), (out, x, *factors), (x, low, *keep), backward)
        return total

    def _kept(self, size: tuple[int, int]) -> Tensor | None:
        """An adapter's input as it multiplies it: cast where it is of another type, some of it dropped."""
        tape, a = self.tape, self.plan.a
        cast = tape.new(size[0], a) if size[1] != a else None
        return tape.new(size[0], a) if self.plan.recipe.lora.dropout > 0 else cast

    def _peft(self, one: Linear, x: Tensor, weight: Tensor | None) -> Tensor:
        """result + B(A(dropout(x))) * scale, in the adapter's type, cast back."""
        tape, a, rank = self.tape, self.plan.a, self.plan.recipe.lora.rank
        tokens, out = x.elements // one.in_features, self._base(one, x, weight)
        with tape.named("adapters"):
            own = tape.to(x, a)
            if self.plan.recipe.lora.dropout > 0:
                own = tape.elementwise(own, saved=(tape.new(own.elements, 1),))
            down = tape.parameter(rank * one.in_features, a, True)
            up = tape.parameter(rank * one.out_features, a, True)
            low = tape.matmul(own, down, tokens * rank)
            del own
            high = tape.matmul(low, up, tokens * one.out_features)
            del low
            scaled = tape.elementwise(high)
            del high
        each, total = out.each, tape.add(out, scaled)
        del out, scaled
        return tape.to(total, each)

    def embedding_adapter(self, out: Tensor) -> Tensor:
        """PEFT's lora.Embedding: rows of rank r, widened and added."""
        tape, a, rank, shape = self.tape, self.plan.a, self.plan.recipe.lora.rank, self.plan.shape
        with tape.named("adapters"):
            low, rows = tape.new(self.plan.T * rank, a), tape.parameter(shape.vocab_size * rank, a, True)
            tape.record((low,), (rows,), (), lambda g: (tape.like(rows),))
            high = tape.matmul(low, tape.parameter(rank * shape.hidden_size, a, True), out.elements)
            return tape.to(tape.add(out, tape.elementwise(high)), out.each)
