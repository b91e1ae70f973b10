"""Loss, perplexity and bits per byte of a checkpoint on a split: sums over every token, whatever the batch.

A record says what was measured (weights, data set, tokenizer, split, row length), so that two records compare or do
not. It is kept in the run's `eval/` folder and is not measured twice.
"""

from pathlib import Path

import numpy as np

from training.core import files
from training.core.errors import UserError
from training.core.progress import Progress
from training.data import tokens
from training.engine import checkpoint, device, model
from training.engine.inputs import Inputs, resolve_inputs, rows_of
from training.evaluation import unigram
from training.objectives.contract import Score, measure
from training.recipe.load import Resolved

MICRO_BATCH = 8


def evaluate(folder: Path, split: str) -> dict:
    """Measure a checkpoint on every row of a split, or return the record of when that was done.

    The record holds `identity`, `score` and `unigram`, the score of the train split's token shares on the same bytes.
    """
    manifest = files.verify_manifest(folder, "checkpoint")
    resolved = Resolved.from_values(files.read_json(folder / "recipe.json"))
    inputs = resolve_inputs(resolved.recipe, manifest)
    identity = {
        "weights_sha256": manifest["weights_sha256"],
        "dataset": manifest["dataset"],
        "tokenizer": manifest["tokenizer"],
        "split": split,
        "seq_len": resolved.recipe.data.seq_len,
    }
    kept = folder.parents[1] / "eval" / f"{folder.name}-{split}.json"
    if kept.exists():
        record = files.read_json(kept)
        if record.get("identity") == identity:
            return record | {"reused": True}
    score = _measure(folder, resolved, inputs, split)
    base = _unigram(inputs, split)
    record = {"schema": 1, "step": manifest["step"], "identity": identity, "score": score.to_json()}
    record |= {"unigram": base.to_json()}
    files.write_json(kept, record)
    return record | {"reused": False}


def _measure(folder: Path, resolved: Resolved, inputs: Inputs, split: str) -> Score:
    where = device.resolve(resolved.recipe.memory.weights)
    device.use_cores()
    rows = rows_of(inputs, split, resolved.recipe)
    if rows.num_rows == 0:
        raise UserError("the split is empty", where=inputs.shards, found=split, expected="at least one document")
    measured = model.build(resolved.recipe, inputs.tokenizer)
    checkpoint.load_weights(folder, measured)
    measured.to(where.torch_device, where.dtype)
    with Progress(f"evaluate {folder.name} on {split}", rows.num_rows, "row") as progress:
        return measure(measured, rows, np.arange(rows.num_rows), MICRO_BATCH, progress.advance)


def _unigram(inputs: Inputs, split: str) -> Score:
    train, test = (tokens.open_split(inputs.shards, name) for name in ("train", split))
    return unigram.score(train, test, vocab_size=inputs.tokenizer.vocab_size, bos_id=inputs.tokenizer.bos_id)
