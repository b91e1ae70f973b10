"""What a process holds beside its tensors: the allocator's slack, and the device's context or the interpreter.

On a CPU the count is the process's resident memory, so the interpreter with torch and transformers is part of it.
`python -m training.calculator.runtime` measures that part on this machine, by training a toy model for three steps.
"""

from __future__ import annotations

from training.calculator.estimate import Term

MIB = 1 << 20

INTERPRETER_BYTES = 400 * MIB
"""torch 2.13 (CPU build) and transformers 5.24 on x86-64 Linux, two threads: 358 MiB after three steps of a toy model
by the command above; the rest is what data, tokenizer and checkpoint libraries add (a training run with 49 MiB of
tensors peaked at 438 MiB)."""

CUDA_CONTEXT_BYTES = 1024 * MIB
"""Published contexts range from 105 MiB to 1.4 GiB by GPU, driver and CUDA version; this is a pessimistic default."""

_CPU_SLACK = 0.20
"""Seven training runs with 49 to 1434 MiB of tensors peaked at 4 to 18 % of them above tensors and interpreter, or
under 80 MiB."""
_LEAST_CPU_SLACK_BYTES = 80 * MIB
_CUDA_SLACK = {"sdpa": 0.03, "eager": 0.10}
_LEAST_SLACK_BYTES = 64 * MIB


def overhead(allocated_bytes: int, *, on_cpu: bool, is_eager: bool) -> tuple[Term, Term]:
    """The allocator's and the process's share beside tensors of `allocated_bytes`."""
    if on_cpu:
        slack = max(_LEAST_CPU_SLACK_BYTES, round(_CPU_SLACK * allocated_bytes))
        allocator = Term("allocator", slack, "max(80 MiB, 0.20 * tensors)", "heap freed but not given back; measured")
        process = Term("runtime", INTERPRETER_BYTES, "400 MiB", "python -m training.calculator.runtime")
        return allocator, process
    share = _CUDA_SLACK["eager" if is_eager else "sdpa"]
    slack = max(_LEAST_SLACK_BYTES, round(share * allocated_bytes))
    allocator = Term(
        "allocator", slack, f"max(64 MiB, {share:.2f} * tensors)", "PyTorch's caching allocator: split blocks"
    )
    return allocator, Term("context", CUDA_CONTEXT_BYTES, "1 GiB", "pessimistic default of published contexts")


def assumptions(*, on_cpu: bool) -> tuple[str, ...]:
    """What stands behind the figures of `overhead`."""
    if on_cpu:
        return ("the CPU's count is the process's peak resident memory, with two threads and glibc's allocator",)
    return (
        "the context is a default, not a measurement of this device; nothing else uses the device",
        "the allocator's slack is a margin by attention path, not a replay",
    )


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
