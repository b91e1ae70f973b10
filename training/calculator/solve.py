"""The largest micro-batch or sequence length that still fits, by bisection.

Device bytes never fall when either grows, so bisection finds the one border; a test checks that along the way.
"""

from __future__ import annotations

from dataclasses import dataclass

from training.calculator.advice import with_size
from training.calculator.devices import Device
from training.calculator.formula import estimate
from training.core.errors import UserError
from training.recipe.model import Recipe

KEYS = {"batch": "data.micro_batch", "seq": "data.seq_len"}
_MOST = {"batch": 1 << 16, "seq": 1 << 22}
_LEAST = {"batch": 1, "seq": 2}


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
    """Find the largest `batch` or `seq` whose estimate is within the device's usable memory."""
    if device is None:
        raise UserError(
            "nothing to solve against", where="--solve", found="no device",
            expected="a GPU in this machine, --gpu NAME or --vram SIZE", next_command="add --vram 10GiB",
        )  # fmt: skip

    def need(value: int) -> int:
        sized = with_size(recipe, **{KEYS[variable].rpartition(".")[2]: value})
        return estimate(sized, on_cpu=on_cpu).peak.device_bytes

    most = max_positions if variable == "seq" and max_positions else _MOST[variable]
    low, high = _LEAST[variable], most
    if need(low) > device.usable_bytes:
        return Solution(variable, None, None, f"{low} does not fit")
    if need(high) <= device.usable_bytes:
        return Solution(variable, high, need(high), "the model's positions" if high == max_positions else "the search")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if need(middle) <= device.usable_bytes else (low, middle)
    return Solution(variable, low, need(low), f"{device.name}: {high} does not fit")
