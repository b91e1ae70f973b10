"""What a process holds beside its tensors: the allocator's slack, and the device's context or the interpreter.

On a CPU the count is the process's resident memory, so the interpreter with torch and transformers is part of it.
`python -m training.calculator.runtime` measures that part on this machine, by training a toy model for three steps.
"""

from __future__ import annotations

from collections.abc import Iterator

from training.calculator.estimate import Term
from training.calculator.parallel import NCCL_BYTES
from training.calculator.plan import Plan
from training.calculator.replay import Replayed
from training.calculator.standing import optimizer_states, paged_states
from training.recipe.model import Recipe

MIB = 1 << 20

INTERPRETER_BYTES = 430 * MIB
"""torch 2.13 (CPU build) and transformers 5.24 on x86-64 Linux, two threads: 358 MiB after three steps of a toy model
by the command above. The rest is what else a process holds: the demo's, which has made its data and its tokenizer
before it trains, peaked at 616 MiB with 120 MiB of tensors; the same training in a process of its own at 549."""

_BITSANDBYTES_BYTES = 96 * MIB
"""bitsandbytes 0.50 beside torch and transformers: 45 MiB by the import, 68 after a packed layer's step."""

DEFAULT_CONTEXT_BYTES = 1024 * MIB
"""Published contexts range from 105 MiB to 1.4 GiB by GPU, driver and CUDA version; this is a pessimistic default."""

CONTEXTS = {
    "T4": (round(140.875 * MIB), "measured at a peak, CUDA 12.8 and 13.0: fitcheck-llm 0.3.1's measurements"),
    "V100": (
        1343 * MIB,
        "measured with CUDA 11.2, before modules were loaded lazily: transformers' model_memory_anatomy",
    ),
    "TITAN V": (1008 * MIB, "as users reported it, CUDA before 11.7"),
    "RTX 3090": (1001 * MIB, "as users reported it, CUDA 11.1"),
}
"""By a part of the GPU's name: what a process uses of it beside PyTorch's segments, and where that was measured."""

_CPU_SLACK = 0.20
"""Seven training runs with 49 to 1434 MiB of tensors peaked at 4 to 18 % of them above tensors and interpreter, or
under 80 MiB."""
_LEAST_CPU_SLACK_BYTES = 80 * MIB
_REPLAY_MARGIN = {"fused": 0.05, "eager": 0.10}
"""What is added to the replay's reserved bytes. Runs of one and the same recipe differed by 3.5 %; of eager attention
the order of the kernels' own requests decides more. The least is a handful of the allocator's 20 MiB segments."""
_LEAST_MARGIN_BYTES = 96 * MIB


def overhead(plan: Plan, allocated_bytes: int, ratio: float) -> tuple[Term, ...]:
    """The allocator's and the process's share beside tensors of `allocated_bytes`, and states that are paged.

    `ratio` is what a caching allocator reserves over what it holds; on a CPU there is none.
    """
    if plan.on_cpu:
        slack = max(_LEAST_CPU_SLACK_BYTES, round(_CPU_SLACK * allocated_bytes))
        allocator = Term("allocator", slack, "max(80 MiB, 0.20 * tensors)", "heap freed but not given back; measured")
        size = INTERPRETER_BYTES + (_BITSANDBYTES_BYTES if plan.is_nf4 else 0)
        process = Term("runtime", size, f"{size // MIB} MiB", "python -m training.calculator.runtime")
        return allocator, process, *_snapshot(plan)
    paged = () if plan.shape is None else (paged_states(plan),)
    return reserve(plan, allocated_bytes, ratio), context(plan), *(one for one in paged if one.num_bytes)


def _snapshot(plan: Plan) -> tuple[Term, ...]:
    """The copy that a checkpoint is written from while training goes on: host memory, as the tensors are here."""
    if plan.shape is None or not plan.recipe.checkpoint.background:
        return ()
    size = plan.trainable_bytes + optimizer_states(plan).num_bytes
    return (Term("snapshot", size, "trained + optimizer states", "checkpoint.background: true"),)


def reserved_ratio(plan: Plan, allocated_bytes: int, replayed: Replayed | None) -> float:
    """Reserved over allocated bytes by the replay of one process; a rank keeps as many bytes beside its tensors."""
    if replayed is None:
        return 1.0
    if plan.parallel is None:
        return replayed.ratio
    return 1 + (replayed.reserved_bytes - replayed.allocated_bytes) / allocated_bytes


def reserve(plan: Plan, allocated_bytes: int, ratio: float) -> Term:
    """What the caching allocator reserves beyond the tensors, when its replay reserves `ratio` times what it holds."""
    share = _REPLAY_MARGIN["eager" if plan.is_eager else "fused"]
    replayed = round(allocated_bytes * ratio)
    slack = replayed - allocated_bytes + max(_LEAST_MARGIN_BYTES, round(share * replayed))
    how = f"{ratio - 1:.3f} * tensors, and {share:.2f} of both (at least 96 MiB)"
    return Term("allocator", slack, how, "two steps' requests replayed through PyTorch's caching allocator")


def context(plan: Plan) -> Term:
    """What the device's context takes: as this machine's calibration measured it, else by the GPU's name."""
    if known := plan.calibration:
        how = f"measured here on {known.gpu}, driver {known.driver}, torch {known.torch}, as were the workspaces"
        return Term("context", known.context_bytes, f"{known.context_bytes / MIB:.0f} MiB", how)
    size, source = next(
        (found for name, found in CONTEXTS.items() if name.lower() in (plan.gpu or "").lower()),
        (DEFAULT_CONTEXT_BYTES, "a pessimistic default, not measured on this GPU"),
    )
    more = NCCL_BYTES if plan.parallel is not None else 0
    how = f"{size / MIB:.0f} MiB" + (f" + {more // MIB} MiB of NCCL's" if more else "")
    return Term("context", size + more, how, source)


def assumptions(plan: Plan, context: Term) -> tuple[str, ...]:
    """What stands behind the figures of `overhead`, whose second one is `context`."""
    if plan.on_cpu:
        how = ("the CPU's count is the process's peak resident memory, with two threads and glibc's allocator",)
    else:
        how = (
            f"the context is {context.equation}: {context.source}; nothing else uses the device",
            "steps of one size under the allocator's defaults; where lengths vary, less of what it holds fits again",
        )
    return how + tuple(_others(plan.recipe))


def _others(recipe: Recipe) -> Iterator[str]:
    """What the recipe lets others do, whose memory is theirs."""
    if recipe.backend != "native":
        yield f"the step of backend native: what {recipe.backend}'s own takes is not estimated, and may be more"
    if recipe.memory.loss_kernel != "torch":
        yield f"the loss as torch sums it: what {recipe.memory.loss_kernel}'s kernel takes is not estimated"


def _measure() -> None:
    """Print the resident memory of the interpreter as a trainer has it, stage by stage."""
    import psutil

    def show(stage: str) -> None:
        print(f"{stage:<28}{psutil.Process().memory_info().rss / MIB:8.1f} MiB")

    show("interpreter")
    import torch

    show("torch")
    from transformers import AutoConfig, AutoModelForCausalLM

    toy = AutoConfig.for_model(
        "llama", vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, use_cache=False,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(toy, dtype=torch.float32, attn_implementation="sdpa")
    show("transformers and a toy model")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(3):
        ids = torch.randint(0, 256, (2, 64))
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    show("three steps of it")


if __name__ == "__main__":
    _measure()
