"""Models made of a configuration: with random weights drawn from the run's seed on the CPU, or blank ones."""

import contextlib
from collections.abc import Iterator

import torch

from training.calculator.shapes import config_of
from training.core.errors import MachineError, UserError
from training.core.report import again
from training.recipe.model import Recipe
from training.tokenizer.artifact import Tokenizer

FAMILIES = ("llama",)


def random(recipe: Recipe, tokenizer: Tokenizer) -> torch.nn.Module:
    """Build `model.arch` in float32; the same seed gives the same weights on every machine's CPU.

    The tokenizer gives its special ids.
    """
    family = recipe.model.arch["family"]
    if family not in FAMILIES:
        raise UserError(
            "no such architecture to train from scratch", where="model.arch.family", found=family,
            expected=", ".join(FAMILIES),
        )  # fmt: skip
    specials = {f"{role}_token_id": getattr(tokenizer, f"{role}_id") for role in ("bos", "eos", "pad")}
    torch.manual_seed(recipe.seeds.train)
    return _of_config(recipe, specials | {"attention_dropout": 0.0}, torch.float32)


def blank(recipe: Recipe, device: torch.device, dtype: torch.dtype) -> torch.nn.Module:
    """Build the model that a recipe names, by its configuration alone, with weights of no meaning."""
    model = _of_config(recipe, {}, dtype)
    return model if device.type == "cpu" else model.to(device)  # fake tensors on the CPU cannot be moved


def _of_config(recipe: Recipe, extra: dict, dtype: torch.dtype) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    values = config_of(recipe.model) | extra
    theta = values.pop("rope_theta", None)
    if theta is not None:
        values["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
    config = AutoConfig.for_model(values.pop("model_type"), **values | {"use_cache": False})
    with attention_errors(recipe):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=recipe.memory.attention)
    return checkpointed(model, recipe)


@contextlib.contextmanager
def attention_errors(recipe: Recipe) -> Iterator[None]:
    """Tell an attention that is not to be had here as what it is."""
    try:
        yield
    except ImportError as error:
        raise MachineError(
            "this attention is not to be had here", where="memory.attention", found=recipe.memory.attention,
            expected="sdpa or eager", next_command=again("memory.attention=sdpa"),
        ) from error  # fmt: skip


def checkpointed(model: torch.nn.Module, recipe: Recipe) -> torch.nn.Module:
    """The model, its layers computed again in the backward pass where the recipe says so."""
    if recipe.memory.gradient_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    return model
