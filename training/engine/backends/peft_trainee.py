"""What TRL trains, as a trainee: a whole model, or PEFT's adapters beside a frozen one, in our own methods' files.

Owns that PEFT's factors begin as the native method draws them, and stand in a checkpoint under the same names: a run of
one backend is evaluated, exported and gone on from (`lora.from`) like one of another.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from training.calculator.probe import dtype_of
from training.core.errors import UserError
from training.objectives import adapter, targets
from training.objectives.loss import WHOLE_LOGITS
from training.objectives.trainee import Trainee
from training.recipe.model import Recipe

_ADAPTER = "default"

Adapt = Callable[[torch.nn.Module, dict], torch.nn.Module]


class WholeTrainee(Trainee):
    """A model all of whose weights are trained; its settings are those it was opened with, which a trainer changes."""

    def __init__(self, model: torch.nn.Module, base: dict | None):
        super().__init__(model, base)
        self.wrapped, self._settings = model, super().settings()

    def settings(self) -> dict:
        return self._settings


class PeftTrainee(adapter.AdapterTrainee):
    """A frozen model with PEFT's adapters inside.

    Args:
        wrapped: PEFT's model around it, which trainers of other libraries take.
    """

    def __init__(self, wrapped, base: dict | None, recipe: Recipe, names: list[str]):
        quantization = "nf4" if recipe.memory.weights == "nf4" else None
        super().__init__(wrapped.get_base_model(), base, recipe.lora, names, None, quantization)
        self.wrapped = wrapped

    def factors(self, name):
        layer = self.model.get_submodule(name)
        return layer.lora_A[_ADAPTER].weight, layer.lora_B[_ADAPTER].weight


def of(model: torch.nn.Module, base: dict | None, recipe: Recipe, adapt: Adapt | None = None) -> Trainee:
    """The trainee that a recipe makes of an opened model.

    Args:
        adapt: what makes PEFT's model of a model and the settings; by default PEFT's own function.
    """
    _require_head(model)
    if recipe.lora is None:
        return WholeTrainee(model, base)
    torch.manual_seed(recipe.seeds.train)
    return _adapted(model, base, recipe, adapt or _adapt)


def _adapted(model: torch.nn.Module, base: dict | None, recipe: Recipe, adapt: Adapt) -> PeftTrainee:
    """Put PEFT's adapters into a model, drawn as the native ones are from the generator as it stands."""
    lora, names = recipe.lora, targets.find(model, recipe.lora.targets)
    _require_not_head(model, names)
    drawn = torch.get_rng_state()
    settings = {
        "r": lora.rank, "lora_alpha": lora.alpha, "lora_dropout": lora.dropout,
        "target_modules": targets.suffixes(model, names),
    }  # fmt: skip
    trainee = PeftTrainee(adapt(model, settings), base, recipe, names)
    torch.set_rng_state(drawn)
    dtype = dtype_of(recipe.memory.adapter_dtype)
    for name in names:
        for factor in trainee.factors(name):
            factor.data = factor.data.to(dtype)
        adapter.draw(trainee.factors(name)[0])
    return trainee


def _adapt(model: torch.nn.Module, settings: dict):
    import peft

    return peft.get_peft_model(model, peft.LoraConfig(**settings, task_type="CAUSAL_LM"))


def _require_head(model: torch.nn.Module) -> None:
    """Raise UserError for a model whose logits are not its head's: SFTTrainer applies the head alone."""
    if getattr(model, WHOLE_LOGITS, False):
        raise UserError(
            "this model's logits are more than its head gives, which SFTTrainer would pass over", where="backend",
            found=type(model).__name__, expected="backend: native",
        )  # fmt: skip


def _require_not_head(model: torch.nn.Module, names: list[str]) -> None:
    head = model.get_output_embeddings()
    if on_head := [name for name in names if model.get_submodule(name) is head]:
        raise UserError(
            "SFTTrainer trains no adapter on the head", where="lora.targets", found=", ".join(on_head),
            expected="other layers, or backend: native",
        )  # fmt: skip
