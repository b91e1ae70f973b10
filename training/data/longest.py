"""The longest record of the data that a recipe names: by its tokens where they were counted, else by its bytes.

Rows that are packed have no use for it and are told so at no cost, so the data's readers are imported behind that.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from training.calculator import lengths
from training.calculator.lengths import Longest
from training.core import files
from training.core.errors import TrainyardError
from training.core.log import say
from training.recipe import bases
from training.recipe.model import Recipe

if TYPE_CHECKING:
    from training.data.dataset import Dataset


def of_recipe(recipe: Recipe) -> Longest | None:
    """Find it in the train split; None where rows are packed, or nothing is prepared or bounded yet."""
    if recipe.data.packing or recipe.data.dataset is None:
        return None
    from training.data import dataset, tokens

    try:
        found = dataset.load(dataset.resolve(recipe.data.dataset))
        counted = _tokens_folder(found, recipe)
        by_tokens = lengths.of_tokens(files.read_manifest(counted, tokens.KIND)) if counted else None
        return by_tokens or lengths.of_stats(found.stats)
    except TrainyardError as error:
        say(f"data.seq_len counts as the length, since the data is not there: {error.what}")
        return None


def _tokens_folder(found: Dataset, recipe: Recipe) -> Path | None:
    """Where the data set lies in tokens of the recipe's tokenizer; None where it, or a base with it, is not there."""
    from training.data import tokens
    from training.data.supervision import Settings
    from training.tokenizer import artifact

    if recipe.tokenizer.path is None and (recipe.model.base is None or not bases.find(recipe.model.base).is_fetched):
        return None
    tokenizer = artifact.of_recipe(recipe)
    folder = tokens.folder_of(found, tokenizer, Settings.of(recipe.data))
    return folder if (folder / files.MANIFEST).is_file() else None
