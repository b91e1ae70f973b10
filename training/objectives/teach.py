"""A teacher's record made for a recipe: everything checked first, then window by window of documents.

Owns the order of the work; who teaches, what is said and how it lies on disk are `teacher`'s, `teacher_model`'s or
`teacher_server`'s, and `teaching`'s.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from training.core import files, paths
from training.core.progress import Progress
from training.data import dataset as datasets
from training.data import tokens
from training.data.tokens import TokenSplit
from training.objectives import registry, teacher, teaching
from training.objectives.teacher import Teacher
from training.recipe.model import Recipe
from training.tokenizer import artifact
from training.tokenizer.artifact import Tokenizer

if TYPE_CHECKING:
    import torch

_WINDOW_DOCUMENTS, _WINDOW_SERVED = 256, 4
_CTX_STEP = 256


@dataclass(frozen=True)
class Taught:
    """A record that is complete now."""

    folder: Path
    manifest: dict
    reused: bool

    @property
    def num_bytes(self) -> int:
        return sum(one["bytes"] for one in self.manifest["files"].values())


def teach(recipe: Recipe, wanted: str, device: torch.device, dtype: torch.dtype) -> Taught:
    """Record what a teacher says of the labels of a recipe's train split, or find it.

    Args:
        wanted: the teacher, in the words of `teacher.find`.
        device: where a Hugging Face folder computes, in `dtype`.

    Raises UserError for a teacher with other tokens, MachineError where the disk has no room.
    """
    who, top_k = teacher.find(wanted), recipe.sections["distill"]["top_k"]
    split, student = _train_split(recipe)
    who.require_same_ids(student)
    identity = who.identity(str(dtype).removeprefix("torch."))
    with teaching.record(split, identity, top_k, student.vocab_size) as recording:
        if recording is not None and recording.num_documents < split.num_documents:
            with _asked(who, split, student, device, dtype) as (model, window):
                _fill(recording, split, model, window, top_k)
    folder = teaching.folder_of(split, identity, top_k)
    return Taught(folder, files.read_manifest(folder, teaching.KIND), recording is None)


def _train_split(recipe: Recipe) -> tuple[TokenSplit, Tokenizer]:
    method, dataset = registry.of(recipe.method), datasets.load(datasets.resolve(recipe.data.dataset))
    student = artifact.of_recipe(recipe)
    method.require_dataset(recipe, dataset)
    method.require_tokenizer(recipe, student)
    return tokens.open_split(method.prepare(recipe, dataset, student), teaching.SPLIT), student


@contextlib.contextmanager
def _asked(who: Teacher, split: TokenSplit, student: Tokenizer, device, dtype) -> Iterator[tuple[object, int]]:
    """What answers, and how many documents it is asked at a time."""
    if not who.is_gguf:
        from training.objectives.teacher_model import TeacherModel

        yield TeacherModel(who.weights, device, dtype, student.vocab_size), _WINDOW_DOCUMENTS
        return
    from training.objectives.teacher_server import TeacherServer

    longest = split.manifest["splits"][split.split]["tokens_per_record"]["max"]
    ctx_size = -(-(longest + 1) // _CTX_STEP) * _CTX_STEP
    with who.served(ctx_size, paths.roots().cache / "teacher.log") as client:
        yield TeacherServer(client, student.vocab_size), _WINDOW_SERVED


def _fill(recording: teaching.Recording, split: TokenSplit, model, window: int, top_k: int) -> None:
    with Progress("teacher", split.num_documents, "record", done=recording.num_documents) as progress:
        while recording.num_documents < split.num_documents:
            first = recording.num_documents
            numbers = range(first, min(first + window, split.num_documents))
            recording.write(model.say([teaching.labels_of(split, number) for number in numbers], top_k))
            progress.advance(len(numbers), f"{recording.figures()['loss_nats']:.3f} nats")
