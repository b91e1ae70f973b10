"""What a Hugging Face model says of labels: in batches of documents, the head at the labels alone, in chunks.

Legend: B documents of a batch, T positions, N labels, M of a chunk, K likeliest tokens, V vocabulary, D width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from training.objectives import base
from training.objectives.loss import WHOLE_LOGITS, logits_of
from training.objectives.teaching import Said

_BATCH_TOKENS = 4096
_CHUNK = 256

Document = tuple[np.ndarray, np.ndarray]
"""Its tokens, and the places of its labels among them, none of which is the first."""


class TeacherModel:
    """A model that is asked and never trained.

    Args:
        vocab_size: entries of the tokenizer: rows of the head behind them are no tokens, and count among the others.
    """

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype, vocab_size: int):
        self._model = base.opened(folder, dtype, "sdpa").to(device).eval()
        self._device, self._vocab_size = device, vocab_size
        base.look(self._model, packs=False)

    @torch.inference_mode()
    def say(self, documents: Sequence[Document], top_k: int) -> list[Said]:
        """Answer for each document, in order."""
        said: dict[int, Said] = {}
        for batch in _batches(documents):
            whole, label_N = self._batch([documents[number] for number in batch], top_k)
            start = 0
            for number in batch:
                end = start + len(documents[number][1])
                said[number] = Said(*(one[start:end] for one in whole), label_N[start:end])
                start = end
        return [said[number] for number in range(len(documents))]

    def _batch(self, documents: list[Document], top_k: int) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
        width = max(len(tokens) for tokens, _ in documents)
        inputs_BT = np.zeros((len(documents), width), np.int64)
        for row, (tokens, _) in enumerate(documents):
            inputs_BT[row, : len(tokens)] = tokens
        asked = [row * width + places - 1 for row, (_, places) in enumerate(documents)]
        labels_N = torch.from_numpy(np.concatenate([tokens[places] for tokens, places in documents]).astype(np.int64))
        hidden, head = self._hidden(torch.from_numpy(inputs_BT).to(self._device))
        states_ND = hidden.flatten(0, 1).index_select(0, torch.from_numpy(np.concatenate(asked)).to(self._device))
        parts = zip(states_ND.split(_CHUNK), labels_N.to(self._device).split(_CHUNK), strict=True)
        top, logprobs, label = zip(*(self._chunk(head(one), its, top_k) for one, its in parts), strict=True)
        return (np.concatenate(top), np.concatenate(logprobs)), np.concatenate(label)

    def _hidden(self, inputs_BT: torch.Tensor):
        """States and what makes logits of them; padding stands behind, where nothing sees it."""
        if getattr(self._model, WHOLE_LOGITS, False):
            return self._model(input_ids=inputs_BT, use_cache=False).logits, lambda logits: logits
        return self._model.base_model(input_ids=inputs_BT, use_cache=False).last_hidden_state, logits_of(self._model)

    def _chunk(self, logits_MV: torch.Tensor, labels_M: torch.Tensor, top_k: int) -> tuple[np.ndarray, ...]:
        logits_MV = logits_MV.float()
        total_M1 = logits_MV.logsumexp(1, keepdim=True)
        best_MK, top_MK = logits_MV[:, : self._vocab_size].topk(top_k, 1)
        label_M = (logits_MV.gather(1, labels_M[:, None]) - total_M1)[:, 0]
        others_M1 = logits_MV.scatter_(1, top_MK, -torch.inf).logsumexp(1, keepdim=True)
        logprobs_MC = torch.cat([best_MK, others_M1], 1) - total_M1
        return top_MK.cpu().numpy(), logprobs_MC.cpu().numpy(), label_M.cpu().numpy()


def _batches(documents: Sequence[Document]) -> Iterator[list[int]]:
    """Documents of like length together, as many as the batch has tokens for."""
    batch: list[int] = []
    for number in sorted(range(len(documents)), key=lambda one: -len(documents[one][0])):
        longest = len(documents[batch[0] if batch else number][0])
        if batch and longest * (len(batch) + 1) > _BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch
