"""Pretraining: an architecture of the recipe, random weights, every token of every text."""

from __future__ import annotations

from training.core.errors import UserError
from training.core.report import again
from training.data import tokens
from training.data.dataset import Dataset
from training.objectives.method import Method
from training.recipe.model import Recipe
from training.tokenizer.artifact import Tokenizer


class Pretrain(Method):
    """Trains `model.arch` from random weights on a stream of texts."""

    def require_dataset(self, recipe: Recipe, dataset: Dataset) -> None:
        if dataset.form != tokens.TEXT_FORM:
            raise UserError(
                "pretraining reads texts", where=dataset.reference, found=f"records of the form {dataset.form}",
                expected='records of the form {"text": ...}',
            )  # fmt: skip

    def require_tokenizer(self, recipe: Recipe, tokenizer: Tokenizer) -> None:
        num_rows = recipe.model.arch["vocab_size"]
        if tokenizer.vocab_size > num_rows:
            raise UserError(
                "the tokenizer has more entries than the model has rows", where="model.arch.vocab_size", found=num_rows,
                expected=f"at least {tokenizer.vocab_size}, the entries of {tokenizer.name}",
                next_command=again(f"model.arch.vocab_size={tokenizer.vocab_size}"),
            )  # fmt: skip

    def build(self, recipe, tokenizer, device, dtype):
        from training.objectives import architecture
        from training.objectives.trainee import Trainee

        return Trainee(architecture.random(recipe, tokenizer).to(device, dtype))


METHODS = {"pretrain": Pretrain("pretrain")}
