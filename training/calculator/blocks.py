"""A decoder's block on a tape: what transformers 5.24's modules ask for, with PEFT's and bitsandbytes' linears.

Each function is the module's own forward pass with sizes for values; what backward needs follows from the tape.
Families differ by the fields of `training.calculator.families`. Legend in `training.calculator.plan`.
"""

from __future__ import annotations

from training.calculator.allocator import ExactAllocator
from training.calculator.attention import Attention
from training.calculator.linears import Linears
from training.calculator.plan import Plan
from training.calculator.tape import Tape, Tensor


class Block:
    """The layers of a model, and what stands before and behind them, as requests on a tape."""

    def __init__(self, plan: Plan, tape: Tape):
        self.plan, self.tape = plan, tape
        self.linears = Linears(plan, tape)
        self.attention = Attention(plan, tape)
        self.h = plan.T * plan.shape.hidden_size
        self._keeping: dict[bool, int] = {}
        self.embedding = tape.waiting_parameter(plan.shape.embedding_parameters, plan.weight_bytes, not plan.is_adapter)

    # ---- before and behind the layers

    def embed(self) -> Tensor:
        """The embedding's output; its weight's own gradient waits at `embedding`."""
        tape, plan = self.tape, self.plan
        out = tape.new(self.h, plan.z)
        weight = self.embedding
        tape.record((out,), (weight,), (), lambda g: (tape.like(weight),))
        if plan.adapts_embedding:
            out = self.linears.embedding_adapter(out)
        if plan.shape.drops_embedding:
            out = tape.elementwise(out, saved=(tape.new(out.elements, 1),))
        return out

    def head(self, x: Tensor) -> Tensor:
        """The final norm and the head on every position."""
        return self.lm_head(self.final_norm(x))

    def final_norm(self, x: Tensor) -> Tensor:
        return self.norm(x, self.plan.shape.hidden_size)

    def lm_head(self, hidden: Tensor) -> Tensor:
        return self.linears("lm_head", hidden, self.embedding if self.plan.shape.tied else None)

    def logits(self, hidden: Tensor) -> Tensor:
        """What the head gives; a cap scales it, keeps its tanh, and scales it back."""
        tape, out = self.tape, self.lm_head(hidden)
        if not self.plan.shape.logit_cap:
            return out
        return tape.elementwise(tape.elementwise(tape.elementwise(out), keeps_output=True))

    # ---- norms

    def norm(self, x: Tensor, gain: int) -> Tensor:
        """A norm over parts of x that are `gain` elements wide."""
        with self.tape.named("norms"):
            if self.plan.shape.kind.norm == "layer":
                return self._layer_norm(x, gain)
            return self._rms_norm(x, gain)

    def _layer_norm(self, x: Tensor, gain: int) -> Tensor:
        """The fused kernel: it keeps its input, and the mean and the deviation in float32."""
        tape, elements, each = self.tape, x.elements, x.each
        statistics = tape.new(2 * elements // gain, 4)
        out = tape.like(x)
        weight = self.linears.parameter(2 * gain)

        def backward(g: Tensor) -> tuple:
            return tape.new(elements, each), tape.like(weight) if weight.needs_grad else None

        tape.record((out,), (x, weight), (x, statistics), backward)
        return out

    def _rms_norm(self, x: Tensor, gain: int) -> Tensor:
        """Written out in float32; the gain comes after the cast back, or before it (`rms_late`)."""
        tape, size, rows = self.tape, x.each, x.elements // gain
        lifted = tape.to(x, 4)
        root = self._root(lifted, rows)
        normed = tape.multiply(lifted, root)
        weight = self.linears.parameter(gain)
        if self.plan.shape.kind.norm == "rms_late":
            return tape.to(tape.multiply(normed, weight, 4), size)
        return tape.multiply(weight, tape.to(normed, size), size)

    def _root(self, x: Tensor, rows: int) -> Tensor:
        """1 / sqrt(mean(x**2)): the square's backward makes a power, its double and the gradient beside the mean's."""
        tape, elements = self.tape, x.elements
        squares = tape.like(x)
        root = tape.new(rows, 4)
        del squares

        def backward(g: Tensor) -> tuple:
            mean = tape.new(elements, 4)
            power, double = tape.new(elements, 4), tape.new(elements, 4)
            grad = tape.new(elements, 4)
            del mean, power, double
            return (grad,)

        tape.record((root,), (x,), (x, tape.detached(root)), backward)
        return root

    # ---- the feed-forward half

    def feed_forward(self, x: Tensor) -> Tensor:
        kind, tape, f = self.plan.shape.kind, self.tape, self.plan.T * self.plan.shape.intermediate_size
        names = kind.feed_forward
        with tape.named("feed_forward"):
            if not kind.gated:
                return self.linears(names[1], self.activation(self.linears(names[0], x)))
            if len(names) == 3:
                product = tape.multiply(self.activation(self.linears(names[0], x)), self.linears(names[1], x))
            else:
                gate, up = tape.split(self.linears(names[0], x), (f, f))
                product = tape.multiply(up, self.activation(gate))
            return self.linears(names[-1], product)

    def activation(self, x: Tensor) -> Tensor:
        """One kernel that keeps its input; `gelu_new` is written out in seven, four of which keep something."""
        tape = self.tape
        if self.plan.shape.activation == "relu":
            return tape.elementwise(x, keeps_output=True)
        if self.plan.shape.activation != "gelu_new":
            return tape.elementwise(x, saved=(x,))
        half = tape.elementwise(x)
        inner = tape.elementwise(tape.add(x, tape.elementwise(tape.elementwise(x, saved=(x,)))))
        return tape.multiply(half, tape.elementwise(tape.elementwise(inner, keeps_output=True)))

    # ---- the block

    def layer(self, x: Tensor) -> Tensor:
        """One block: its halves one after the other, or side by side."""
        shape, tape, h = self.plan.shape, self.tape, self.plan.shape.hidden_size
        norms = shape.kind.norms
        if shape.parallel:
            normed = self.norm(x, h)
            attended = self.dropped(self.attend(normed))
            normed = normed if shape.kind.shares_norm else self.norm(x, h)
            return tape.add(tape.add(attended, self.dropped(self.feed_forward(normed))), x)
        for half in (self.attend, self.feed_forward):
            y = half(x if norms == "after" else self.norm(x, h))
            y = y if norms == "before" else self.norm(y, h)
            x = tape.add(x, self.dropped(y))
            del y  # before the other half begins
        return x

    def layer_again(self, x: Tensor) -> Tensor:
        """One block computed again, when the first of its operations asks for what it kept.

        By then the gradient has come back through an adapter's last cast and scale, which keep nothing.
        """
        plan, tape, early = self.plan, self.tape, []
        kind = plan.shape.kind
        if kind.norms == "before" and kind.feed_forward[-1] in plan.targets:
            early = [tape.new(self.h, plan.a), tape.new(self.h, plan.e % plan.a)]
        with tape.until(self._num_keeping(x.needs_grad)):
            out = self.layer(x)
        del early
        return out

    def _num_keeping(self, needs_grad: bool) -> int:
        """How many operations of a layer keep something: nothing is computed again behind the last of them."""
        if needs_grad not in self._keeping:
            tape = Tape(ExactAllocator())
            x = tape.new(self.h, self.plan.z)
            x.needs_grad = needs_grad
            Block(self.plan, tape).layer(x)
            self._keeping[needs_grad] = sum(bool(node.saved) for node in tape.nodes)
        return self._keeping[needs_grad]

    def attend(self, x: Tensor) -> Tensor:
        """The attention half: its linears, the norms of queries and keys, the rotation and the scores."""
        shape = self.plan.shape
        with self.tape.named("attention"):
            q, k, v = self._queries_keys_values(x)
            if gains := shape.query_key_gains:
                q, k = self.norm(q, gains[0]), self.norm(k, gains[1])
            turned_q, turned_k = self.attention.turn(q), self.attention.turn(k)
            del q, k
            attended, _ = self.attention(turned_q, turned_k, v)
            return self.linears(shape.kind.output, attended)

    def _queries_keys_values(self, x: Tensor) -> tuple[Tensor, ...]:
        shape, names, T = self.plan.shape, self.plan.shape.kind.qkv, self.plan.T
        if len(names) == 3:
            return tuple(self.linears(name, x) for name in names)
        kv = T * shape.num_key_value_heads * shape.head_dim
        sizes = (T * shape.query_size, kv, kv)
        fused = self.linears(names[0], x)
        if shape.family == "gpt_neox":
            return self.tape.split(fused, sizes)
        return tuple(self.tape.part_of(fused, size) for size in sizes)

    def dropped(self, x: Tensor) -> Tensor:
        """Dropout keeps a mask of a byte an element."""
        if not self.plan.shape.drops_residual:
            return x
        return self.tape.elementwise(x, saved=(self.tape.new(x.elements, 1),))
