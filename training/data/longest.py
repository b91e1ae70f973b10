"""The longest record of the data that a recipe names: by its tokens where they were counted, else by its bytes."""

from pathlib import Path

from training.calculator import lengths
from training.calculator.lengths import Longest
from training.core import files
from training.core.errors import TrainyardError
from training.core.log import say
from training.data import dataset, tokens
from training.recipe.model import Recipe
from training.tokenizer import artifact


def of_recipe(recipe: Recipe) -> Longest | None:
    """Find it in the train split; None where rows are packed, or nothing is prepared or bounded yet."""
    if recipe.data.packing or recipe.data.dataset is None:
        return None
    try:
        found = dataset.load(dataset.resolve(recipe.data.dataset))
        counted = _tokens_folder(found, recipe)
        by_tokens = lengths.of_tokens(files.read_manifest(counted, tokens.KIND)) if counted else None
        return by_tokens or lengths.of_stats(found.stats)
    except TrainyardError as error:
        say(f"data.seq_len counts as the length, since the data is not there: {error.what}")
        return None


def _tokens_folder(found: dataset.Dataset, recipe: Recipe) -> Path | None:
    """Where the data set lies in tokens of the recipe's tokenizer; None where it does not."""
    if recipe.tokenizer.path is None:
        return None
    folder = tokens.folder_of(found, artifact.load(artifact.resolve(recipe.tokenizer.path)))
    return folder if (folder / files.MANIFEST).is_file() else None
