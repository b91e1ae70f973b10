"""Rows of records with what a teacher said of their labels; packed rows are not made.

Legend: N trained positions of a batch, K likeliest tokens, C = K + 1 classes, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Protocol

import numpy as np
import torch

from training.data.tokens import TokenSplit
from training.objectives.contract import Batch, Tensors
from training.objectives.distill_loss import distilled_nats
from training.objectives.loss import trained_nats
from training.objectives.records import RecordRows

_KNOWN = ("labels_N", "top_NK", "teacher_NC")


class Teaching(Protocol):
    """What a teacher said, by document."""

    def of_document(self, document: int) -> tuple[np.ndarray, np.ndarray]:
        """The likeliest tokens and the log-probabilities of a document's labels: shapes (N, K) and (N, C)."""


class DistilledRows(RecordRows):
    """The rows of the train split. A batch stands for no bytes: its loss is no code length of a text."""

    def __init__(
        self, split: TokenSplit, num_bytes_V: np.ndarray, teaching: Teaching, *, alpha: float, temperature: float,
        **settings: object,
    ):  # fmt: skip
        super().__init__(split, num_bytes_V, **settings)
        self._teaching, self._nats = teaching, partial(distilled_nats, alpha=alpha, temperature=temperature)

    def batch(self, rows: np.ndarray) -> Batch:
        plain = super().batch(rows)
        top, logprobs = zip(*(self._teaching.of_document(int(row)) for row in rows), strict=True)
        tensors = {
            "top_NK": torch.from_numpy(np.concatenate(top).astype(np.int64)),
            "teacher_NC": torch.from_numpy(np.concatenate(logprobs)),
        }
        return dataclasses.replace(plain, tensors=plain.tensors | tensors, num_bytes=0)

    def loss(self, model: torch.nn.Module, tensors: Tensors) -> torch.Tensor:
        return trained_nats(model, tensors, self._loss_chunk, self._nats, _KNOWN)


class MadeUp:
    """A teacher that says the same of every label, for a look at a step's memory."""

    def __init__(self, split: TokenSplit, top_k: int, vocab_size: int):
        self._split, self._top_K = split, np.arange(min(top_k, vocab_size))

    def of_document(self, document: int) -> tuple[np.ndarray, np.ndarray]:
        start, end = (int(self._split.offsets[one]) for one in (document, document + 1))
        count = int(np.sum(self._split.trained[start + 1 : end]))
        shape = (count, len(self._top_K) + 1)
        return np.tile(self._top_K, (count, 1)), np.full(shape, -np.log(shape[1]), np.float32)
