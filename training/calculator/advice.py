"""The simple levers of a recipe that does not fit, each priced by estimating again with it pulled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from training.calculator.devices import Device
from training.calculator.estimate import Estimate
from training.calculator.formula import estimate
from training.recipe.model import Recipe


@dataclass(frozen=True)
class Lever:
    """One change of a recipe: the override that makes it, what it saves, and what it costs."""

    override: str
    device_bytes: int
    saved_bytes: int
    fits: bool | None
    cost: str

    def to_json(self) -> dict:
        return {
            "override": self.override, "device_bytes": self.device_bytes, "saved_bytes": self.saved_bytes,
            "fits": self.fits, "cost": self.cost,
        }  # fmt: skip


def levers(recipe: Recipe, now: Estimate, device: Device | None, *, on_cpu: bool) -> list[Lever]:
    """Every lever that saves memory, the largest saving first."""
    found = []
    for override, changed, cost in _changes(recipe, on_cpu):
        then = estimate(changed, on_cpu=on_cpu).peak.device_bytes
        saved = now.peak.device_bytes - then
        if saved > 0:
            fits = None if device is None else then <= device.available_bytes
            found.append(Lever(override, then, saved, fits, cost))
    return sorted(found, key=lambda lever: -lever.saved_bytes)


def with_size(recipe: Recipe, *, micro_batch: int | None = None, seq_len: int | None = None) -> Recipe:
    """The recipe with another micro-batch or sequence length."""
    data = replace(
        recipe.data, micro_batch=micro_batch or recipe.data.micro_batch, seq_len=seq_len or recipe.data.seq_len
    )
    return replace(recipe, data=data)


def _changes(recipe: Recipe, on_cpu: bool) -> Iterator[tuple[str, Recipe, str]]:
    data, memory, optimizer = recipe.data, recipe.memory, recipe.optimizer
    if data.micro_batch > 1:
        half, steps = data.micro_batch // 2, recipe.batch.accumulate
        twice = -(-data.micro_batch * steps // half)
        changed = replace(with_size(recipe, micro_batch=half), batch=replace(recipe.batch, accumulate=twice))
        yield f"data.micro_batch={half} batch.accumulate={twice}", changed, "some speed"
    if data.seq_len > 256:
        half = data.seq_len // 2
        yield f"data.seq_len={half}", with_size(recipe, seq_len=half), "shorter context"
    if not memory.gradient_checkpointing:
        changed = replace(recipe, memory=replace(memory, gradient_checkpointing=True))
        yield "memory.gradient_checkpointing=true", changed, "about a third more time"
    if memory.attention == "eager":
        yield "memory.attention=sdpa", replace(recipe, memory=replace(memory, attention="sdpa")), "nothing"
    if optimizer.name == "adamw" and not on_cpu:
        changed = replace(recipe, optimizer=replace(optimizer, name="adamw8bit"))
        yield "optimizer.name=adamw8bit", changed, "states in 8 bits"
    if optimizer.name == "adamw" and optimizer.impl != "fused":
        yield "optimizer.impl=fused", replace(recipe, optimizer=replace(optimizer, impl="fused")), "nothing"
