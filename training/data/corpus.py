"""A dataset as tokenizers see it: the corpus that one is trained on, and samples from everywhere to measure on."""

import math
from collections.abc import Iterator
from functools import partial
from itertools import islice

from training.data import record
from training.data.dataset import Dataset
from training.tokenizer.train import Corpus

_TRAINING_SAMPLE_BYTES, _COMPARED_BYTES = 8 << 20, 16 << 20


def of(data: Dataset) -> Corpus:
    """What a tokenizer is trained on: a dataset's train split. Raises IntegrityError where its bytes have changed."""
    data = data.verified()
    splits = data.manifest["splits"]
    return Corpus(
        dataset=data.name,
        hash=data.hash,
        split="train",
        text_bytes=splits["train"]["text_bytes"],
        read=partial(data.iter_texts, "train"),
        samples={split: partial(_sample, data, split) for split in ("train", "validation") if split in splits},
    )


def _sample(data: Dataset, split: str) -> Iterator[str]:
    """Each so many-th text of a split, about 8 MiB in all."""
    every = math.ceil(data.manifest["splits"][split]["text_bytes"] / _TRAINING_SAMPLE_BYTES)
    return islice(data.iter_texts(split), 0, None, every)


def named_texts(data: Dataset) -> Iterator[tuple[str, str]]:
    """Each so many-th record, about 16 MiB in all: the name of its source, else of its split, and each text of it."""
    every = max(1, math.ceil(data.text_bytes / _COMPARED_BYTES))
    for split in data.splits:
        for value in islice(data.iter_records(split), 0, None, every):
            for text in record.texts(value):
                yield value.get("source") or split, text
