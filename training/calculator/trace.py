"""A real step under fake tensors: the model's own code runs, every storage is followed, nothing is held.

The step is a `StepProbe`'s: the trainer's own, handed in by the commands, or the plain Hugging Face one. It runs on
fake CPU tensors; for a GPU what CUDA's kernels allocate is imitated (`training.calculator.kernels`), and every request
goes through the simulated caching allocator, in the order in which they happen.

A model whose forward pass branches on its data cannot be traced and is refused by name.

This module imports torch, so it is imported inside functions alone. Legend in `training.calculator.plan`.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch._subclasses import fake_tensor

from training.calculator import kernels, loading, runtime, watch
from training.calculator.allocator import CachingAllocator, ExactAllocator
from training.calculator.estimate import Estimate, Instant, Term
from training.calculator.plain import PlainProbe, optimizer, said
from training.calculator.plan import Plan
from training.calculator.probe import MakeProbe, StepProbe, dtype_of
from training.calculator.shapes import config_of
from training.calculator.timeline import Timeline
from training.core.errors import Problems, TrainyardError, UserError
from training.core.report import again

_STEPS = 2
_MOST_MICRO_BATCHES = 2
_BRANCHES = (
    fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedFakeTensorException,
)  # fmt: skip
_SOURCE = "counted under fake tensors"


@dataclass(frozen=True)
class Traced:
    """The highest counts of a traced step, by phase and over all, and what is live at the peak."""

    plan: Plan
    step: str
    phases: dict[str, int]
    terms: dict[str, int]  # by what it is for; they add up to allocated_bytes
    modules: dict[str, int]  # what the forward pass keeps, by the module that made it
    allocated_bytes: int
    reserved_bytes: int
    parameters: int
    trainable: int
    timeline: Timeline  # of the second step

    def to_json(self) -> dict:
        return {
            "phases": self.phases, "terms": self.terms, "modules": self.modules,
            "allocated_bytes": self.allocated_bytes, "reserved_bytes": self.reserved_bytes,
        }  # fmt: skip

    def estimate(self) -> Estimate:
        """The trace as an estimate, with the same margins as the formula's."""
        peak = tuple(Term(name, size, "storages counted", _SOURCE) for name, size in self.terms.items())
        at = max(self.phases, key=lambda name: self.phases[name])
        instants = tuple(
            Instant(name, peak if name == at else (Term("tensors", size, "storages counted", _SOURCE),))
            for name, size in self.phases.items()
        )
        ratio = self.reserved_bytes / self.allocated_bytes
        overhead = runtime.overhead(self.plan, self.allocated_bytes, ratio)
        assumed = (
            f"{self.plan.B} x {self.plan.S} tokens a micro-batch, every position trained, no step longer than that",
            f"traced: {self.step} of transformers' own modules under fake tensors, two steps and an evaluation",
            *runtime.assumptions(self.plan, overhead[1]),
        )
        return Estimate(self.parameters, self.trainable, instants, overhead, assumed, method="trace")


def trace(plan: Plan, make: MakeProbe | None = None) -> Traced:
    """Run two steps of a recipe under fake tensors: `make`'s own for the trainyard profile, else the plain one.

    Raises UserError or Problems where the step cannot be traced, with what stands in the way.
    """
    _require_traceable(plan, make)
    expands = plan.recipe.memory.expandable_segments
    log = watch.Log(ExactAllocator() if plan.on_cpu else CachingAllocator(expands=expands))
    with contextlib.ExitStack() as stack:
        stack.enter_context(fake_tensor.FakeTensorMode(allow_non_fake_inputs=True))
        if not plan.on_cpu:
            stack.enter_context(kernels.of_cuda())
        if not plan.recipe.data.packing:
            stack.enter_context(kernels.no_packed_rows())
        with _refused(plan):
            probe = _probe(plan, make)
        watched = watch.Watch(log, probe.model, getattr(probe.model.config, "vocab_size", None))
        watched.peaks["load"] = _load(log.allocator, probe, plan)
        steps = _Steps(plan, probe, watched)
        with _refused(plan, watched), watched:
            steps.run()
        return steps.traced()


def _probe(plan: Plan, make: MakeProbe | None) -> StepProbe:
    """The step to trace; a second micro-batch stands for all that follow the first."""
    if plan.is_hf:
        return PlainProbe(plan)
    recipe = plan.recipe
    batch = replace(recipe.batch, accumulate=min(_MOST_MICRO_BATCHES, recipe.batch.accumulate))
    dtype = dtype_of(recipe.memory.weights)
    return make(replace(recipe, batch=batch), torch.device("cpu"), dtype, optimizer)


def _require_traceable(plan: Plan, make: MakeProbe | None) -> None:
    recipe = plan.recipe
    limits = [("memory.autocast", recipe.memory.autocast, (False,))]
    if plan.is_hf:
        limits += [
            ("memory.loss_chunk", recipe.memory.loss_chunk, ("auto", 0)),
            ("data.packing", recipe.data.packing, (False,)),
        ]
    elif make is None or recipe.memory.weights == "nf4":
        limits.append(("memory.profile", recipe.memory.profile, ("hf",)))
    problems = [
        UserError(f"{key} is not traced", where=key, found=value, expected=" or ".join(str(one) for one in known))
        for key, value, known in limits
        if value not in known
    ]
    if problems:
        way = again("memory.profile=hf", "memory.loss_chunk=0", "memory.autocast=false", "data.packing=false")
        raise Problems("the trace does not run this step", problems, next_command=way)


def _load(allocator: watch.Allocator, probe: StepProbe, plan: Plan) -> int:
    """Make the loader's requests: as they are known of the shape, else one for each tensor. Returns their peak."""
    if plan.shape is not None:
        loading.load(allocator, plan)
    else:
        base = getattr(probe, "base_sizes", ())
        for elements, is_packed in base:
            for size in loading.packed_sizes(elements, plan) if is_packed else (elements * plan.weight_bytes,):
                allocator.new(size)
        for parameter in probe.model.parameters():
            if (parameter.requires_grad and plan.is_adapter) or not base:
                allocator.new(parameter.numel() * parameter.element_size())
    return allocator.peak_allocated_bytes


@contextlib.contextmanager
def _refused(plan: Plan, watched: watch.Watch | None = None) -> Iterator[None]:
    """Turn what a model's own code raises into a refusal of the model by name."""
    family = config_of(plan.recipe.model).get("model_type")
    try:
        yield
    except TrainyardError:
        raise
    except _BRANCHES as error:
        module, operator = (watched and watched.failed_in) or ("", str(error))
        raise UserError(
            f"{family} branches on its data, so it cannot be traced",
            where=module or "its forward pass", found=operator,
            expected="a family that the formula knows, or a forward pass whose steps do not depend on the tokens",
        ) from error  # fmt: skip
    except (TypeError, ValueError, RuntimeError, LookupError, AttributeError, AssertionError, ImportError) as error:
        module = watched.failed_in[0] if watched and watched.failed_in else ""
        raise UserError(
            f"a step of {family} fails with this configuration", where=module or "its forward pass", found=said(error),
            expected="a configuration with which transformers' model runs",
        ) from error  # fmt: skip


class _Steps:
    """Two steps of a probe and an evaluation, watched."""

    def __init__(self, plan: Plan, probe: StepProbe, watched: watch.Watch):
        self.plan, self.probe, self.watched, self.log = plan, probe, watched, watched.log
        self.workspaces = self.number = 0

    def run(self) -> None:
        for self.number in range(1, _STEPS + 1):
            self.probe.step(self.phase)
            for state in self.probe.optimizer.state.values():
                for value in state.values():
                    if isinstance(value, torch.Tensor):
                        self.watched.name(value, "optimizer_states")
        self.probe.evaluate(self.phase)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Watch a phase; what multiplies first takes its thread's workspace, and gradients get their name."""
        needed = 2 if name == "backward" else 1
        while self.workspaces < needed and not self.plan.on_cpu:
            self.workspaces += 1
            self.log.come(self.plan.workspace_bytes, "workspaces")
        with self.watched.phase(f"first_{name}" if self.number == 1 else name):
            yield
        if name == "backward":
            for parameter in self.probe.model.parameters():
                if parameter.grad is not None:
                    self.watched.name(parameter.grad, "gradients")

    def traced(self) -> Traced:
        log, at = self.log, self.log.peak_at()
        terms, modules = Counter(), Counter()
        allocated = max(log.allocated_bytes[at], self.watched.peaks["load"])
        if allocated == log.allocated_bytes[at]:
            for piece in log.live_at(at):
                terms[piece.label] += piece.num_bytes
                if piece.label == watch.ACTIVATIONS:
                    modules[piece.module] += piece.num_bytes
        terms["weights"] += allocated - terms.total()  # loaded before the log began
        parameters = list(self.probe.model.parameters())
        base = getattr(self.probe, "base_sizes", None)
        trainable = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
        adapters = trainable if self.plan.is_adapter else 0
        return Traced(
            plan=self.plan,
            step="the plain Hugging Face step" if self.plan.is_hf else "the trainer's step",
            phases=self.watched.peaks,
            terms={name: size for name, size in terms.most_common() if size},
            modules=dict(modules.most_common()),
            allocated_bytes=allocated,
            reserved_bytes=max(log.reserved_bytes),
            parameters=adapters + sum(size for size, _ in base) if base else sum(one.numel() for one in parameters),
            trainable=trainable,
            timeline=log.timeline("forward", "evaluation"),
        )
