"""Other estimators over the same complete published rows, in one run: fitcheck-llm, and accelerate's estimate-memory.

Each peer is asked what a person would ask it: the model's configuration and the settings that it has words for. A row
that it has no words for is listed with the reason. Neither reaches the network here: fitcheck-llm is given the
configuration and the number of parameters that it would fetch, accelerate an empty model of the configuration.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median

from training.calculator.bench import Bench, Error, nine_in_ten, percent
from training.calculator.plan import Plan
from training.calculator.published import Row, rows
from training.calculator.shapes import config_of
from training.core.errors import MachineError, Problems
from training.recipe.model import Recipe

MARK = "bench-memfit --peers"
TRACE_MARK = "bench-memfit --trace"
_MIB = 1 << 20
_NOTES = {
    "memfit": "what it reserves and NVML's count carry its margin, so as not to be under; the others' carry none",
    "memfit, bare": "its replay of the allocator and its context, without the margins",
    "fitcheck-llm 0.3.1": "the T4 rows are its own measurements; those with the role calibration set its constants",
    "memfit --trace": "the bare trace, without margins, and the context of the GPU",
    "accelerate, loading": "estimate-memory's total size in the type of the weights, NF4 as int4: no step at all",
    "accelerate, training": "estimate-memory's training with Adam in float16: a full one, since it knows no adapters",
}

Counts = dict[str, float]
"""Bytes by counter: allocated, reserved, nvml."""


class _NoWords(Exception):
    """The peer cannot be asked about a row; the message says why."""


@dataclass(frozen=True)
class Peer:
    """An estimator's errors over the complete rows, and the rows that it cannot describe, with the reason."""

    name: str
    errors: tuple[Error, ...]
    left_out: tuple[tuple[str, str], ...]

    def to_json(self) -> dict:
        return {
            "name": self.name, "errors": [error.to_json() for error in self.errors],
            "left_out": [{"id": row, "reason": reason} for row, reason in self.left_out],
        }  # fmt: skip


def run(bench: Bench) -> tuple[Peer, ...]:
    """Ask every peer about every complete row; this project's own estimates of them come first.

    Raises MachineError where a peer is not installed.
    """
    ours = Peer("memfit", tuple(error for error in bench.errors if error.row.is_complete), ())
    asked = {
        "memfit, bare": _without_margins,
        "fitcheck-llm 0.3.1": _fitcheck(), "accelerate, loading": _accelerate_loading,
        "accelerate, training": _accelerate_training,
    }  # fmt: skip
    with _questions() as questions:
        return (ours, *(_ask(name, ask, questions) for name, ask in asked.items()))


def traced() -> Peer:
    """The trace's own counts of every complete row, without memfit's margins; it takes minutes."""
    with _questions() as questions:
        return _ask("memfit --trace", _trace, questions)


@dataclass(frozen=True)
class _Question:
    """A complete row, what its recipe plans, and its model's configuration."""

    row: Row
    plan: Plan
    config: dict


@contextlib.contextmanager
def _questions() -> Iterator[list[_Question]]:
    """Every complete row as a question; the configurations' files are there for as long as it is asked."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for row in rows():
            if row.is_complete:
                own = Path(folder) / row["id"]
                own.mkdir()
                recipe = row.recipe(own)
                found.append(_Question(row, Plan.of(recipe, gpu=row.gpu), config_of(recipe.model)))
        yield found


def _ask(name: str, ask: Callable[[_Question], Counts], questions: Sequence[_Question]) -> Peer:
    errors, left_out = [], []
    for question in questions:
        row = question.row
        try:
            counts = ask(question)
        except _NoWords as reason:
            left_out.append((row["id"], str(reason)))
            continue
        errors += [Error(row, one.kind, one.num_bytes, round(counts[one.kind])) for one in row.measured]
    return Peer(name, tuple(errors), tuple(left_out))


# ---- fitcheck-llm


def _fitcheck() -> Callable[[Plan], Counts]:
    """What fitcheck-llm answers: its five tensor parts, its total, and the total less its context."""
    try:
        from fitcheck import GPU_DB, ModelConfig, TrainingConfig, estimate
        from fitcheck.gpu_db import gpu_key_for
        from fitcheck.overhead_db import get_overhead_profile
    except ImportError as error:
        raise MachineError(
            "a peer is not installed", found=f"no module {error.name}", expected="fitcheck-llm 0.3.1, of the lock file",
            next_command="make setup",
        ) from error  # fmt: skip

    def ask(question: _Question) -> Counts:
        plan, shape = question.plan, question.plan.shape
        training = TrainingConfig(**_fitcheck_words(plan.recipe, plan))
        model = ModelConfig(
            name=plan.recipe.name, num_params=shape.parameters, hidden_size=shape.hidden_size,
            num_layers=shape.num_layers, num_attention_heads=shape.num_heads, num_kv_heads=shape.num_key_value_heads,
            intermediate_size=shape.intermediate_size, vocab_size=shape.vocab_size, head_dim=shape.head_dim,
            tie_word_embeddings=shape.tied,
        )  # fmt: skip
        # by default a card without constants of its own, so that the general ones apply
        key = next((key for key in GPU_DB if (plan.gpu or "").lower().replace("gb", "").startswith(key)), "a100-40")
        report = estimate(model, training, GPU_DB[key])
        profile = get_overhead_profile(gpu_key_for(GPU_DB[key]), training.flash_attn, training.quantization)
        tensors = report.total_mib - report.overhead_mib
        reserved = report.total_mib - profile.base_context_mib
        return {"allocated": tensors * _MIB, "reserved": reserved * _MIB, "nvml": report.total_mib * _MIB}

    return ask


def _fitcheck_words(recipe: Recipe, plan: Plan) -> dict:
    memory = recipe.memory
    if memory.autocast:
        raise _NoWords("it has no autocast")
    if recipe.optimizer.name == "paged_adamw8bit":
        raise _NoWords("it has no paged optimizer")
    if plan.logit_tokens < plan.T:
        raise _NoWords("it has no chunked loss")
    return {
        "precision": "fp16" if plan.is_nf4 else memory.weights, "quantization": "nf4" if plan.is_nf4 else "none",
        "double_quant": memory.double_quant and plan.is_nf4,
        "optimizer": "adamw" if recipe.optimizer.name == "adamw" else "adam8bit",
        "optimizer_dtype": memory.adapter_dtype if recipe.lora else "fp32", "batch_size": plan.B, "seq_len": plan.S,
        "lora_rank": recipe.lora.rank if recipe.lora else None, "lora_targets": [one.name for one in plan.adapted],
        "grad_checkpoint": memory.gradient_checkpointing, "flash_attn": not plan.is_eager,
    }  # fmt: skip


# ---- this project's own figures, bare


def _without_margins(question: _Question) -> Counts:
    from training.calculator import runtime
    from training.calculator.formula import instants
    from training.calculator.replay import replay

    plan = question.plan
    replayed = replay(plan)
    allocated = max(instant.num_bytes for instant in instants(plan, replayed))
    reserved = allocated * runtime.reserved_ratio(plan, allocated, replayed)
    return {"allocated": allocated, "reserved": reserved, "nvml": reserved + runtime.context(plan).num_bytes}


def _trace(question: _Question) -> Counts:
    from training.calculator import runtime
    from training.calculator.trace import trace

    try:
        found = trace(question.plan)
    except Problems as error:
        raise _NoWords(error.problems[0].what) from error
    context = runtime.context(question.plan).num_bytes
    reserved = found.reserved_bytes
    return {"allocated": found.allocated_bytes, "reserved": reserved, "nvml": reserved + context}


# ---- accelerate estimate-memory


def _accelerate_loading(question: _Question) -> Counts:
    parts = {"fp32": 1, "fp16": 2, "bf16": 2, "nf4": 8}[question.plan.recipe.memory.weights]
    return _of_all_counters(_float32_bytes(question) / parts)


def _accelerate_training(question: _Question) -> Counts:
    from accelerate.commands.estimate import estimate_training_usage

    if question.plan.is_nf4:
        raise _NoWords("it has no training in int4")
    kind = "float32" if question.plan.recipe.memory.weights == "fp32" else "float16"
    return _of_all_counters(max(estimate_training_usage(_float32_bytes(question), kind).values()))


def _of_all_counters(num_bytes: float) -> Counts:
    """Its one figure does not say which counter it means."""
    return dict.fromkeys(("allocated", "reserved", "nvml"), num_bytes)


def _float32_bytes(question: _Question) -> int:
    return _empty_model_bytes(tuple(sorted(question.config.items())))


@cache
def _empty_model_bytes(config: tuple[tuple[str, object], ...]) -> int:
    """The size of an empty model as `accelerate estimate-memory` makes it: in float32, without the head."""
    import torch
    from accelerate import init_empty_weights
    from accelerate.utils import calculate_maximum_sizes
    from transformers import AutoConfig, AutoModel

    with init_empty_weights():
        model = AutoModel.from_config(AutoConfig.for_model(**dict(config)), dtype=torch.float32)
    return calculate_maximum_sizes(model)[0]


# ---- as a page shows it


def page_part(peers: Sequence[Peer]) -> str:
    """The peers' figures by counter and attention, what they cannot describe, and what to know of them, as Markdown."""
    lines = [
        "| estimator | counter | attention | readings | median of the size | nine in ten within | lowest | highest |",
        "|---|---|---|---:|---:|---:|---:|---:|",
    ]
    for peer in peers:
        lines += [_line(peer.name, group, errors) for group, errors in sorted(_groups(peer.errors).items())]
    lines += ["", *(f"- {peer.name}: {_NOTES[peer.name]}" for peer in peers)]
    for peer in peers:
        reasons = Counter(reason for _, reason in peer.left_out)
        lines += [
            f"- {peer.name} cannot describe {number} rows: {reason}" for reason, number in sorted(reasons.items())
        ]
    return "\n".join([*lines, *_holdout(peers)])


def _groups(errors: Sequence[Error]) -> dict[tuple[str, str], list[Error]]:
    groups = defaultdict(list)
    for error in errors:
        counter = "allocated" if error.kind == "allocated" else "reserved, nvml"
        groups[counter, "eager" if error.row["attn"] == "eager" else "sdpa"].append(error)
    return groups


def _line(name: str, group: tuple[str, str], errors: Sequence[Error]) -> str:
    found = [error.relative for error in errors]
    sizes = [abs(one) for one in found]
    figures = (_size(median(sizes)), _size(nine_in_ten(sizes)), percent(min(found)), percent(max(found)))
    return f"| {name} | {' | '.join(group)} | {len(found)} | {' | '.join(figures)} |"


def _size(value: float) -> str:
    return f"{value * 100:.1f} %"


def _holdout(peers: Sequence[Peer]) -> list[str]:
    """NVML's count on the T4 rows that did not set fitcheck-llm's constants."""
    lines = []
    for peer in peers[:3]:
        kept = [error for error in peer.errors if error.kind == "nvml" and "role=calibration" not in error.row["notes"]]
        found = [error.relative for error in kept]
        lines.append(
            f"- {peer.name} on the {len(found)} T4 rows that did not set those constants, NVML's count: mean of the "
            f"size {_size(sum(map(abs, found)) / len(found))}, {percent(min(found))} to {percent(max(found))}"
        )
    return lines
