"""Rows of records with answers: inputs are whole records, labels the tokens that are trained.

A row holds one record, or several that are packed; a record's last token is no input, since nothing follows it, and its
first is no label. Padding stands at a row's end alone and is known by length, never by an id (B22): a causal model's
tokens do not see what comes behind them, so padded rows need no mask. Packed records do not see each other: positions
restart at each, and at the padding, and transformers builds the block-diagonal mask from that.

Legend: B rows of a batch, T positions of a row, N trained positions (of all B*T, flat), V vocabulary.
"""

import numpy as np
import torch

from training.data import packing
from training.data.tokens import TokenSplit
from training.objectives.contract import IGNORED_LABEL, Batch, Tensors
from training.objectives.loss import trained_nats


class RecordRows:
    """The rows of one split.

    Args:
        split: tokens, where each record begins, and which tokens are trained.
        num_bytes_V: bytes of text that each token stands for, 0 for specials.
        seq_len: the most inputs of a packed row.
        packs: whether records share rows.
        seed: which of the records of equal length meet in a row.
        loss_chunk: trained positions whose logits exist at once; 0 for all of them, or `auto`.
    """

    def __init__(
        self, split: TokenSplit, num_bytes_V: np.ndarray, *, seq_len: int, packs: bool = False, seed: int = 0,
        pad_id: int = 0, loss_chunk: int | str = 0,
    ):  # fmt: skip
        self._split, self._num_bytes_V = split, num_bytes_V
        self._offsets = np.asarray(split.offsets).astype(np.int64)
        lengths = np.diff(self._offsets) - 1
        self.packs = packing.plan(lengths, seq_len, seed) if packs else packing.alone(lengths, seq_len)
        self._lengths, self._shares, self._pad_id, self._loss_chunk = lengths, packs, pad_id, loss_chunk
        self.num_rows = self.packs.num_rows
        self.lengths = np.add.reduceat(lengths[self.packs.samples], self.packs.starts[:-1])

    def batch(self, rows: np.ndarray) -> Batch:
        packs = [self.packs.row(int(row)) for row in rows]
        width = max(1, *(int(self._lengths[pack].sum()) for pack in packs))
        inputs_BT = np.full((len(rows), width), self._pad_id, np.int64)
        labels_BT = np.full((len(rows), width), IGNORED_LABEL, np.int64)
        positions_BT = np.zeros((len(rows), width), np.int64)
        for place, pack in enumerate(packs):
            end = 0
            for record in pack:
                start, end = end, end + int(self._lengths[record])
                inputs_BT[place, start:end], labels_BT[place, start:end] = self._record(int(record))
                positions_BT[place, start:end] = np.arange(end - start)
            positions_BT[place, end:] = np.arange(width - end)
        trained_N = np.flatnonzero(labels_BT != IGNORED_LABEL)
        labels_N = labels_BT.reshape(-1)[trained_N]
        arrays = {"input_ids_BT": inputs_BT, "trained_N": trained_N, "labels_N": labels_N}
        if self._shares:
            arrays["positions_BT"] = positions_BT
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        return Batch(tensors, len(labels_N), int(self._num_bytes_V[labels_N].sum()))

    def lines(self, rows: np.ndarray) -> list[int]:
        return sorted(int(self._split.records[one]) + 1 for row in rows for one in self.packs.row(int(row)))

    def _record(self, record: int) -> tuple[np.ndarray, np.ndarray]:
        """A record's inputs, and the label of each: the next token where that is trained."""
        start, end = self._offsets[record], self._offsets[record + 1]
        tokens = self._split.tokens[start:end].astype(np.int64)
        return tokens[:-1], np.where(self._split.trained[start + 1 : end] == 1, tokens[1:], IGNORED_LABEL)

    def loss(self, model: torch.nn.Module, tensors: Tensors) -> torch.Tensor:
        return trained_nats(model, tensors, self._loss_chunk)
