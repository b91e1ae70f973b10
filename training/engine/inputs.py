"""What a recipe's names stand for on this machine: the data set, the tokenizer, and the shards that the two make."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from training.core import files, store
from training.core.errors import IntegrityError
from training.data import dataset as datasets
from training.data import tokens
from training.engine import trainable
from training.objectives import registry
from training.recipe.model import Recipe
from training.tokenizer import artifact

if TYPE_CHECKING:
    from training.objectives.contract import Objective


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What a recipe's names stand for on this machine."""

    dataset: datasets.Dataset
    tokenizer: artifact.Tokenizer
    shards: Path

    def origin(self) -> dict:
        """The dataset and tokenizer by name and hash, as manifests and run.json hold them."""
        return {
            "dataset": {"name": self.dataset.name, "hash": self.dataset.hash},
            "tokenizer": {
                "name": self.tokenizer.name,
                "hash": self.tokenizer.hash,
                "pre_tokenizer": self.tokenizer.pre_tokenizer,
                "add_bos": self.tokenizer.add_bos,
            },
        }


def resolve_inputs(recipe: Recipe, pinned: dict | None = None) -> Inputs:
    """Find dataset and tokenizer, and tokenize where that has not been done. `pinned` is a run's own record of them."""
    dataset = datasets.load(datasets.resolve(_pinned(pinned, "dataset") or recipe.data.dataset))
    trainable.require_dataset(recipe, dataset)
    method = registry.of(recipe.method)
    tokenizer = _tokenizer(recipe, pinned)
    method.require_tokenizer(recipe, tokenizer)
    return Inputs(dataset, tokenizer, method.prepare(recipe, dataset, tokenizer))


def _pinned(pinned: dict | None, what: str) -> str | None:
    return store.reference_to(pinned[what]) if pinned else None


def _tokenizer(recipe: Recipe, pinned: dict | None) -> artifact.Tokenizer:
    """The recipe's, else its base's; of a run, the very one that it began with."""
    if recipe.tokenizer.path is not None:
        return artifact.load(artifact.resolve(_pinned(pinned, "tokenizer") or recipe.tokenizer.path))
    tokenizer = artifact.of_recipe(recipe)
    if pinned and pinned["tokenizer"]["hash"] != tokenizer.hash:
        raise IntegrityError(
            "the base's tokenizer is not the one that the run began with", where=tokenizer.folder,
            found=files.short(tokenizer.hash), expected=files.short(pinned["tokenizer"]["hash"]),
        )  # fmt: skip
    return tokenizer


def rows_of(inputs: Inputs, split: str, recipe: Recipe) -> Objective:
    """The rows of one split, as the recipe's method makes them."""
    return registry.of(recipe.method).rows(recipe, tokens.open_split(inputs.shards, split), inputs.tokenizer)
