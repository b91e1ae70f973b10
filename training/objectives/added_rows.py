"""Tokens that a tokenizer has beyond its base's: embedding and head grow by their rows, old rows bit for bit.

A new row starts as the mean of the old ones, so that a new token is at first an average one (Hewitt 2021).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from training.core import files
from training.core.errors import UserError
from training.recipe import bases
from training.recipe.model import Recipe
from training.tokenizer import artifact
from training.tokenizer.artifact import Tokenizer

if TYPE_CHECKING:
    import torch


def require_extension(recipe: Recipe, tokenizer: Tokenizer) -> None:
    """Raise UserError where a tokenizer gives an entry of the base's own another id, or lacks one."""
    folder = bases.find(recipe.model.base).folder
    if tokenizer.folder == folder:
        return
    theirs, own = entries_of(folder), entries_of(tokenizer.folder)
    wrong = [entry for entry, index in theirs.items() if own.get(entry) != index]
    if wrong:
        raise UserError(
            "the tokenizer is not the base's, nor the base's with more tokens", where="tokenizer.path",
            found=f"{len(wrong)} entries with another id, such as {wrong[0]!r}",
            expected=f"the ids of {recipe.model.base}; null takes the base's own",
        )  # fmt: skip


def num_added(recipe: Recipe, tokenizer: Tokenizer) -> int:
    """How many tokens a tokenizer has beyond its base's."""
    return tokenizer.vocab_size - artifact.load(bases.find(recipe.model.base).folder).vocab_size


def entries_of(folder: Path) -> dict[str, int]:
    """Every entry of a tokenizer's folder, text to id."""
    content = files.read_json(folder / artifact.TOKENIZER)
    return content["model"]["vocab"] | {token["content"]: token["id"] for token in content.get("added_tokens", [])}


def grow(model: torch.nn.Module, tokenizer: Tokenizer) -> None:
    """Give the model a row for each entry of the tokenizer."""
    import torch  # here alone: what a launcher asks of this module needs none

    embedding = model.get_input_embeddings()
    old = embedding.num_embeddings
    if tokenizer.vocab_size <= old:
        return
    model.resize_token_embeddings(tokenizer.vocab_size, mean_resizing=False)
    matrices = [model.get_input_embeddings().weight]
    if not model.config.get_text_config().tie_word_embeddings:
        matrices.append(model.get_output_embeddings().weight)
    with torch.no_grad():
        for weight_VD in matrices:
            weight_VD[old:] = weight_VD[:old].float().mean(0).to(weight_VD.dtype)
