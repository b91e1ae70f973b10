"""The contract between the trainer and a way of training, the `method` of a recipe.

A method is a plugin: a module of this folder with `METHODS`, and beside it `<module>.schema.json`, which names its
methods and holds its section of the recipe, if it has one. Adding one touches no other room. It says what stands
between a recipe and a run, builds the model (`Trainee`), and turns a split into rows (`contract.Objective`), whose
labels may be tokens or, with a model of another kind, answers to a question.

Importing a plugin costs nothing: torch is imported inside `rows`, `build` and `imagine`.
"""

from __future__ import annotations

import abc
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from training.core.errors import TrainyardError, UserError
from training.data import tokens
from training.data.dataset import Dataset
from training.data.supervision import Settings
from training.data.tokens import TokenSplit
from training.recipe.load import Resolved
from training.recipe.model import Recipe
from training.tokenizer.artifact import Tokenizer

if TYPE_CHECKING:
    import torch

    from training.objectives.contract import Objective
    from training.objectives.trainee import Trainee


_logger = logging.getLogger(__name__)


class Method(abc.ABC):
    """A way of training. What is defined here is that of a causal language model trained on tokens.

    Args:
        name: the recipe's `method`.
    """

    def __init__(self, name: str):
        self.name = name

    # ---- before anything heavy is loaded

    def settled(self, resolved: Resolved) -> Resolved:
        """The recipe with what only this machine's files can tell filled in. Raises what stands in the way."""
        return resolved

    def problems(self, resolved: Resolved) -> list[TrainyardError]:
        """Everything of the recipe that this method cannot do."""
        recipe = resolved.recipe
        flash = recipe.memory.attention == "flash_attention_2"
        if not (recipe.data.packing and flash and recipe.data.micro_batch > 1):
            return []
        return [
            UserError(
                "flash_attention_2 keeps packed records apart in batches of one row alone",
                where=resolved.origins.get("data.micro_batch"), found=f"data.micro_batch: {recipe.data.micro_batch}",
                expected="data.micro_batch: 1 with a larger batch.accumulate, or memory.attention: sdpa",
            )
        ]  # fmt: skip

    @abc.abstractmethod
    def require_dataset(self, recipe: Recipe, dataset: Dataset) -> None:
        """Raise UserError where records of the data set's form cannot be trained on."""

    @abc.abstractmethod
    def require_tokenizer(self, recipe: Recipe, tokenizer: Tokenizer) -> None:
        """Raise UserError where the tokenizer does not fit the model."""

    def prepare(self, recipe: Recipe, dataset: Dataset, tokenizer: Tokenizer) -> Path:
        """Write what batches are read from, or find it, and return its folder."""
        return tokens.tokenize(dataset, tokenizer, Settings.of(recipe.data))

    # ---- with torch

    def rows(self, recipe: Recipe, split: TokenSplit, tokenizer: Tokenizer) -> Objective:
        """The rows of one split: of records where it has labels, else of a stream of texts."""
        rows = self.imagined_rows(recipe, split, tokenizer)
        if split.trained is not None and recipe.data.packing:
            share = 100 * rows.packs.padding_share
            _logger.info("%s: records packed into %d rows, %.1f %% padding", split.split, rows.num_rows, share)
        return rows

    def imagined_rows(self, recipe: Recipe, split: TokenSplit, tokenizer: Tokenizer) -> Objective:
        """The same of a split that may be made up, for a look at a step's memory: nothing is read from disk."""
        settings = self.row_settings(recipe, tokenizer)
        if split.trained is None:
            from training.objectives.stream import StreamRows

            return StreamRows(split, tokenizer.text_bytes_V, **settings)
        from training.objectives.records import RecordRows

        settings |= {"packs": recipe.data.packing, "seed": recipe.seeds.data}
        return RecordRows(split, tokenizer.text_bytes_V, **settings)

    def row_settings(self, recipe: Recipe, tokenizer: Tokenizer) -> dict:
        """What every kind of rows takes of a recipe."""
        return {
            "seq_len": recipe.data.seq_len,
            "loss_chunk": recipe.memory.loss_chunk,
            "pad_id": tokenizer.pad_id or 0,
        }

    @abc.abstractmethod
    def build(self, recipe: Recipe, tokenizer: Tokenizer, device: torch.device, dtype: torch.dtype) -> Trainee:
        """The model to train, on its device; the same seed gives the same weights on every machine's CPU.

        Raises IntegrityError where a base has changed.
        """

    def begin(self, recipe: Recipe, trainee: Trainee) -> dict:
        """Take over what a fresh run begins with beyond its base; returns what the run's first event says of it."""
        return {}

    def imagine(self, recipe: Recipe, device: torch.device, dtype: torch.dtype) -> Trainee:
        """A model of the same step with weights of no meaning, for a look at its memory: nothing is read from disk."""
        from training.objectives import architecture
        from training.objectives.trainee import Trainee

        return Trainee(architecture.blank(recipe, device, dtype))
