"""A guard set: general records that show what a model has forgotten, given or drawn.

The drawn one is made of the language reference that every Python carries (`pydoc_data.topics`, plain English): what
comes next after a passage, its own continuation or one of three from other topics, by log-probability. Any base does
better than chance on it, and no answer of a task is asked for. Passages that stand in the trained data are left out.
"""

import hashlib
import itertools
import random
import re
from collections.abc import Iterator
from pathlib import Path

from training.core import paths, store
from training.core.errors import UserError
from training.core.report import again
from training.data import dataset as datasets
from training.data.settings import SPLITS
from training.evaluation import exam, scorers, thresholds

DRAWN = "drawn"
_FEWEST, _PROMPT, _OPTION = 90, 320, 110
_OPTIONS = 4


def is_drawn(reference: str) -> bool:
    """Whether a reference is `drawn`, or `drawn:name@hash`, which leaves out what stands in that data set."""
    return reference == DRAWN or (reference.startswith(f"{DRAWN}:") and "@" in reference)


def leaving_out(reference: str, trained: str | None) -> str:
    """The reference that asks for the very same guard set again: a bare `drawn` with the data that it leaves out."""
    if reference != DRAWN or trained is None:
        return reference
    return f"{DRAWN}:{store.reference(datasets.resolve(trained))}"


def open_guard(reference: str, seed: int) -> exam.Exam:
    """The guard set of `drawn`, an exam's folder or file, or `name@hash:split` of a data set with answers."""
    if not is_drawn(reference):
        return open_exam(reference)
    trained = reference.partition(":")[2]
    return drawn(seed, datasets.load(datasets.resolve(trained)) if trained else None)


def open_exam(reference: str) -> exam.Exam:
    """An exam by its path, or a data set's split as `name@hash:split`. Raises UserError."""
    name, colon, split = reference.rpartition(":")
    if not Path(reference).exists() and colon and split in SPLITS:
        return exam.of_split(datasets.load(datasets.resolve(name)), split)
    if of_split(reference, "SPLIT") != reference:
        splits = datasets.load(datasets.resolve(reference)).splits
        raise UserError(
            "an exam of a data set is one of its splits", where="--exam", found=reference,
            expected=" or ".join(of_split(reference, each) for each in splits),
            next_command=again("--exam", of_split(reference, splits[-1])),
        )  # fmt: skip
    return exam.read(Path(reference))


def of_split(reference: str, split: str) -> str:
    """The reference of an exam; of a data set that is named without a split, that of this split."""
    is_dataset = not Path(reference).exists() and store.find(reference, paths.roots().datasets)
    return f"{reference}:{split}" if is_dataset else reference


def drawn(seed: int, trained: datasets.Dataset | None) -> exam.Exam:
    """Draw the guard set: the same seed on the same Python gives the same questions."""
    pairs, generator = list(_pairs()), random.Random(seed)
    generator.shuffle(pairs)
    seen = _seen({_digest(prompt) for prompt, _, _ in pairs}, trained)
    kept = [pair for pair in pairs if _digest(pair[0]) not in seen]
    count = min(int(thresholds.GUARD_QUESTIONS.value), len(kept))
    if count < _OPTIONS:
        raise UserError(
            "no guard set can be drawn", found=f"{len(kept)} passages that are not in the trained data",
            expected="a guard set of your own", next_command=again("--guard", "my-exam.jsonl"),
        )  # fmt: skip
    questions = []
    for number, (prompt, following, topic) in enumerate(kept[:count]):
        others = [pair[1] for pair in kept if pair[2] != topic and pair[1] != following]
        options = [following, *generator.sample(sorted(set(others)), _OPTIONS - 1)]
        generator.shuffle(options)
        questions.append(exam.Question(f"{topic}-{number}", None, prompt, following, tuple(options), topic))
    left_out = {"in the trained data": len(pairs) - len(kept)} if len(kept) < len(pairs) else {}
    return exam.Exam("drawn-guard", scorers.Scorer("choice"), 1, tuple(questions), left_out)


def _pairs() -> Iterator[tuple[str, str, str]]:
    """A passage, what follows it, and its topic; passages of plain sentences alone."""
    from pydoc_data.topics import topics

    for topic, text in sorted(topics.items()):
        passages = [" ".join(one.split()) for one in re.split(r"\n\s*\n", text)]
        for one, following in itertools.pairwise(passages):
            if _is_prose(one) and _is_prose(following):
                yield one[-_PROMPT:], " " + _cut(following), topic


def _is_prose(text: str) -> bool:
    words = text.split()
    return len(text) >= _FEWEST and text[0].isupper() and sum(word.isalpha() for word in words) > 0.6 * len(words)


def _cut(text: str) -> str:
    return text if len(text) <= _OPTION else text[:_OPTION].rpartition(" ")[0]


def _digest(passage: str) -> bytes:
    return hashlib.blake2b(passage.encode(), digest_size=16).digest()


def _seen(wanted: set[bytes], trained: datasets.Dataset | None) -> set[bytes]:
    """Which passages stand in the texts that were trained on."""
    if trained is None or "train" not in trained.splits:
        return set()
    found = set()
    for text in trained.iter_texts("train"):
        for part in re.split(r"\n\s*\n", text):
            found |= wanted & {_digest(" ".join(part.split())[-_PROMPT:])}
    return found
