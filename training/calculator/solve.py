"""The largest micro-batch, sequence length or rank that still fits, by bisection on the estimate itself.

Tensors never shrink when one of them grows, but what the allocator reserves for them may by a little. So a bisection
without the replay finds the neighbourhood, and one with it the border there: the answer fits, the next one does not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from training.calculator import runtime
from training.calculator.advice import with_size
from training.calculator.devices import Device
from training.calculator.formula import estimate, instants
from training.calculator.plan import Plan
from training.calculator.replay import Replayed, replay
from training.core.errors import UserError
from training.recipe.model import Recipe

KEYS = {"batch": "data.micro_batch", "seq": "data.seq_len", "rank": "lora.rank"}
_MOST = {"batch": 1 << 16, "seq": 1 << 22, "rank": 1 << 14}
_ROUGH_PASSES = 2
_LEAST = {"batch": 1, "seq": 2, "rank": 1}


@dataclass(frozen=True)
class Solution:
    """The largest value that fits, or None where not even the least does; `limit` says what ended the search."""

    variable: str
    value: int | None
    device_bytes: int | None
    limit: str

    def to_json(self) -> dict:
        return {
            "variable": self.variable, "value": self.value, "key": KEYS[self.variable],
            "device_bytes": self.device_bytes, "limit": self.limit,
        }  # fmt: skip


def largest(
    recipe: Recipe, variable: str, device: Device | None, *, max_positions: int | None, on_cpu: bool
) -> Solution:
    """Find the largest `batch`, `seq` or `rank` whose estimate is within the device's usable memory."""
    if device is None:
        raise UserError(
            "nothing to solve against", where="--solve", found="no device",
            expected="a GPU in this machine, --gpu NAME or --vram SIZE", next_command="add --vram 10GiB",
        )  # fmt: skip
    if variable == "rank" and recipe.lora is None:
        raise UserError("no adapter to solve for", where="--solve rank", found=f"method {recipe.method}",
                        expected="method lora or qlora", next_command="add method=lora")  # fmt: skip

    def sized(value: int) -> Recipe:
        return with_size(recipe, **{KEYS[variable].rpartition(".")[2]: value})

    def need(value: int) -> int:
        return estimate(sized(value), on_cpu=on_cpu, gpu=device.name).peak.device_bytes

    most = _most(recipe, variable, max_positions)
    low = _LEAST[variable]
    if need(low) > device.usable_bytes:
        return Solution(variable, None, None, f"{low} does not fit")
    near, replayed = low, None
    for _ in range(_ROUGH_PASSES):
        near = _last_that(
            lambda value, at=replayed: _roughly(sized(value), device, on_cpu, at) <= device.usable_bytes, low, most
        )
        replayed = None if on_cpu else replay(Plan.of(sized(near), gpu=device.name))
    value = _border(lambda value: need(value) <= device.usable_bytes, near, low, most)
    if value == most:
        limit = "the model's positions" if most == max_positions else "the search"
        return Solution(variable, value, need(value), limit if variable != "rank" else "the width of the model")
    return Solution(variable, value, need(value), f"{device.name}: {value + 1} does not fit")


def _most(recipe: Recipe, variable: str, max_positions: int | None) -> int:
    if variable == "seq" and max_positions:
        return max_positions
    if variable == "rank":
        return min(_MOST["rank"], Plan.of(recipe).shape.hidden_size)
    return _MOST[variable]


def _roughly(recipe: Recipe, device: Device, on_cpu: bool, replayed: Replayed | None) -> int:
    """Device bytes by the replay of another value."""
    plan = Plan.of(recipe, on_cpu=on_cpu, gpu=device.name)
    allocated = max(instant.num_bytes for instant in instants(plan, replayed))
    ratio = replayed.ratio if replayed else 1.0
    return allocated + sum(term.num_bytes for term in runtime.overhead(plan, allocated, ratio))


def _last_that(fits: Callable[[int], bool], low: int, high: int) -> int:
    """The last value that fits between one that does and one that may; the larger ones do not."""
    if fits(high):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _border(fits: Callable[[int], bool], near: int, least: int, most: int) -> int:
    """A value that fits and whose successor does not, beginning beside `near`; `least` is known to fit."""
    step = max(1, near // 256)
    if fits(near):
        low, high = near, min(most, near + step)
        while high < most and fits(high):
            step *= 2
            low, high = high, min(most, high + step)
        return _last_that(fits, low, high)
    low, high = max(least, near - step), near
    while low > least and not fits(low):
        step *= 2
        low, high = max(least, low - step), low
    return _last_that(fits, low, high)
