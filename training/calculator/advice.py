"""The levers of a recipe that does not fit, each priced by estimating again with it pulled.

A lever's cost is a grade and words: what it takes away, cheapest first. `override` can be pasted behind the command.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from training.calculator.devices import Device
from training.calculator.estimate import Estimate
from training.calculator.formula import estimate
from training.calculator.parallel import Parallel
from training.core.errors import UserError
from training.recipe import schema
from training.recipe.model import Lora, Recipe, section

_COSTS = ("nothing", "some speed", "about a third more time", "states in 8 bits", "speed, where states are paged in",
          "shorter context", "adapters instead of all weights", "adapters on a 4-bit base")  # fmt: skip
_CHUNK_TOKENS = 128


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


def levers(
    recipe: Recipe, now: Estimate, device: Device | None, *, on_cpu: bool, parallel: Parallel | None = None
) -> list[Lever]:
    """Every lever that saves memory, the cheapest first, and among equals the largest saving."""
    found, gpu = [], device.name if device else None
    for override, changed, cost in _changes(recipe, on_cpu):
        try:
            then = estimate(changed, on_cpu=on_cpu, gpu=gpu, parallel=parallel).peak.device_bytes
        except UserError:  # what the model or the ranks do not allow is no lever
            continue
        saved = now.peak.device_bytes - then
        if saved > 0:
            fits = None if device is None else then <= device.available_bytes
            found.append(Lever(override, then, saved, fits, _COSTS[cost]))
    return sorted(found, key=lambda lever: (_COSTS.index(lever.cost), -lever.saved_bytes))


def best(found: list[Lever] | tuple[Lever, ...]) -> Lever | None:
    """The cheapest lever that is enough by itself, else the one that saves most."""
    return next((lever for lever in found if lever.fits), max(found, key=lambda lever: lever.saved_bytes, default=None))


def with_size(
    recipe: Recipe, *, micro_batch: int | None = None, seq_len: int | None = None, rank: int | None = None
) -> Recipe:
    """The recipe with another micro-batch, sequence length or rank of its adapters."""
    data = replace(
        recipe.data, micro_batch=micro_batch or recipe.data.micro_batch, seq_len=seq_len or recipe.data.seq_len
    )
    lora = replace(recipe.lora, rank=rank) if rank and recipe.lora else recipe.lora
    return replace(recipe, data=data, lora=lora)


def _changes(recipe: Recipe, on_cpu: bool) -> Iterator[tuple[str, Recipe, int]]:
    yield from _sizes(recipe)
    yield from _memory(recipe)
    yield from _optimizer(recipe, on_cpu)
    if recipe.method == "full" and not on_cpu:
        yield "method=lora", replace(recipe, method="lora", lora=_default_lora()), 6
    if recipe.method in ("full", "lora") and not on_cpu:
        memory = replace(recipe.memory, weights="nf4")
        changed = replace(recipe, method="qlora", memory=memory, lora=recipe.lora or _default_lora())
        yield "method=qlora memory.weights=nf4", changed, 7


def _sizes(recipe: Recipe) -> Iterator[tuple[str, Recipe, int]]:
    data = recipe.data
    if data.micro_batch > 1:
        half, steps = data.micro_batch // 2, recipe.batch.accumulate
        twice = -(-data.micro_batch * steps // half)
        changed = replace(with_size(recipe, micro_batch=half), batch=replace(recipe.batch, accumulate=twice))
        yield f"data.micro_batch={half} batch.accumulate={twice}", changed, 1
    if data.seq_len > 256:
        half = data.seq_len // 2
        yield f"data.seq_len={half}", with_size(recipe, seq_len=half), 5


def _memory(recipe: Recipe) -> Iterator[tuple[str, Recipe, int]]:
    memory = recipe.memory

    def changed(**values: object) -> Recipe:
        return replace(recipe, memory=replace(memory, **values))

    if not memory.gradient_checkpointing:
        yield "memory.gradient_checkpointing=true", changed(gradient_checkpointing=True), 2
    if memory.attention == "eager":
        yield "memory.attention=sdpa", changed(attention="sdpa"), 0
    tokens = recipe.data.micro_batch * recipe.data.seq_len
    if memory.profile == "trainyard" and memory.loss_chunk in ("auto", 0) and tokens > _CHUNK_TOKENS:
        yield f"memory.loss_chunk={_CHUNK_TOKENS}", changed(loss_chunk=_CHUNK_TOKENS), 1


def _optimizer(recipe: Recipe, on_cpu: bool) -> Iterator[tuple[str, Recipe, int]]:
    optimizer = recipe.optimizer

    def changed(**values: object) -> Recipe:
        return replace(recipe, optimizer=replace(optimizer, **values))

    if optimizer.name == "adamw" and not on_cpu:
        yield "optimizer.name=adamw8bit", changed(name="adamw8bit"), 3
    if optimizer.name == "adamw" and optimizer.impl != "fused":
        yield "optimizer.impl=fused", changed(impl="fused"), 0


def _default_lora() -> Lora:
    """The adapter that a recipe gets which names none."""
    parts = schema.part_of(schema.recipe_schema(), "lora")["properties"]
    return section("lora", {name: part["default"] for name, part in parts.items()})
