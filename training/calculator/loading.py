"""The tensors of a loaded model one by one, and the requests with which a loader gets there.

Legend in `training.calculator.plan`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

from training.calculator.allocator import CachingAllocator
from training.calculator.plan import Plan
from training.calculator.shapes import Linear, Shape
from training.recipe.model import Memory

_LOADED_AHEAD = 4
"""transformers loads with up to four threads (core_model_loading.py, GLOBAL_WORKERS)."""


def weight_sizes(plan: Plan) -> Iterator[int]:
    """Bytes of each tensor of the base and its adapters, in the order in which a model makes them."""
    yield from base_sizes(plan)
    yield from adapter_sizes(plan)


def base_sizes(plan: Plan) -> Iterator[int]:
    """Bytes of each tensor of the base."""
    shape, each = plan.shape, plan.weight_bytes
    yield shape.embedding_parameters * each
    for _ in range(shape.num_layers):
        for linear in shape.linears:
            yield from _nf4(linear, plan) if plan.is_nf4 else (linear.weight * each,)
            yield linear.out_features * each if linear.bias else 0
        yield from (size * each for size in shape.norm_sizes)
    yield from (size * each for size in (*shape.final_norm_sizes, shape.head_parameters))


def adapter_sizes(plan: Plan) -> Iterator[int]:
    """Bytes of each factor of each adapter."""
    if not plan.is_adapter:
        return
    for one in (*plan.shape.num_layers * plan.adapted, *plan.adapted_outside):
        yield plan.recipe.lora.rank * one.in_features * plan.a
        yield plan.recipe.lora.rank * one.out_features * plan.a


def _nf4(linear: Linear, plan: Plan) -> Iterator[int]:
    """Packed halves of bytes and a scale for each 64; the scales in 8 bits by blocks of 256 of them, or in float32."""
    return packed_sizes(linear.weight, plan)


def packed_sizes(elements: int, plan: Plan) -> Iterator[int]:
    """Bytes of the tensors that hold a matrix in 4 bits."""
    blocks = -(-elements // 64)
    yield -(-elements // 2)
    if plan.recipe.memory.double_quant:
        yield blocks
        yield 4 * -(-blocks // 256)
    else:
        yield 4 * blocks


def loaded(plan: Plan) -> CachingAllocator:
    """An allocator that has loaded a model and its adapters, none of which is freed again."""
    allocator = _loaded_base(_Base(plan.shape, plan.recipe.memory, plan)).settled()
    _add_adapters(allocator, plan)
    return allocator


def load(allocator: CachingAllocator, plan: Plan) -> None:
    """Make the requests of loading a model and adding its adapters."""
    _load_base(allocator, plan)
    _add_adapters(allocator, plan)


@dataclass(frozen=True)
class _Base:
    """A base model's loading; two of one shape and of one `memory` section are the same."""

    shape: Shape
    memory: Memory
    plan: Plan = field(compare=False)


@lru_cache(maxsize=16)
def _loaded_base(base: _Base) -> CachingAllocator:
    allocator = CachingAllocator(expands=base.memory.expandable_segments)
    _load_base(allocator, base.plan)
    return allocator


def _load_base(allocator: CachingAllocator, plan: Plan) -> None:
    if plan.is_nf4:
        _load_packed(allocator, plan)
    else:
        for size in base_sizes(plan):
            allocator.new(size)


def _add_adapters(allocator: CachingAllocator, plan: Plan) -> None:
    for size in adapter_sizes(plan):
        allocator.new(size)


def _load_packed(allocator: CachingAllocator, plan: Plan) -> None:
    """A base arrives in 16 bits, a few matrices ahead of the one that is packed; the rest is lifted to float32 last."""
    shape = plan.shape
    linears = [linear for _ in range(shape.num_layers) for linear in shape.linears]
    rest = [(allocator.new(2 * shape.embedding_parameters), shape.embedding_parameters)]
    arrived = deque(allocator.new(2 * linear.weight) for linear in linears[:_LOADED_AHEAD])
    for place, linear in enumerate(linears, _LOADED_AHEAD):
        for size in _nf4(linear, plan):
            allocator.new(size)
        allocator.free(arrived.popleft())
        if place < len(linears):
            arrived.append(allocator.new(2 * linears[place].weight))
        if linear.bias:
            rest.append((allocator.new(2 * linear.out_features), linear.out_features))
    small = shape.num_layers * shape.norm_sizes + shape.final_norm_sizes
    rest += [(allocator.new(2 * size), size) for size in (*small, shape.head_parameters)]
    for block, size in rest if plan.lifts_to_float32 else ():
        allocator.new(4 * size)
        allocator.free(block)
