"""A recipe's estimate held against a device: the verdict, the levers, the largest size, and the JSON document."""

from __future__ import annotations

from dataclasses import dataclass, replace

from training.calculator import advice, devices, lengths, shapes
from training.calculator import solve as solving
from training.calculator.devices import Device
from training.calculator.estimate import Estimate
from training.calculator.formula import estimate
from training.calculator.lengths import Longest
from training.calculator.parallel import Parallel
from training.recipe.load import Resolved


@dataclass(frozen=True)
class Fit:
    """The answer of `memfit`. `verdict` is `fits`, `tight` (within the margin, counts as fitting), `no`, or None."""

    recipe_name: str
    estimate: Estimate
    device: Device | None
    levers: tuple[advice.Lever, ...]
    solution: solving.Solution | None
    parallel: Parallel | None = None

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
        }


def fit(
    resolved: Resolved, *, gpu: str | None = None, vram: str | None = None, solve: str | None = None,
    longest: Longest | None = None, with_levers: bool = True, parallel: Parallel | None = None,
) -> Fit:  # fmt: skip
    """Estimate a recipe and hold it against the device named, or the one found.

    `solve` is `batch`, `seq` or `rank`. `longest` is the longest record of the prepared data, whose length counts.
    With `parallel` the device is one rank's.
    """
    recipe = lengths.shortened(resolved.recipe, longest)
    device = devices.choose(recipe, gpu=gpu, vram=vram)
    on_cpu = device is not None and device.kind == "cpu"
    now = estimate(recipe, on_cpu=on_cpu, gpu=device.name if device else None, parallel=parallel)
    if longest is not None and not recipe.data.packing:
        now = replace(now, assumptions=(longest.in_words, *now.assumptions))
    levers = tuple(advice.levers(recipe, now, device, on_cpu=on_cpu, parallel=parallel)) if with_levers else ()
    solution = None
    if solve is not None:
        positions = shapes.of_model(recipe.model).max_positions
        solution = solving.largest(recipe, solve, device, max_positions=positions, on_cpu=on_cpu, parallel=parallel)
    return Fit(recipe.name, now, device, levers, solution, parallel)
