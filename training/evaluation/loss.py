"""Loss, perplexity and bits per byte of a checkpoint on a split: sums over every token, whatever the batch.

A record says what was measured (weights, data set, tokenizer, split, row length), so that two records compare or do
not. It is kept in the run's `eval/` folder and is not measured twice.
"""

from pathlib import Path

import numpy as np

from training.core import files
from training.core.errors import IntegrityError, UserError
from training.core.progress import Progress
from training.data import tokens
from training.engine import device
from training.engine.inputs import Inputs, resolve_inputs, rows_of
from training.evaluation import unigram
from training.objectives import registry
from training.objectives.contract import Score, measure
from training.recipe.load import Resolved
from training.runs.folder import RUN_FILE

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
    kept = _place(folder, split)
    if kept and (record := _read_kept(kept, identity)):
        return record | {"reused": True}
    record = {
        "schema": 1,
        "step": manifest["step"],
        "identity": identity,
        "score": _measure(folder, resolved, inputs, split).to_json(),
        "unigram": _unigram(inputs, split).to_json(),
    }
    if kept:
        files.write_json(kept, record)
    return record | {"reused": False}


def _place(folder: Path, split: str) -> Path | None:
    """Where the record of a run's checkpoint is kept; None for a checkpoint outside a run."""
    run = folder.absolute().parents[1]
    return run / "eval" / f"{folder.name}-{split}.json" if (run / RUN_FILE).is_file() else None


def _read_kept(path: Path, identity: dict) -> dict | None:
    """The kept record where it is of the same identity and undamaged."""
    try:
        record = files.read_json(path)
    except IntegrityError:
        return None
    return record if record.get("identity") == identity else None


def _measure(folder: Path, resolved: Resolved, inputs: Inputs, split: str) -> Score:
    where = device.resolve(resolved.recipe.memory.weights)
    device.use_cores()
    rows = rows_of(inputs, split, resolved.recipe)
    if rows.num_rows == 0:
        raise UserError("the split is empty", where=inputs.shards, found=split, expected="at least one document")
    method = registry.of(resolved.recipe.method)
    trainee = method.build(resolved.recipe, inputs.tokenizer, where.torch_device, where.dtype)
    trainee.load(folder)
    with Progress(f"evaluate {folder.name} on {split}", rows.num_rows, "row") as progress:
        return measure(trainee.model, rows, np.arange(rows.num_rows), MICRO_BATCH, progress.advance)


def _unigram(inputs: Inputs, split: str) -> Score:
    train, test = (tokens.open_split(inputs.shards, name) for name in ("train", split))
    return unigram.score(train, test, vocab_size=inputs.tokenizer.vocab_size, bos_id=inputs.tokenizer.bos_id)
