"""The tensors of a recipe's step on the CPU, counted by PyTorch's profiler and held against the formula's terms.

The profiler records every request to the CPU's allocator, a kernel's own ones too (torch.profiler, profile_memory).
Saved tensors are seen by torch.autograd.graph.saved_tensors_hooks: unique storages, parameters apart. What a device
takes beside its tensors cannot be seen here.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Iterator

from training.calculator import devices, formula
from training.calculator.activations import Activations
from training.calculator.calibration import Comparison
from training.calculator.plan import Plan
from training.calculator.probe import MakeProbe, StepProbe, dtype_of
from training.core import process
from training.core.errors import RunError
from training.core.report import again
from training.core.units import format_bytes
from training.recipe.load import Resolved
from training.recipe.model import Recipe

_ALLOWED = 0.01
_PHASES = {  # the formula's instants that lie in a phase of a step
    "forward": ("layer_forward", "forward_end"),
    "backward": ("chunks_end", "norm_backward", "layer_backward", "first_layer_backward", "backward_end"),
    "optimizer_step": ("optimizer_step",),
    "evaluation": ("evaluation",),
}
_OF_THE_LOSS = ("loss_backward", "head_backward")
"""Instants of the backward pass; of the forward pass where a loss in chunks makes its gradients there."""


def calibrate(resolved: Resolved, make_probe: MakeProbe) -> tuple[dict, list[Comparison]]:
    """Run two steps and an evaluation of a recipe on the CPU; returns the record and a comparison for each figure."""
    recipe = resolved.recipe
    estimate = formula.estimate(recipe, on_cpu=True)
    _require_room(estimate.peak.device_bytes)
    process.reset_peak_rss()
    measured = measure(recipe, make_probe)
    estimated = _estimated(recipe, estimate)
    comparisons = [Comparison(name, measured[name], estimated[name], _ALLOWED, _ALLOWED) for name in measured]
    record = {
        "schema": 1, "kind": "cpu-calibration", "device": None,
        "recipe": {"name": recipe.name, "sha256": resolved.sha256},
        "comparisons": [one.to_json() for one in comparisons],
        "resident": {"peak_bytes": process.peak_rss_bytes(), "estimate_bytes": estimate.peak.device_bytes},
    }  # fmt: skip
    return record, comparisons


def _require_room(needed_bytes: int) -> None:
    here = devices.this_machine()
    if needed_bytes > here.available_bytes:
        raise RunError(
            "the step does not fit this machine", found=f"{format_bytes(needed_bytes)} needed",
            expected=f"at most {format_bytes(here.available_bytes)}",
            next_command=again("model.arch.num_hidden_layers=2"),
        )  # fmt: skip


def _estimated(recipe: Recipe, estimate: object) -> dict[str, int]:
    plan = Plan.of(recipe, on_cpu=True)
    instants = {instant.name: instant.num_bytes for instant in estimate.instants}
    of_the_loss = "forward" if plan.has_chunks else "backward"
    within = _PHASES | {of_the_loss: (*_PHASES[of_the_loss], *_OF_THE_LOSS)}
    phases = {phase: max(instants[name] for name in names if name in instants) for phase, names in within.items()}
    return {
        "weights": formula.weights(plan).num_bytes,
        "saved_tensors": _saved(plan),
        "gradients": formula.gradients(plan).num_bytes,
        "optimizer_states": formula.optimizer_states(plan).num_bytes,
        **phases,
        "peak": max(phases.values()),
    }  # fmt: skip


def _saved(plan: Plan) -> int:
    """What the graph holds when the forward pass is over, the log-softmax among it.

    Checkpointed layers hold their inputs alone, a loss in chunks no log-softmax.
    """
    saved = formula.saved_activations(plan, Activations.of(plan)).num_bytes
    if not plan.recipe.memory.gradient_checkpointing:
        saved += formula.attention_mask(plan).num_bytes + formula.positions(plan).num_bytes
    if not plan.has_chunks:
        saved += 4 * plan.T * plan.shape.vocab_size
    return saved


# ---- measuring


def measure(recipe: Recipe, make_probe: MakeProbe) -> dict[str, int]:
    """The second step's figures in bytes: parts by name, peaks by phase, and the peak of all."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own lines on stderr
    import torch
    from torch.profiler import ProfilerActivity, profile

    probe = make_probe(recipe, torch.device("cpu"), dtype_of(recipe.memory.weights, on_cpu=True))
    probe.step(lambda _: contextlib.nullcontext())
    watch = _Parts(probe)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        probe.step(watch.phase)
        probe.evaluate(watch.phase)
    peaks = _peaks(profiled.profiler.kineto_results.events(), watch.standing)
    parts = {
        "weights": watch.weights, "saved_tensors": watch.saved, "gradients": watch.gradients,
        "optimizer_states": watch.states,
    }  # fmt: skip
    return parts | {name: peaks[name] for name in _PHASES} | {"peak": max(peaks.values())}


class _Parts:
    """The parts of a step's memory, as its phases come and go."""

    def __init__(self, probe: StepProbe):
        parameters = list(probe.model.parameters())
        self._parameters = parameters
        self._own = {tensor.untyped_storage()._cdata for tensor in parameters}
        self._saved = weakref.WeakSet()
        self.weights = sum(tensor.nbytes + _scale_bytes(tensor) for tensor in parameters)
        self.states = sum(tensor.nbytes for state in probe.optimizer.state.values() for tensor in state.values())
        self.standing = self.weights + self.states + sum(tensor.nbytes for tensor in probe.model.buffers())
        self.saved = self.gradients = 0

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        from torch.autograd.graph import saved_tensors_hooks
        from torch.profiler import record_function

        hooks = saved_tensors_hooks(self._pack, lambda saved: saved.tensor)
        with record_function(f"phase:{name}"), hooks if name == "forward" else contextlib.nullcontext():
            yield
        storages = {saved.tensor.untyped_storage()._cdata: saved.tensor.untyped_storage() for saved in self._saved}
        self.saved = max(self.saved, sum(one.nbytes() for key, one in storages.items() if key not in self._own))
        held = sum(one.grad.nbytes for one in self._parameters if one.grad is not None)
        self.gradients = max(self.gradients, held)

    def _pack(self, tensor: object) -> object:
        saved = _Saved(tensor)
        self._saved.add(saved)
        return saved


class _Saved:
    """A tensor for as long as the graph keeps it: a loss in chunks has walked its own graphs when it ends."""

    def __init__(self, tensor: object):
        self.tensor = tensor


def _scale_bytes(parameter: object) -> int:
    """Bytes of the scales, and of their scales, of a matrix in 4 bits."""
    state = getattr(parameter, "quant_state", None)
    return 0 if state is None else state.absmax.nbytes + (state.state2.absmax.nbytes if state.nested else 0)


def _peaks(events: list, standing_bytes: int) -> dict[str, int]:
    """The most that was alive in each phase, from what stood before and every request since, in time's order."""
    spans = [
        (one.start_ns(), one.start_ns() + one.duration_ns(), one.name().removeprefix("phase:"))
        for one in events
        if one.name().startswith("phase:")
    ]
    peaks, now = dict.fromkeys(_PHASES, 0), standing_bytes
    for time, num_bytes in sorted((one.start_ns(), one.nbytes()) for one in events if one.name() == "[memory]"):
        now += num_bytes
        for start, end, name in spans:
            if start <= time <= end:
                peaks[name] = max(peaks[name], now)
    return peaks
