"""What the methods that start from a base have in common: which data, which tokenizer, which recipe."""

from __future__ import annotations

from training.core.errors import TrainyardError, UserError
from training.core.report import again
from training.data import tokens
from training.data.dataset import Dataset
from training.objectives.method import Method
from training.recipe import bases
from training.recipe.load import Resolved
from training.recipe.model import Recipe
from training.tokenizer.artifact import Tokenizer


class Tuning(Method):
    """Trains a base on records with answers, or on texts."""

    def problems(self, resolved: Resolved) -> list[TrainyardError]:
        found = super().problems(resolved)
        name = resolved.recipe.model.base
        if name is not None and (base := bases.find(name)).pinned:
            try:
                base.require_folder()
            except UserError as error:
                found.append(error)
        return found

    def require_dataset(self, recipe: Recipe, dataset: Dataset) -> None:
        if dataset.form == tokens.TEXT_FORM and not recipe.data.packing:
            raise UserError(
                "texts are trained as a stream, which packs", where=dataset.reference, found="data.packing: false",
                expected="data.packing: true", next_command=again("data.packing=true"),
            )  # fmt: skip
        if dataset.form == tokens.TEXT_FORM and recipe.data.loss_on != "all":
            raise UserError(
                "texts have no answers", where=dataset.reference, found=f"data.loss_on: {recipe.data.loss_on}",
                expected="data.loss_on: all", next_command=again("data.loss_on=all"),
            )  # fmt: skip

    def require_tokenizer(self, recipe: Recipe, tokenizer: Tokenizer) -> None:
        from training.objectives import added_rows

        added_rows.require_extension(recipe, tokenizer)
