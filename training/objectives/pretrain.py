"""Pretraining: predict every token of every document from the document's own tokens before it.

The token stream of a split (`BOS document EOS BOS document EOS ...`) is cut into rows of `seq_len` inputs; the label
of a row's last position is the first token of the next row, so no token is lost at a cut. A document's BOS is never a
label (nothing predicts it from another document), positions restart at each BOS, and the attention of a row is
block-diagonal: transformers builds that mask from the restarting positions when no attention mask is given.
Every token but the BOS is a label exactly once an epoch.

Legend: B rows of a batch, T positions of a row, N trained positions (of all B*T, flat), D width, V vocabulary.
"""

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from training.data.tokens import TokenSplit
from training.objectives.contract import IGNORED_LABEL, Batch, Tensors


class PretrainRows:
    """The rows of one split.

    Args:
        split: the flat tokens; BOS stands at document starts alone (text is encoded without special parsing).
        token_bytes: bytes of text that each token stands for, 0 for specials; shape (V,).
        seq_len: inputs of a row.
        loss_chunk: trained positions whose logits exist at once; 0 for all of them.
    """

    def __init__(
        self, split: TokenSplit, token_bytes: np.ndarray, *, seq_len: int, bos_id: int, pad_id: int, loss_chunk: int = 0
    ):
        self._split, self._token_bytes = split, token_bytes.astype(np.int64)
        self._seq_len, self._bos_id, self._pad_id, self._loss_chunk = seq_len, bos_id, pad_id, loss_chunk
        self.num_rows = max(0, -(-(split.num_tokens - 1) // seq_len))

    def batch(self, rows: np.ndarray) -> Batch:
        stream_BT = np.stack([self._window(int(row)) for row in rows])
        inputs_BT, labels_BT = stream_BT[:, :-1].copy(), stream_BT[:, 1:].copy()
        starts_BT = inputs_BT == self._bos_id
        column_T = np.arange(self._seq_len)
        positions_BT = column_T - np.maximum.accumulate(np.where(starts_BT, column_T, 0), axis=1)
        labels_BT[labels_BT == self._bos_id] = IGNORED_LABEL
        inputs_BT[inputs_BT == IGNORED_LABEL] = self._pad_id
        trained_N = np.flatnonzero(labels_BT != IGNORED_LABEL)
        labels_N = labels_BT.reshape(-1)[trained_N]
        arrays = {"input_ids_BT": inputs_BT, "positions_BT": positions_BT, "trained_N": trained_N, "labels_N": labels_N}
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        return Batch(tensors, len(labels_N), int(self._token_bytes[labels_N].sum()))

    def _window(self, row: int) -> np.ndarray:
        """The row's inputs and the one token behind them; past the end of the split, the ignored label."""
        start = row * self._seq_len
        window = np.full(self._seq_len + 1, IGNORED_LABEL, dtype=np.int64)
        tokens = self._split.tokens[start : start + self._seq_len + 1]
        window[: len(tokens)] = tokens
        return window

    def loss(self, model: torch.nn.Module, tensors: Tensors) -> torch.Tensor:
        hidden_BTD = model.base_model(
            input_ids=tensors["input_ids_BT"], position_ids=tensors["positions_BT"], use_cache=False
        ).last_hidden_state
        hidden_ND = hidden_BTD.flatten(0, 1).index_select(0, tensors["trained_N"])
        return summed_nats(model.get_output_embeddings(), hidden_ND, tensors["labels_N"], self._loss_chunk)


def summed_nats(head: torch.nn.Module, hidden_ND: torch.Tensor, labels_N: torch.Tensor, chunk: int = 0) -> torch.Tensor:
    """Sum the cross-entropy over trained positions; with `chunk`, logits of that many exist at once.

    A chunk's logits are computed again in the backward pass, so value and gradient are those of the whole.
    """

    def of(hidden_MD: torch.Tensor, labels_M: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(head(hidden_MD).float(), labels_M, reduction="sum")

    if chunk == 0 or len(labels_N) <= chunk:
        return of(hidden_ND, labels_N)
    parts = zip(hidden_ND.split(chunk), labels_N.split(chunk), strict=True)
    return torch.stack(
        [checkpoint(of, hidden_MD, labels_M, use_reentrant=False) for hidden_MD, labels_M in parts]
    ).sum()


def token_bytes(tokenizer_json: dict, vocab_size: int) -> np.ndarray:
    """Bytes of text that each id stands for, shape (vocab_size,).

    In a byte-level BPE every character of an entry is one byte; specials and padding stand for none.
    """
    counts = np.zeros(vocab_size, dtype=np.int32)
    specials = {token["id"] for token in tokenizer_json.get("added_tokens", []) if token["special"]}
    for entry, index in tokenizer_json["model"]["vocab"].items():
        if index not in specials:
            counts[index] = len(entry)
    return counts
