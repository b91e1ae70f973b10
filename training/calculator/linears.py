"""Linear layers on a tape: plain ones, those of an NF4 base, and the adapters beside them.

PEFT's lora.Linear casts the input to the adapter's type and the sum back to the layer's; bitsandbytes' Linear4bit casts
its input to 16 bits and unpacks the weight for one product, forward and backward. Legend in `training.calculator.plan`.
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
            cast = tape.new(taken, 2) if each == 4 else None
            unpacked = tape.new(one.weight, 2)
            half = tape.new(given, 2)
            del cast, unpacked, g
            return tape.new(given, each) if each == 4 else half

        out = product(None, elements, out_elements)
        tape.record((out,), (x,), (), lambda g: (product(g, out_elements, elements) if gives else None,))
        return out

    def _adapted(self, one: Linear, x: Tensor, weight: Tensor | None) -> Tensor:
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
