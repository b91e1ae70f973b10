"""The contract between the trainer and a backend, and what a recipe may ask of one that is not ours.

A backend builds the model and runs the steps. Rows, their order, the plan of rates, validation, checkpoints, events and
the summary are the trainer's own, whichever it is. Importing one costs nothing: torch is imported inside `build` and
`loop`.
"""

from __future__ import annotations

import abc
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Iterator
from typing import TYPE_CHECKING

from training.core.errors import MachineError, TrainyardError, UserError
from training.recipe.load import Resolved
from training.recipe.model import Recipe
from training.tokenizer.artifact import Tokenizer

if TYPE_CHECKING:
    import torch

    from training.engine.loop import Loop
    from training.objectives.trainee import Trainee


class Backend(abc.ABC):
    """One backend.

    Args:
        packages: what it needs that the lock files of `.venv` do not hold.
    """

    packages: tuple[str, ...] = ()

    def problems(self, resolved: Resolved) -> list[TrainyardError]:
        """Everything of the recipe that this backend cannot do here."""
        return []

    def versions(self) -> dict[str, str]:
        """The versions of its packages, for the run's first event."""
        return {name: importlib.metadata.version(name) for name in self.packages}

    def prepare(self) -> None:  # noqa: B027  (most have nothing to do)
        """Import what has to come before torch's and transformers' models."""

    @abc.abstractmethod
    def build(self, recipe: Recipe, tokenizer: Tokenizer, device: torch.device, dtype: torch.dtype) -> Trainee:
        """The model to train, on its device."""

    @abc.abstractmethod
    def loop(self, recipe: Recipe, trainee: Trainee, *parts: object) -> Loop:
        """What runs the steps. `parts` are the loop's own: optimizer, objective, validation, hooks, processes."""


def of(name: str) -> Backend:
    """The backend of a name that the schema knows."""
    return importlib.import_module(f"training.engine.backends.{name}").BACKEND


def foreign_problems(resolved: Resolved) -> list[TrainyardError]:
    """What SFTTrainer, which two backends share, does not do with our rows: refused, and never passed over."""
    recipe, name = resolved.recipe, resolved.recipe.backend
    return [
        UserError(
            f"backend {name} {why}", where=resolved.origins.get(key), found=f"{key}: {found}",
            expected=f"{expected}, or backend: native",
        )
        for key, found, expected, why in _limits(recipe)
    ]  # fmt: skip


def _limits(recipe: Recipe) -> Iterator[tuple[str, object, str, str]]:
    """Each thing that is out of reach: its key, what stands there, what may stand there, and why."""
    if recipe.method not in ("full", "lora", "qlora"):
        yield "method", recipe.method, "full, lora or qlora", "tunes a base on records with answers alone"
    elif recipe.data.packing:
        why = "packs otherwise, and streams of texts not at all"
        yield "data.packing", "true", "data.packing: false", why
    if recipe.lora is not None and recipe.tokenizer.path is not None:
        why = "trains no rows of added tokens beside an adapter"
        yield "tokenizer.path", recipe.tokenizer.path, "the base's own tokenizer", why
    memory = recipe.memory
    for key, value, may in (("loss_chunk", memory.loss_chunk, "auto"), ("loss_kernel", memory.loss_kernel, "torch")):
        if value != may:
            yield f"memory.{key}", value, may, "has a loss of its own, in chunks of its own"
    if memory.compile is not False:
        yield "memory.compile", str(memory.compile).lower(), "false", "is not compiled here"
    if memory.weights == "fp16":
        yield "memory.weights", "fp16", "bf16, fp32 or nf4", "scales no loss here, as float16's gradients need it"


def missing(backend: str, packages: tuple[str, ...], next_command: str) -> list[TrainyardError]:
    """An error for packages that are not there."""
    if not (absent := [name for name in packages if importlib.util.find_spec(name) is None]):
        return []
    return [
        MachineError(
            f"backend {backend} needs packages of its own", where="backend", found=f"no {', '.join(absent)}",
            expected=", ".join(packages), next_command=next_command,
        )
    ]  # fmt: skip
