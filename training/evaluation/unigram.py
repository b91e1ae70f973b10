"""The model to beat: each token by its share in the train split, whatever came before it.

Add-one smoothing over the vocabulary, so that every token of another split has a probability (Laplace).
"""

import numpy as np

from training.data.tokens import TokenSplit
from training.objectives.contract import Score

_TOKENS_AT_ONCE = 1 << 18


def score(train: TokenSplit, test: TokenSplit, text_bytes_V: np.ndarray) -> Score:
    """Score the labels of `test` under those of `train`, on the same tokens and bytes as a model.

    Args:
        text_bytes_V: bytes of text that each token stands for.
    """
    counts_V, tests_V = (_labels(split, len(text_bytes_V)) for split in (train, test))
    log_shares_V = np.log(counts_V + 1) - np.log(counts_V.sum() + len(counts_V))
    return Score(float(-(tests_V * log_shares_V).sum()), int(tests_V.sum()), int((tests_V * text_bytes_V).sum()))


def _labels(split: TokenSplit, vocab_size: int) -> np.ndarray:
    """How often each token is a label, shape (vocab_size,); of texts all but the first are, which nothing predicts."""
    counts_V = np.zeros(vocab_size, np.int64)
    for start in range(0, len(split.tokens), _TOKENS_AT_ONCE):  # counting takes eight bytes a token
        part = slice(start, start + _TOKENS_AT_ONCE)
        tokens = split.tokens[part] if split.trained is None else split.tokens[part][split.trained[part] == 1]
        counts_V += np.bincount(tokens, minlength=vocab_size)
    if split.trained is None:
        counts_V -= np.bincount(split.tokens[split.offsets[:-1].astype(np.int64)], minlength=vocab_size)
    return counts_V
