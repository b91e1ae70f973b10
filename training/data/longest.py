"""The longest record of the data that a recipe names: by its tokens where they were counted, else by its bytes.

Counted once is counted for every `data.seq_len`: tokens of another length tell too, unless records were left out of
them, or shortened, that the recipe's own length would keep.

Rows that are packed have no use for it and are told so at no cost, so the data's readers are imported behind that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from training.calculator import lengths
from training.calculator.lengths import Longest
from training.core import files, store
from training.core.errors import TrainyardError
from training.core.log import say
from training.recipe import bases
from training.recipe.model import Recipe

if TYPE_CHECKING:
    from training.data.dataset import Dataset

_OF_ONE_RECORD = ("loss_on", "template_date", "template")


def of_recipe(recipe: Recipe) -> Longest | None:
    """Find it in the train split; None where rows are packed, or nothing is prepared or bounded yet."""
    if recipe.data.packing or recipe.data.dataset is None:
        return None
    from training.data import dataset

    try:
        found = dataset.load(dataset.resolve(recipe.data.dataset))
        counted = _counted(found, recipe)
        return (lengths.of_tokens(counted) if counted else None) or lengths.of_stats(found.stats)
    except TrainyardError as error:
        say(f"data.seq_len counts as the length, since the data is not there: {error.what}")
        return None


def _counted(found: Dataset, recipe: Recipe) -> dict | None:
    """The manifest of tokens that tell the longest record of the recipe's; None where nobody has counted them."""
    from training.data import tokens
    from training.data.supervision import Settings
    from training.tokenizer import artifact

    if recipe.tokenizer.path is None and (recipe.model.base is None or not bases.find(recipe.model.base).is_fetched):
        return None
    tokenizer, settings = artifact.of_recipe(recipe), Settings.of(recipe.data)
    own = tokens.folder_of(found, tokenizer, settings)
    if (own / files.MANIFEST).is_file():
        return files.read_manifest(own, tokens.KIND)
    wanted = settings.key(tokenizer.chat_template)
    manifests = (files.read_manifest(folder, tokens.KIND) for folder in store.complete_folders(own.parent))
    of_tokenizer = (one for one in manifests if one["tokenizer"]["hash"] == tokenizer.hash)
    return next((one for one in of_tokenizer if _tells(one, wanted)), None)


def _tells(manifest: dict, wanted: dict) -> bool:
    """Whether tokens of other settings have the records that those of the wanted ones would have, up to their length.

    What decides the length of one record must be the same. Records that were over the limit are missing, or shortened:
    they would be over a lower one too, and matter where they would then be shortened to it.
    """
    from training.data.supervision import SHORTENED, TOO_LONG

    labels, figures = manifest.get("labels"), manifest["splits"].get("train")
    if labels is None or figures is None or any(labels[name] != wanted[name] for name in _OF_ONE_RECORD):
        return False
    is_whole = not (figures["left_out"][TOO_LONG] or figures["noted"][SHORTENED])
    return is_whole or (labels["seq_len"] >= wanted["seq_len"] and wanted["overlong"] != "left")
