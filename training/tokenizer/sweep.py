"""Which size of vocabulary: several sizes on one text, with what each costs a model.

A larger vocabulary cuts text into fewer tokens, and makes each dearer: the head multiplies by every entry. The size
that is recommended needs the fewest multiplications for a byte of text. Byte-level BPE learns its merges one after
another, so the largest vocabulary is trained once, and a smaller one is its beginning.
"""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from training.calculator import formula, shapes
from training.core import files, paths
from training.core.errors import UserError
from training.recipe.load import load
from training.tokenizer import measure
from training.tokenizer.artifact import TOKENIZER, Tokenizer
from training.tokenizer.train import MOST_ENTRIES, Corpus, Settings, learn, manifest_of

_FEWEST_TRIED = 512  # a smaller vocabulary holds little but the bytes
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Point:
    """One size and its price.

    Args:
        measured: how the tokenizer compresses.
        vocabulary_parameters: of embedding and head together.
        parameters: of the whole model.
        memory_bytes: peak memory of a training step, as memfit estimates it on this machine.
        work_per_byte: multiplications of a forward pass for a byte of text.
    """

    measured: measure.Measured
    vocabulary_parameters: int
    parameters: int
    memory_bytes: int
    work_per_byte: float

    @property
    def vocab_size(self) -> int:
        return self.measured.tokenizer.vocab_size

    def to_json(self) -> dict:
        return {
            "vocab_size": self.vocab_size, "bytes_per_token": self.measured.all.bytes_per_token,
            "unused_entries": len(self.measured.unused_entries),
            "vocabulary_parameters": self.vocabulary_parameters, "parameters": self.parameters,
            "memory_bytes": self.memory_bytes, "work_per_byte": self.work_per_byte,
        }  # fmt: skip


def sweep(
    corpus: Corpus, settings: Settings, sizes: Sequence[int], texts: Sequence[tuple[str, str]], recipe: Path
) -> list[Point]:
    """Measure each size of vocabulary on texts, and price it for a recipe's model; the smallest first.

    Raises UserError where the recipe's model is not trained from scratch, or a size is out of bounds.
    """
    chosen = [replace(settings, vocab_size=size) for size in sorted(set(sizes))]
    _require_own_vocabulary(recipe)
    whole = json.loads(learn(corpus, chosen[-1]).to_str())
    chosen = _given(chosen, len(whole["model"]["vocab"]))
    points = []
    with files.scratch_folder(paths.roots().cache / "sweeps") as workspace:
        for one in chosen:
            folder = workspace / str(one.vocab_size)
            folder.mkdir()
            files.write_json(folder / TOKENIZER, cut(whole, one.vocab_size))
            tokenizer = Tokenizer(folder, manifest_of(folder, corpus.dataset, one))
            points.append(_priced(measure.measure(tokenizer, texts), recipe))
    return points


def _given(chosen: Sequence[Settings], most: int) -> list[Settings]:
    """The sizes that the text gives: it has no more than so many entries, and those are tried in place of more."""
    beyond = [one.vocab_size for one in chosen if one.vocab_size > most]
    if beyond:
        _logger.warning("the text gives %d entries and no more: %s left out", most, ", ".join(map(str, beyond)))
    within = [one for one in chosen if one.vocab_size <= most]
    is_new = beyond and most not in [one.vocab_size for one in within]
    return [*within, replace(chosen[-1], vocab_size=most)] if is_new else within


def further(points: Sequence[Point], asked: Sequence[int]) -> list[int]:
    """Sizes to try next where the best one is at an end of those that were asked for; none where it lies within."""
    best = recommended(points).vocab_size
    smaller = [size for size in (best // 4, best // 2) if best == min(asked) and size >= _FEWEST_TRIED]
    larger = [size for size in (best * 2, best * 4) if best == max(asked) and size <= MOST_ENTRIES]
    return [*smaller, best, *larger] if smaller or larger else []


def recommended(points: Sequence[Point]) -> Point:
    """The size that needs the fewest multiplications for a byte of text."""
    return min(points, key=lambda point: point.work_per_byte)


def cut(document: dict, vocab_size: int) -> dict:
    """The `tokenizer.json` that training with a smaller vocabulary would have given."""
    vocab = {entry: number for entry, number in document["model"]["vocab"].items() if number < vocab_size}
    merges = []
    for pair in document["model"]["merges"]:
        if "".join(pair) not in vocab:
            break
        merges.append(pair)
    return document | {"model": document["model"] | {"vocab": vocab, "merges": merges}}


def _require_own_vocabulary(recipe: Path) -> None:
    if load(recipe, []).recipe.model.arch is None:
        raise UserError(
            "the recipe's model has a vocabulary of its own", where=f"{recipe}: model",
            found="a base", expected="model.arch, a model that is trained from scratch",
            next_command="make tokenizer-measure DATASET=stdlib ARGS='--sweep 2048,4096 --config"
            " recipes/demo/pretrain-stdlib.yaml'",
        )  # fmt: skip


def _priced(measured: measure.Measured, path: Path) -> Point:
    recipe = load(path, [f"model.arch.vocab_size={measured.tokenizer.vocab_size}"]).recipe
    shape = shapes.of_model(recipe.model)
    work = shape.linear_weights + shape.embedding_parameters
    return Point(
        measured, shape.embedding_parameters + shape.head_parameters, shape.parameters,
        formula.estimate(recipe).peak.device_bytes, work / measured.all.bytes_per_token,
    )  # fmt: skip
