"""The largest micro-batch, sequence length or rank that still fits, by bisection on the estimate itself.

Tensors never shrink when one of them grows, but what the allocator reserves for them may by a little. So bisections
with the replay of the last guess find the neighbourhood, and ones that replay every value the border there: the
answer fits, the next one does not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

from training.calculator import runtime
from training.calculator.advice import with_size
from training.calculator.devices import Device
from training.calculator.formula import instants
from training.calculator.parallel import Parallel
from training.calculator.plan import Plan
from training.calculator.replay import Replayed, replay
from training.core.errors import UserError
from training.core.report import again
from training.recipe.model import Recipe

KEYS = {"batch": "data.micro_batch", "seq": "data.seq_len", "rank": "lora.rank"}
_MOST = {"batch": 1 << 16, "seq": 1 << 22, "rank": 1 << 14}
_GUESSES = 2
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
    recipe: Recipe, variable: str, device: Device | None, *, max_positions: int | None, on_cpu: bool,
    parallel: Parallel | None = None,
) -> Solution:  # fmt: skip
    """Find the largest `batch`, `seq` or `rank` whose estimate is within the device's usable memory."""
    if device is None:
        raise UserError(
            "nothing to solve against", where="--solve", found="no device",
            expected="a GPU in this machine, --gpu NAME or --vram SIZE", next_command=again("--vram", "10GiB"),
        )  # fmt: skip
    if variable == "rank" and recipe.lora is None:
        raise UserError("no adapter to solve for", where="--solve rank", found=f"method {recipe.method}",
                        expected="method lora or qlora", next_command=again("method=lora"))  # fmt: skip

    plan = Plan.of(recipe, on_cpu=on_cpu, gpu=device.name, parallel=parallel)

    @cache
    def sized(value: int) -> Plan:
        return replace(plan, recipe=with_size(recipe, **{KEYS[variable].rpartition(".")[2]: value}))

    @cache
    def replayed(value: int) -> Replayed | None:
        return None if on_cpu else replay(sized(value))

    def need(value: int, by: Replayed | None = None) -> int:
        return _device_bytes(sized(value), by or replayed(value))

    low, most = _LEAST[variable], _most(recipe, variable, max_positions)
    near = low
    for _ in range(_GUESSES):
        near = _last_that(lambda value, by=replayed(near): need(value, by) <= device.usable_bytes, low, most)
    value = _border(lambda value: need(value) <= device.usable_bytes, near, low, most)
    if value is None:
        return Solution(variable, None, None, f"{low} does not fit")
    limit = f"{device.name}: {value + 1} does not fit"
    if value == most:
        limit = "the model's positions" if most == max_positions else "the search"
        limit = limit if variable != "rank" else "the width of the model"
    return Solution(variable, value, need(value), limit)


def _most(recipe: Recipe, variable: str, max_positions: int | None) -> int:
    if variable == "seq" and max_positions:
        return max_positions
    if variable == "rank":
        return min(_MOST["rank"], Plan.of(recipe).shape.hidden_size)
    return _MOST[variable]


def _device_bytes(plan: Plan, replayed: Replayed | None) -> int:
    """What an estimate comes to by a replay, its own or a neighbour's; a CPU has none."""
    allocated = max(instant.num_bytes for instant in instants(plan, replayed))
    ratio = runtime.reserved_ratio(plan, allocated, replayed)
    return allocated + sum(term.num_bytes for term in runtime.overhead(plan, allocated, ratio))


def _last_that(fits: Callable[[int], bool], low: int, high: int) -> int:
    """The last value that fits between one that does and one that may; the larger ones do not."""
    if fits(high):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _border(fits: Callable[[int], bool], near: int, least: int, most: int) -> int | None:
    """A value that fits and whose successor does not, beginning at `near`; None where not even `least` fits."""
    step, low, high = max(1, near >> 10), near, near
    if fits(near):
        while fits(high):
            if high == most:
                return most
            low, high, step = high, min(most, high + step), 2 * step
        return _last_that(fits, low, high)
    while not fits(low):
        if low == least:
            return None
        low, high, step = max(least, low - step), low, 2 * step
    return _last_that(fits, low, high)
