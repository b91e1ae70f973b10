"""A subject as a model in PyTorch: a checkpoint through its method, so that every way of training is measured as such.

The precision and the attention are the measurement's, the same for a checkpoint and what it is compared with; a
checkpoint's own recipe says how its model is built.
"""

from dataclasses import dataclass, replace

import torch

from training.engine import device
from training.evaluation.subject import CHECKPOINT, Subject
from training.objectives import registry
from training.objectives.trainee import Trainee
from training.recipe.model import Recipe


@dataclass(frozen=True)
class Loaded:
    """A model that is ready to be asked, on its device."""

    model: torch.nn.Module
    device: torch.device


def default_precision(recipe: Recipe | None) -> str:
    """The recipe's type of weights where there is one, else bf16 on a GPU and fp32 on a CPU."""
    if recipe is not None:
        return recipe.memory.weights
    return "bf16" if torch.cuda.is_available() else "fp32"


def default_attention(recipe: Recipe | None) -> str:
    """The recipe's where there is one, else sdpa."""
    return recipe.memory.attention if recipe is not None else "sdpa"


def load(subject: Subject, precision: str, attention: str) -> Loaded:
    """Load a checkpoint's or a folder's weights so. Raises MachineError where this machine cannot."""
    where = device.resolve(precision)
    device.use_cores()
    build = _checkpoint if subject.form == CHECKPOINT else _folder
    model = build(subject, precision, attention, where)
    model.requires_grad_(False).eval()
    return Loaded(model, where.torch_device)


def _checkpoint(subject: Subject, precision: str, attention: str, where: device.Device) -> torch.nn.Module:
    recipe = subject.resolved.recipe
    is_packed_after = (
        precision == "nf4" and (subject.path / Trainee.weights_file).is_file()
    )  # whole weights, no adapter on a base
    weights = recipe.memory.weights if is_packed_after else precision
    memory = replace(recipe.memory, weights=weights, attention=attention, gradient_checkpointing=False)
    recipe = replace(recipe, memory=memory)
    trainee = registry.of(recipe.method).build(recipe, subject.tokenizer, where.torch_device, where.dtype)
    trainee.load(subject.path)
    if is_packed_after:
        _pack(trainee.model, where)
    return trainee.model


def _pack(model: torch.nn.Module, where: device.Device) -> None:
    from training.objectives import nf4

    nf4.pack(model, where.torch_device, where.dtype)


def _folder(subject: Subject, precision: str, attention: str, where: device.Device) -> torch.nn.Module:
    import transformers

    from training.objectives import base

    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        subject.path, dtype=where.dtype, attn_implementation=attention, local_files_only=True, use_safetensors=True
    )
    if precision == "nf4":
        _pack(model, where)
    model.to(where.torch_device)
    base.look(model, packs=False)
    return model
