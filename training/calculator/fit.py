"""A recipe's estimate held against a device: the verdict, the levers, the largest size, and the JSON document."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from training.calculator import advice, devices, history, lengths, nvml, shapes
from training.calculator import solve as solving
from training.calculator.devices import Device
from training.calculator.estimate import Estimate
from training.calculator.formula import estimate
from training.calculator.lengths import Longest
from training.calculator.parallel import Parallel
from training.calculator.plan import Plan
from training.calculator.timeline import Timeline
from training.core.errors import MachineError, RunError, UserError
from training.core.report import again, make_command
from training.core.units import format_bytes, parse_bytes
from training.recipe.load import Resolved

if TYPE_CHECKING:
    from training.calculator.trace import Traced

Trace = Callable[[Plan], "Traced"]
"""Runs a plan's step under fake tensors: `training.calculator.trace.trace`, which imports torch."""


TRUSTED_DIFFERENCE = 0.02
"""Formula and trace may differ by this much in allocated bytes; beyond it the trace, which ran the code, is trusted."""


@dataclass(frozen=True)
class Fit:
    """The answer of `memfit`. `verdict` is `fits`, `tight` (within the margin, counts as fitting), `no`, or None.

    `estimate` is the one that is trusted; `other` the second opinion, where there is one.
    """

    recipe_name: str
    estimate: Estimate
    device: Device | None
    levers: tuple[advice.Lever, ...]
    solution: solving.Solution | None
    parallel: Parallel | None = None
    other: Estimate | None = None
    traced: dict | None = None
    timeline: Timeline | None = None  # of the traced step
    record: tuple[history.Past, ...] = ()  # runs of this device that are over

    @property
    def difference(self) -> float | None:
        """By how much of the trace's allocated bytes the formula's are above it."""
        if self.other is None:
            return None
        both = {one.method: one.peak.allocated_bytes for one in (self.estimate, self.other)}
        return both["formula"] / both["trace"] - 1

    @property
    def verdict(self) -> str | None:
        if self.device is None:
            return None
        needed = self.estimate.peak.device_bytes
        if needed <= self.device.usable_bytes:
            return "fits"
        return "tight" if needed <= self.device.available_bytes else "no"

    @property
    def fits(self) -> bool | None:
        return None if self.verdict is None else self.verdict != "no"

    def to_json(self) -> dict:
        return {
            "schema": 1,
            "recipe": self.recipe_name,
            "parallel": self.parallel.to_json() if self.parallel else None,
            "device": self.device.to_json() if self.device else None,
            "fits": self.fits,
            "verdict": self.verdict,
            **self.estimate.to_json(),
            "advice": [lever.to_json() for lever in self.levers],
            "solve": self.solution.to_json() if self.solution else None,
            "trace": self.traced,
            "difference": self.difference,
            "record": [past.to_json() for past in self.record] or None,
        }


def fit(
    resolved: Resolved, *, gpu: str | None = None, vram: str | None = None, solve: str | None = None,
    longest: Longest | None = None, with_levers: bool = True, trace: Trace | None = None, asks_trace: bool = False,
    parallel: Parallel | None = None, with_record: bool = False,
) -> Fit:  # fmt: skip
    """Estimate a recipe and hold it against the device named, or the one found.

    `solve` is `batch`, `seq` or `rank`. `longest` is the longest record of the prepared data, whose length counts.
    `trace` runs the step of a model that the formula does not know; with `asks_trace` that of any. `with_record` reads
    what this machine's finished runs peaked at. With `parallel` the device is one rank's, and nothing is traced. What
    fits with its margin gets no levers: each is an estimate of its own.
    """
    recipe = lengths.shortened(resolved.recipe, longest)
    device = devices.choose(recipe, gpu=gpu, vram=vram)
    on_cpu, name = device is not None and device.kind == "cpu", device.name if device else None
    by_formula, solution, traced = None, None, None
    try:
        by_formula = estimate(recipe, on_cpu=on_cpu, gpu=name, parallel=parallel)
    except shapes.UnknownShape as error:
        _require_traceable(error, trace is not None and parallel is None, solve)
        traced = trace(Plan.without_shape(recipe, on_cpu=on_cpu, gpu=name))
    if by_formula is not None and trace and asks_trace:
        traced = trace(Plan.of(recipe, on_cpu=on_cpu, gpu=name))
    if solve is not None:
        positions = shapes.of_model(recipe.model).max_positions
        solution = solving.largest(recipe, solve, device, max_positions=positions, on_cpu=on_cpu, parallel=parallel)
    now, other = _trusted(by_formula, traced.estimate() if traced else None)
    if longest is not None and not recipe.data.packing:
        now = replace(now, assumptions=(longest.in_words, *now.assumptions))
    seen = (traced.to_json(), traced.timeline) if traced else (None, None)
    record = history.of_device(device) if with_record else ()
    found = Fit(recipe.name, now, device, (), solution, parallel, other, *seen, record)
    if by_formula is None or not with_levers or found.verdict == "fits":
        return found
    return replace(
        found, levers=tuple(advice.levers(recipe, by_formula, device, on_cpu=on_cpu, parallel=parallel))
    )  # fmt: skip


def _require_traceable(error: shapes.UnknownShape, can_trace: bool, solve: str | None) -> None:
    """Raise where a model that the formula does not know cannot be traced, or is to be solved for: too slow."""
    if not can_trace:
        raise error
    if solve is not None:
        raise UserError(
            "a model that is traced is not solved for", where="--solve", found=error.what,
            expected=f"{error.expected}; or sizes to try, by --sweep instead",
        ) from error  # fmt: skip


def _trusted(by_formula: Estimate | None, by_trace: Estimate | None) -> tuple[Estimate, Estimate | None]:
    """The estimate to go by, and the other one: the formula, unless the trace differs by too much."""
    if by_formula is None or by_trace is None:
        return by_formula or by_trace, None
    difference = by_formula.peak.allocated_bytes / by_trace.peak.allocated_bytes - 1
    return (by_formula, by_trace) if abs(difference) <= TRUSTED_DIFFERENCE else (by_trace, by_formula)


def require(resolved: Resolved, longest: Longest | None = None, parallel: Parallel | None = None) -> Fit:
    """Hold a recipe against this machine, before anything is allocated; with `parallel` one rank of several, each with
    a GPU of its own, or with its share of this machine's memory.

    Raises MachineError where nothing here can train it, RunError where it does not fit; with who else uses the GPU.
    """
    result = fit(resolved, longest=longest, parallel=parallel)
    if parallel and result.device and result.device.kind == "cpu":
        result = replace(result, device=devices.share(result.device, parallel.ranks))
    needed = f"{format_bytes(result.estimate.peak.device_bytes)} needed"
    if result.device is None:
        raise MachineError(
            f"{nvml.ask().problem}, and a CPU trains in fp32 alone", found=needed,
            expected="a GPU, or memory.weights=fp32", next_command="make doctor",
        )  # fmt: skip
    _require_in_cap(resolved, result.estimate.peak.device_bytes)
    if result.fits is False:
        lever = advice.best(result.levers)
        longest_record = f" ({longest.in_words})" if longest and not resolved.recipe.data.packing else ""
        raise RunError(
            "the run does not fit this machine", found=needed + longest_record, expected=_room(result.device),
            next_command=again(*lever.override.split())
            if lever and lever.fits else make_command("memfit", CONFIG=resolved.path),
        )  # fmt: skip
    return result


def _require_in_cap(resolved: Resolved, needed_bytes: int) -> None:
    """Raise RunError where the estimate is above the most that the recipe lets the run take."""
    cap = resolved.recipe.memory.cap
    if cap is not None and needed_bytes > parse_bytes(cap):
        raise RunError(
            "the run does not fit its own cap", where=resolved.origins.get("memory.cap"), found=f"memory.cap: {cap}",
            expected=f"at least {format_bytes(needed_bytes)}",
            next_command=again(f"memory.cap={-(-needed_bytes // 2**20)}MiB"),
        )  # fmt: skip


def _room(device: Device) -> str:
    users = f"; in use by {', '.join(device.users)}" if device.users else ""
    return f"at most {format_bytes(device.usable_bytes)}, usable of {device.name}{users}"
