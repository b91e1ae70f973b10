"""What a llama.cpp server says of labels: one request a label, the tokens before it as ids, the prompt cached.

A server gives log-probabilities of what comes next and none of a prompt's own tokens; with its cache it computes one
token more a request. The mass of all other tokens is what the likeliest leave of 1.

Legend: N labels of a document, K likeliest tokens, C = K + 1 classes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from training.core.errors import RunError
from training.llamacpp.client import Client
from training.objectives.teaching import Said


class TeacherServer:
    """A server that is asked label by label."""

    def __init__(self, client: Client, vocab_size: int):
        self._client, self._vocab_size = client, vocab_size

    def say(self, documents: Sequence[tuple[np.ndarray, np.ndarray]], top_k: int) -> list[Said]:
        """Answer for each document, in order; a document is its tokens, and the places of its labels among them."""
        return [self._document(tokens, places, top_k) for tokens, places in documents]

    def _document(self, tokens: np.ndarray, places: np.ndarray, top_k: int) -> Said:
        answers = [self._client.top_logprobs(tokens[:place], top_k, reuse=True) for place in places]
        self._require_whole(answers, top_k)
        top_NK = np.array([[token for token, _ in answer] for answer in answers])
        best_NK = np.array([[logprob for _, logprob in answer] for answer in answers])
        others_N = np.log1p(-np.minimum(np.exp(best_NK).sum(1), 1 - 1e-9))
        is_label_NK = top_NK == tokens[places][:, None]
        label_N = np.where(is_label_NK.any(1), (best_NK * is_label_NK).sum(1), np.minimum(best_NK[:, -1], others_N))
        return Said(top_NK, np.concatenate([best_NK, others_N[:, None]], 1), label_N)

    def _require_whole(self, answers: list[list[tuple[int, float]]], top_k: int) -> None:
        for answer in answers:
            ids = {token for token, _ in answer}
            if len(ids) != top_k or not all(0 <= token < self._vocab_size for token in ids):
                raise RunError(
                    "the server's answer is not one for each of the likeliest tokens", where=self._client.url,
                    found=f"{len(ids)} tokens, {min(ids, default=0)} to {max(ids, default=0)}",
                    expected=f"{top_k} tokens under {self._vocab_size}",
                )  # fmt: skip
