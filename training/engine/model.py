"""The model of a recipe: an architecture with random weights, drawn from the run's seed on the CPU."""

import torch

from training.core.errors import MachineError, UserError
from training.recipe.model import Recipe
from training.tokenizer.artifact import Tokenizer

FAMILIES = ("llama",)


def build(
    recipe: Recipe, tokenizer: Tokenizer | None = None, dtype: torch.dtype = torch.float32
) -> torch.nn.Module:  # fmt: skip
    """Build the model of `model.arch` in float32; the same seed gives the same weights on every machine's CPU.

    The tokenizer gives its special ids and must fit; without one, and in another type, the model is for a look at its
    memory alone.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    arch = dict(recipe.model.arch or {})
    family = arch.pop("family", None)
    if family not in FAMILIES:
        raise UserError(
            "no such architecture to train from scratch", where="model.arch.family", found=family,
            expected=", ".join(FAMILIES),
        )  # fmt: skip
    specials = {}
    if tokenizer is not None:
        check_vocabulary(arch["vocab_size"], tokenizer)
        names = ("bos_id", "eos_id", "pad_id")
        specials = {name.replace("_id", "_token_id"): getattr(tokenizer, name) for name in names}
    theta = arch.pop("rope_theta", None)
    if theta is not None:
        arch["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
    config = AutoConfig.for_model(family, **arch, **specials, attention_dropout=0.0, use_cache=False)
    torch.manual_seed(recipe.seeds.train)
    try:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=recipe.memory.attention)
    except ImportError as error:
        raise MachineError(
            "this attention is not to be had here",
            where="memory.attention",
            found=recipe.memory.attention,
            expected="sdpa or eager",
            next_command="the same command with memory.attention=sdpa in ARGS",
        ) from error
    if recipe.memory.gradient_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    return model


def check_vocabulary(num_rows: int, tokenizer: Tokenizer) -> None:
    """Raise UserError where the tokenizer has more entries than the model has embedding rows."""
    if tokenizer.vocab_size > num_rows:
        raise UserError(
            "the tokenizer has more entries than the model has rows",
            where="model.arch.vocab_size",
            found=num_rows,
            expected=f"at least {tokenizer.vocab_size}, the entries of {tokenizer.name}",
            next_command=f"the same command with model.arch.vocab_size={tokenizer.vocab_size} in ARGS",
        )
