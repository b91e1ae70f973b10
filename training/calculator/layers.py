"""One layer's forward and backward pass as requests to an allocator: what is made, kept and given back, in order.

The order is that of transformers' Llama modules with PEFT's and bitsandbytes' linears, and of autograd's walk back.
Legend in `training.calculator.plan`.
"""

from __future__ import annotations

from training.calculator.allocator import Block, CachingAllocator
from training.calculator.plan import Plan

_KEPT = ("norm1", "in", "qkv", "attn", "o", "norm2", "mlp_in", "gate", "up", "down")
_SAMPLE = 4


def saved_rounding(plan: Plan) -> int:
    """What the allocator counts beside the bytes that all layers keep: of a few layers, forward, taken for all."""
    allocator = CachingAllocator()
    layers, x = Layers(plan, allocator), None
    for _ in range(_SAMPLE):
        x, _ = layers.layer(x, keep=True)
    return (allocator.allocated_bytes - allocator.asked_bytes) * plan.shape.num_layers // _SAMPLE


class Layers:
    """The requests of a model's layers; `grads` gathers the gradients that stay until the optimizer's step."""

    def __init__(self, plan: Plan, allocator: CachingAllocator):
        self.plan, self.new, self.free = plan, allocator.new, allocator.free
        self.h = plan.T * plan.shape.hidden_size
        self.f = plan.T * plan.shape.intermediate_size
        self.q = plan.T * plan.query_width
        self.k = plan.T * plan.shape.num_key_value_heads * plan.shape.head_dim
        self.scores = plan.shape.num_heads * plan.T * plan.S
        self.adapted = {one.name for one in plan.adapted}
        self.linears = {one.name: one for one in plan.shape.linears}
        self.grads: list[Block | None] = []
        self.adds_up = False  # whether gradients of an earlier micro-batch are there

    def drop(self, *blocks: Block | None) -> None:
        for block in blocks:
            self.free(block)

    def gain(self, grad: Block | None) -> None:
        """A parameter's gradient: kept, or added to the one that is there."""
        if self.adds_up:
            self.free(grad)
        else:
            self.grads.append(grad)

    # ---- forward

    def norm(self, x: Block | None, keep: bool) -> tuple[list[Block | None], Block | None]:
        plan = self.plan
        lifted = self.new(4 * self.h) if plan.z < 4 else None
        squares = self.new(4 * self.h)
        small = self.new(4 * plan.T)
        self.free(squares)
        normed = self.new(4 * self.h)
        cast = self.new(plan.z * self.h) if plan.z < 4 else None
        if cast is not None:
            self.free(normed)
            normed = cast
        out = self.new(plan.z * self.h)
        trained = not plan.is_adapter
        kept = [lifted, small, normed if trained else None] if keep else []
        if not keep:
            self.drop(lifted, small, normed)
        elif not trained:
            self.free(normed)
        return kept, out

    def linear(self, name: str, keep: bool, kept: list) -> Block | None:
        """The output of a linear and of its adapter, and what the adapter keeps."""
        plan, one = self.plan, self.linears[name]
        elements = plan.T * one.out_features
        if plan.is_nf4:
            cast = self.new(2 * plan.T * one.in_features) if plan.e == 4 else None
            unpacked = self.new(2 * one.weight)
            half = self.new(2 * elements)
            self.drop(unpacked, cast)
            out = self.new(4 * elements) if plan.e == 4 else half
            if plan.e == 4:
                self.free(half)
        else:
            out = self.new(plan.e * elements)
        if name not in self.adapted:
            return out
        own = self.new(plan.a * plan.T * one.in_features) if plan.a != plan.e else None
        low = self.new(plan.a * plan.T * plan.recipe.lora.rank)
        high = self.new(plan.a * elements)
        scaled = self.new(plan.a * elements)
        self.free(high)
        total = self.new(max(plan.a, plan.e) * elements)
        self.drop(scaled, out)
        if plan.a > plan.e:
            out = self.new(plan.e * elements)
            self.free(total)
        else:
            out = total
        if keep:
            kept += [own, low]
        else:
            self.drop(own, low)
        return out

    def rope(self, x: Block | None, elements: int) -> Block | None:
        e = self.plan.e
        first = self.new(e * elements)
        half = self.new(e * elements // 2)
        turned = self.new(e * elements)
        self.free(half)
        second = self.new(e * elements)
        self.free(turned)
        out = self.new(e * elements)
        self.drop(first, second, x)
        return out

    def layer(self, x: Block | None, keep: bool) -> tuple[Block | None, dict]:
        saved: dict[str, list] = {name: [] for name in _KEPT}
        plan, e = self.plan, self.plan.e
        saved["norm1"], n1 = self.norm(x, keep)
        q = self.linear("q_proj", keep, saved["in"])
        k = self.linear("k_proj", keep, saved["in"])
        v = self.linear("v_proj", keep, saved["in"])
        q, k = self.rope(q, self.q), self.rope(k, self.k)
        self.hold(saved["in"], n1, keep and self.keeps("q_proj", "k_proj", "v_proj"))
        expand = self.q > self.k and not plan.is_flash
        ke, ve = (self.new(e * self.q), self.new(e * self.q)) if expand else (k, v)
        if expand:
            self.drop(k, v)
        additive = self.new(e * plan.B * plan.S * plan.S) if plan.has_mask and not plan.is_eager else None
        weights = None
        if plan.is_eager:
            attn, weights = self.eager(keep, saved)
        else:
            attn = self.new(e * self.q)
            saved["attn"] = [self.new(4 * plan.shape.num_heads * plan.T), additive] if keep else []
            if not keep:
                self.free(additive)
        if keep:
            saved["qkv"] = [q, ke, ve]
        else:
            self.drop(q, ke, ve)
        o = self.linear("o_proj", keep, saved["o"])
        holds = keep and (not plan.is_eager or self.keeps("o_proj"))
        self.hold(saved["o"], attn, holds)
        middle = self.new(plan.z * self.h)
        self.free(o)
        saved["norm2"], n2 = self.norm(middle, keep)
        gate = self.linear("gate_proj", keep, saved["mlp_in"])
        act = self.new(e * self.f)
        if not keep:
            self.free(gate)
        up = self.linear("up_proj", keep, saved["mlp_in"])
        product = self.new(e * self.f)
        if keep:
            saved["gate"], saved["up"] = [gate, act], [up]
        else:
            self.drop(act, up)
        down = self.linear("down_proj", keep, saved["down"])
        self.hold(saved["down"], product, keep and self.keeps("down_proj"))
        self.hold(saved["mlp_in"], n2, keep and self.keeps("gate_proj", "up_proj"))
        y = self.new(plan.z * self.h)
        self.free(down)
        self.hold(saved["norm2"], middle, keep and plan.z == 4)
        if weights is not None and not keep:
            self.free(weights)
        return y, saved

    def eager(self, keep: bool, saved: dict) -> tuple[Block | None, Block | None]:
        e = self.plan.e
        raw = self.new(e * self.scores)
        scaled = self.new(e * self.scores)
        self.free(raw)
        masked = self.new(e * self.scores)
        self.free(scaled)
        soft = self.new(4 * self.scores)
        weights = self.new(e * self.scores) if e < 4 else soft
        self.free(masked)
        if keep:
            saved["attn"] = [soft, weights] if e < 4 else [soft]
        elif e < 4:
            self.free(soft)
        flat = self.new(e * self.q)
        out = self.new(e * self.q)
        self.free(flat)
        return out, weights

    def keeps(self, *names: str) -> bool:
        plan = self.plan
        return not plan.is_adapter or (plan.e == plan.a and bool(self.adapted & set(names)))

    def hold(self, place: list, block: Block | None, is_kept: bool) -> None:
        if is_kept:
            place.append(block)
        else:
            self.free(block)

    # ---- backward

    def norm_backward(self, g: Block | None, kept: list) -> Block | None:
        a = self.new(4 * self.h)
        b = self.new(4 * self.h)
        self.free(g)
        c = self.new(4 * self.h)
        self.drop(a)
        total = self.new(4 * self.h)
        self.drop(b, c, *kept)
        if self.plan.z < 4:
            out = self.new(self.plan.z * self.h)
            self.free(total)
            return out
        return total

    def linear_backward(self, name: str, kept: tuple | list = ()) -> Block | None:
        """The gradient of a linear's input; that of its output is the caller's."""
        plan, one = self.plan, self.linears[name]
        low = high = None
        inputs = plan.T * one.in_features
        if name in self.adapted:
            scaled = self.new(plan.a * plan.T * one.out_features)
            self.gain(self.new(plan.a * plan.recipe.lora.rank * one.out_features))
            low = self.new(plan.a * plan.T * plan.recipe.lora.rank)
            self.free(scaled)
            self.gain(self.new(plan.a * plan.recipe.lora.rank * one.in_features))
            high = self.new(plan.a * inputs)
            self.free(low)
        if plan.is_nf4:
            cast = self.new(2 * plan.T * one.out_features) if plan.e == 4 else None
            unpacked = self.new(2 * one.weight)
            half = self.new(2 * inputs)
            self.drop(unpacked, cast)
            grad = self.new(4 * inputs) if plan.e == 4 else half
            if plan.e == 4:
                self.free(half)
        else:
            grad = self.new(plan.e * inputs)
        if not plan.is_adapter:
            self.gain(self.new(one.weight * plan.weight_bytes))
        if high is not None:
            total = self.new(plan.e * inputs)
            self.drop(high, grad)
            grad = total
        self.drop(*kept)
        return grad

    def layer_backward(self, g: Block | None, saved: dict) -> Block | None:
        plan, e = self.plan, self.plan.e
        gp = self.linear_backward("down_proj", saved["down"])
        g_act = self.new(e * self.f)
        g_up = self.new(e * self.f)
        self.drop(gp, *saved["up"])
        n = self.linear_backward("up_proj")
        self.free(g_up)
        g_gate = self.new(e * self.f)
        self.drop(g_act, *saved["gate"])
        m = self.linear_backward("gate_proj", saved["mlp_in"])
        self.free(g_gate)
        both = self.new(plan.z * self.h)
        self.drop(n, m)
        n = self.norm_backward(both, saved["norm2"])
        total = self.new(plan.z * self.h)
        self.drop(n, g)
        g = total
        ga = self.linear_backward("o_proj")
        if plan.is_eager:
            self.drop(*saved["o"])
        gq, gk, gv = self.attention_backward(ga, saved)
        parts = []
        for name, grad, elements in (("v_proj", gv, self.k), ("k_proj", gk, self.k), ("q_proj", gq, self.q)):
            if name != "v_proj":
                first, second = self.new(e * elements), self.new(e * elements)
                turned = self.new(e * elements)
                self.drop(grad, first, second)
                grad = turned
            parts.append(self.linear_backward(name))
            self.free(grad)
            if len(parts) == 2:
                both = self.new(plan.z * self.h)
                self.drop(*parts)
                parts = [both]
        self.drop(*saved["in"])
        n = self.norm_backward(parts[0], saved["norm1"])
        total = self.new(plan.z * self.h)
        self.drop(n, g)
        return total

    def attention_backward(self, g: Block | None, saved: dict) -> tuple:
        plan, e = self.plan, self.plan.e
        q, k, v = saved["qkv"]
        if plan.is_eager:
            gw = self.new(e * self.scores)
            gv = self.new(e * self.q)
            self.drop(g, v, *saved["attn"][1:])
            if e < 4:
                lifted = self.new(4 * self.scores)
                self.free(gw)
                gw = lifted
            scratch = self.new(4 * self.scores)
            gs = self.new(e * self.scores)
            self.drop(scratch, gw, saved["attn"][0])
            scaled = self.new(e * self.scores)
            self.free(gs)
            gq, gk = self.new(e * self.q), self.new(e * self.q)
            self.drop(scaled, q, k)
        else:
            sums = self.new(4 * plan.shape.num_heads * plan.T)
            gq, gk, gv = (self.new(e * self.q) for _ in range(3))
            scratch = self.new(4 * self.q) if e < 4 else None
            self.drop(scratch, sums, g, q, k, v, *saved["attn"], *saved["o"])
        if self.q > self.k:
            small_k, small_v = self.new(e * self.k), self.new(e * self.k)
            self.drop(gk, gv)
            gk, gv = small_k, small_v
        return gq, gk, gv
