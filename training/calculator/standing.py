"""The terms that do not grow with the batch: weights, workspaces, gradients, optimizer states, the step's copies.

Legend in `training.calculator.plan`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from training.calculator.allocator import CachingAllocator, resident_bytes
from training.calculator.estimate import Term
from training.calculator.plan import Plan
from training.calculator.shapes import Linear

_CUBLAS_BYTES = {"H100": 32 << 20, "H200": 32 << 20}
_CUBLAS_BEFORE_HOPPER_BYTES = 8_519_680
_EIGHT_BIT_STATE_BYTES = 1 + 4 / 256
_LEAST_EIGHT_BIT = 4096
_LOADED_AHEAD = 4
"""transformers loads with up to four threads (core_model_loading.py, GLOBAL_WORKERS)."""


def weight_sizes(plan: Plan) -> Iterator[int]:
    """Bytes of each tensor of the base and its adapters, in the order in which a model makes them."""
    shape, each = plan.shape, plan.weight_bytes
    yield shape.embedding_parameters * each
    for _ in range(shape.num_layers):
        for linear in shape.linears:
            yield from _nf4(linear, plan) if plan.is_nf4 else (linear.weight * each,)
            yield linear.out_features * each if linear.bias else 0
        yield from (shape.hidden_size * each,) * 2
        yield from (shape.head_dim * each,) * (2 if shape.query_key_norms else 0)
    yield shape.hidden_size * each
    yield shape.head_parameters * each
    yield from adapter_sizes(plan)


def adapter_sizes(plan: Plan) -> Iterator[int]:
    """Bytes of each factor of each adapter."""
    if not plan.is_adapter:
        return
    for _ in range(plan.shape.num_layers):
        for one in plan.adapted:
            yield plan.recipe.lora.rank * one.in_features * plan.a
            yield plan.recipe.lora.rank * one.out_features * plan.a


def _nf4(linear: Linear, plan: Plan) -> Iterator[int]:
    """Packed halves of bytes and a scale for each 64; the scales in 8 bits by blocks of 256 of them, or in float32."""
    blocks = -(-linear.weight // 64)
    yield -(-linear.weight // 2)
    if plan.recipe.memory.double_quant:
        yield blocks
        yield 4 * -(-blocks // 256)
    else:
        yield 4 * blocks


def weights(plan: Plan) -> Term:
    if plan.is_nf4:
        scale = "0.0159" if plan.recipe.memory.double_quant else "0.0625"
        how = f"(0.5 + {scale}) * linears + {plan.weight_bytes} * rest"
        source = "QLoRA (arXiv 2305.14314, sec. 3): NF4 blocks of 64 with a scale each"
    else:
        how, source = f"{plan.weight_bytes} * parameters", "size of the tensors"
    if plan.is_adapter:
        how = f"{how} + {plan.a} * adapters"
    return Term("weights", sum(weight_sizes(plan)), how, source)


def workspaces(plan: Plan) -> Term:
    """cuBLAS's scratch memory, which PyTorch takes from its own allocator, once a thread that multiplies."""
    each = next((size for name, size in _CUBLAS_BYTES.items() if name in (plan.gpu or "")), _CUBLAS_BEFORE_HOPPER_BYTES)
    size = 0 if plan.on_cpu else 2 * each
    return Term("workspaces", size, f"2 * {each}", "PyTorch's cuBLAS workspaces of the main and the autograd thread")


def rounding(plan: Plan) -> Term:
    """What the caching allocator counts beside the weights' own bytes: 512 a tensor, and rests that it cannot split."""
    size = 0 if plan.on_cpu else _resident_bytes(plan) - sum(weight_sizes(plan))
    return Term(
        "rounding", max(0, size), "the weights' requests replayed", "CUDACachingAllocator.cpp: round_size, should_split"
    )


def _resident_bytes(plan: Plan) -> int:
    """What the loaded weights count as allocated.

    A quantised base arrives in 16 bits, a few matrices ahead of the one that is packed, and what is lifted to float32
    is lifted last; both decide which blocks the tensors that stay get.
    """
    if not plan.is_nf4:
        return resident_bytes(list(weight_sizes(plan)))
    allocator, shape, rest = CachingAllocator(), plan.shape, []
    linears = [linear for _ in range(shape.num_layers) for linear in shape.linears]
    rest.append((allocator.new(2 * shape.embedding_parameters), shape.embedding_parameters))
    arrived = deque(allocator.new(2 * linear.weight) for linear in linears[:_LOADED_AHEAD])
    for place, linear in enumerate(linears, _LOADED_AHEAD):
        for size in _nf4(linear, plan):
            allocator.new(size)
        allocator.free(arrived.popleft())
        if place < len(linears):
            arrived.append(allocator.new(2 * linears[place].weight))
        if linear.bias:
            rest.append((allocator.new(2 * linear.out_features), linear.out_features))
    small = [shape.hidden_size] * (2 * shape.num_layers + 1)
    small += [shape.head_dim] * (2 * shape.num_layers if shape.query_key_norms else 0)
    rest += [(allocator.new(2 * size), size) for size in (*small, shape.head_parameters)]
    for block, size in rest if plan.lifts_to_float32 else ():
        allocator.new(4 * size)
        allocator.free(block)
    for size in adapter_sizes(plan):
        allocator.new(size)
    return allocator.allocated_bytes


def optimizer_states(plan: Plan) -> Term:
    if plan.recipe.optimizer.name == "adamw":
        return Term(
            "optimizer_states", 2 * plan.trainable_bytes, "2 * trained, in their type",
            "AdamW's two moments (arXiv 1711.05101)",
        )  # fmt: skip
    small = 0 if plan.is_adapter else plan.shape.small_parameters
    quantised = round(2 * (plan.trainable - small) * _EIGHT_BIT_STATE_BYTES)
    return Term(
        "optimizer_states", quantised + 8 * small, f"2 * (1 + 4/256) * trained, 8 for tensors under {_LEAST_EIGHT_BIT}",
        "8-bit optimizers by blocks of 256 (arXiv 2110.02861), as bitsandbytes keeps them; paged: as resident",
    )  # fmt: skip


def gradients(plan: Plan) -> Term:
    return Term("gradients", plan.trainable_bytes, "trained, in their type", "`.grad` has its parameter's type")


def accumulated_gradients(plan: Plan) -> Term:
    """Gradients of the micro-batches before this one; with one micro-batch they were freed by the last step."""
    return Term(
        "gradients", plan.trainable_bytes if plan.accumulates else 0, "trained, in their type",
        "batch.accumulate > 1 keeps `.grad` between micro-batches",
    )  # fmt: skip


def autocast_copies(plan: Plan) -> Term:
    """16-bit copies of the blocks' float32 matrices, which autocast caches and the graph keeps."""
    cached = plan.recipe.memory.autocast and plan.weight_bytes == 4 and not plan.is_nf4
    matrices = plan.shape.linear_weights + plan.shape.embedding_parameters
    return Term(
        "autocast_copies", 2 * matrices if cached else 0, "2 * matrices", "torch.autocast's cache of cast weights"
    )


def load_temporaries(plan: Plan) -> Term:
    """A 16-bit matrix on its way to NF4, or the embedding in 16 bits beside its float32 copy."""
    largest = max(linear.weight for linear in plan.shape.linears)
    lifted = plan.shape.embedding_parameters if plan.lifts_to_float32 else 0
    size = 2 * max(largest, lifted) if plan.is_nf4 else 0
    return Term("load_temporaries", size, "2 * largest matrix", "quantising or lifting one tensor after the other")


def step_temporaries(plan: Plan) -> Term:
    impl = plan.recipe.optimizer.impl if plan.recipe.optimizer.name == "adamw" else "fused"
    largest = max((*adapter_sizes(plan), 0) if plan.is_adapter else [plan.shape.largest_tensor * plan.weight_bytes])
    copies, how = {
        "fused": (0, "0"),
        "foreach": (plan.trainable_bytes, "one copy of what is trained"),
        "single": (2 * largest, "twice the largest tensor: a root and a quotient"),
    }[impl]
    return Term("step_temporaries", copies, how, f"torch.optim.AdamW, {impl}")
