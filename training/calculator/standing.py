"""The terms that do not grow with the batch: weights, workspaces, gradients, optimizer states, the step's copies.

Legend in `training.calculator.plan`.
"""

from __future__ import annotations

from training.calculator.estimate import Term
from training.calculator.loading import adapter_sizes, weight_sizes
from training.calculator.plan import Plan
from training.calculator.replay import LEAST_EIGHT_BIT, LEAST_PAGED, Replayed

_SCALE_BYTES = 4 / 256
_EIGHT_BIT_STATE_BYTES = 1 + _SCALE_BYTES


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
    each = plan.workspace_bytes
    size = 0 if plan.on_cpu else 2 * each
    return Term("workspaces", size, f"2 * {each}", "PyTorch's cuBLAS workspaces of the main and the autograd thread")


def rounding(replayed: Replayed | None) -> Term:
    """What the caching allocator counts beside the tensors' own bytes: 512 a tensor, and rests that it cannot split."""
    size = replayed.rounding_bytes if replayed else 0
    source = "CUDACachingAllocator.cpp: round_size, should_split"
    return Term("rounding", size, "two steps' requests replayed, at their peak", source)


def optimizer_states(plan: Plan) -> Term:
    if plan.recipe.optimizer.name == "adamw":
        return Term(
            "optimizer_states", 2 * plan.trainable_bytes, "2 * trained, in their type",
            "AdamW's two moments (arXiv 1711.05101)",
        )  # fmt: skip
    small, own = _trained_under(plan, LEAST_EIGHT_BIT), plan.trainable - paged_elements(plan)
    quantised = round(2 * (own - small) * _EIGHT_BIT_STATE_BYTES + 2 * paged_elements(plan) * _SCALE_BYTES)
    return Term(
        "optimizer_states", quantised + 8 * small, f"2 * (1 + 4/256) * trained, 8 for tensors under {LEAST_EIGHT_BIT}",
        "8-bit optimizers by blocks of 256 (arXiv 2110.02861), as bitsandbytes keeps them",
    )  # fmt: skip


def paged_states(plan: Plan) -> Term:
    """States outside the allocator's pool, as if all of them stayed on the device."""
    how = f"2 * trained, of tensors from {LEAST_PAGED} elements on"
    return Term("paged_states", 2 * paged_elements(plan), how, "bitsandbytes, optimizer.py: get_state_buffer")


def paged_elements(plan: Plan) -> int:
    """Elements whose states are paged."""
    is_paged = plan.recipe.optimizer.name == "paged_adamw8bit"
    return plan.trainable - _trained_under(plan, LEAST_PAGED) if is_paged else 0


def _trained_under(plan: Plan, limit: int) -> int:
    """Elements of the trained tensors that have fewer than `limit`."""
    if not plan.is_adapter:
        return plan.shape.elements_of_tensors(under=limit)
    return sum(size // plan.a for size in adapter_sizes(plan) if size // plan.a < limit)


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
    if plan.is_nf4 and plan.on_cpu and not plan.is_hf:
        return Term("load_temporaries", 4 * plan.shape.parameters, "4 a parameter", "the base's file, read as a map")
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
