"""Rows over a stream of texts: predict every token of every text from the text's own tokens before it.

The tokens of a split, one text after another, are cut into rows of `seq_len` inputs; the label of a row's last position
is the first token of the next row, so no token is lost at a cut. A text's first token (the BOS, where there is one) is
never a label: nothing predicts it from another text. Positions restart at each text, and the attention of a row is
block-diagonal: transformers builds that mask from the restarting positions when no attention mask is given.
Every other token is a label exactly once an epoch.

Legend: B rows of a batch, T positions of a row, N trained positions (of all B*T, flat), V vocabulary.
"""

import numpy as np
import torch

from training.data.tokens import TokenSplit
from training.objectives.contract import IGNORED_LABEL, Batch, Tensors
from training.objectives.loss import trained_nats


class StreamRows:
    """The rows of one split.

    Args:
        split: the flat tokens and where each text begins.
        num_bytes_V: bytes of text that each token stands for, 0 for specials.
        seq_len: inputs of a row.
        loss_chunk: trained positions whose logits exist at once; 0 for all of them, or `auto`.
    """

    def __init__(
        self, split: TokenSplit, num_bytes_V: np.ndarray, *, seq_len: int, pad_id: int = 0, loss_chunk: int | str = 0
    ):
        self._split, self._num_bytes_V = split, num_bytes_V.astype(np.int64)
        self._starts = np.asarray(split.offsets[:-1]).astype(np.int64)  # else each search would convert all of them
        self._seq_len, self._pad_id, self._loss_chunk = seq_len, pad_id, loss_chunk
        self.num_rows = max(0, -(-(split.num_tokens - 1) // seq_len))
        self.lengths = np.broadcast_to(seq_len, self.num_rows)

    def batch(self, rows: np.ndarray) -> Batch:
        windows = [self._window(int(row)) for row in rows]
        stream_BT, starts_BT = (np.stack(one) for one in zip(*windows, strict=True))
        inputs_BT = stream_BT[:, :-1].copy()
        labels_BT = np.where(starts_BT[:, 1:], IGNORED_LABEL, stream_BT[:, 1:])
        column_T = np.arange(self._seq_len)
        positions_BT = column_T - np.maximum.accumulate(np.where(starts_BT[:, :-1], column_T, 0), axis=1)
        inputs_BT[inputs_BT == IGNORED_LABEL] = self._pad_id
        trained_N = np.flatnonzero(labels_BT != IGNORED_LABEL)
        labels_N = labels_BT.reshape(-1)[trained_N]
        arrays = {"input_ids_BT": inputs_BT, "positions_BT": positions_BT, "trained_N": trained_N, "labels_N": labels_N}
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        return Batch(tensors, len(labels_N), int(self._num_bytes_V[labels_N].sum()))

    def lines(self, rows: np.ndarray) -> list[int]:
        found = set()
        for row in rows:
            first = int(row) * self._seq_len
            begin, end = np.searchsorted(self._starts, (first, first + self._seq_len), "right")
            found.update(range(max(0, int(begin) - 1), int(end)))
        return sorted(int(self._split.records[one]) + 1 for one in found)

    def _window(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """The row's inputs and the one token behind them (the ignored label past the end), and where texts begin."""
        first = row * self._seq_len
        window = np.full(self._seq_len + 1, IGNORED_LABEL, dtype=np.int64)
        tokens = self._split.tokens[first : first + self._seq_len + 1]
        window[: len(tokens)] = tokens
        starts = np.zeros(self._seq_len + 1, dtype=bool)
        begin, end = np.searchsorted(self._starts, (first, first + self._seq_len + 1))
        starts[self._starts[begin:end] - first] = True
        return window, starts

    def loss(self, model: torch.nn.Module, tensors: Tensors) -> torch.Tensor:
        return trained_nats(model, tensors, self._loss_chunk)
