"""What a recipe's names stand for on this machine: the data set, the tokenizer, and the shards that the two make."""

import dataclasses
from pathlib import Path

from training.core import files
from training.data import dataset as datasets
from training.data import tokens
from training.engine import trainable
from training.objectives.pretrain import PretrainRows, token_bytes
from training.recipe.model import Recipe
from training.tokenizer import artifact


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
    if pinned:
        dataset_reference = f"{pinned['dataset']['name']}@{files.short(pinned['dataset']['hash'])}"
        tokenizer_reference = f"{pinned['tokenizer']['name']}@{files.short(pinned['tokenizer']['hash'])}"
    else:
        dataset_reference, tokenizer_reference = recipe.data.dataset, recipe.tokenizer.path
    dataset = datasets.load(datasets.resolve(dataset_reference))
    trainable.require_dataset(recipe, dataset)
    tokenizer = artifact.load(artifact.resolve(tokenizer_reference))
    return Inputs(dataset, tokenizer, tokens.tokenize(dataset, tokenizer))


def rows_of(inputs: Inputs, split: str, recipe: Recipe) -> PretrainRows:
    """The rows of one split for pretraining."""
    tokenizer = inputs.tokenizer
    counts = token_bytes(files.read_json(tokenizer.folder / "tokenizer.json"), tokenizer.vocab_size)
    chunk = recipe.memory.loss_chunk
    return PretrainRows(
        tokens.open_split(inputs.shards, split),
        counts,
        seq_len=recipe.data.seq_len,
        bos_id=tokenizer.bos_id,
        pad_id=tokenizer.pad_id,
        loss_chunk=0 if chunk == "auto" else chunk,
    )
