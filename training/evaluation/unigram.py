"""The model to beat: each token by its share in the train split, whatever came before it.

Add-one smoothing over the vocabulary, so that every token of another split has a probability (Laplace).
"""

import numpy as np

from training.data.tokens import TokenSplit
from training.objectives.contract import Score


def score(train: TokenSplit, test: TokenSplit, *, vocab_size: int, bos_id: int | None) -> Score:
    """Score `test` under the token frequencies of `train`: what is trained of it, on the same bytes as a model."""
    counts_V = np.bincount(_labels(train), minlength=vocab_size).astype(np.float64)
    tests_V = np.bincount(_labels(test), minlength=vocab_size)
    if bos_id is not None and test.trained is None:
        counts_V[bos_id], tests_V[bos_id] = 0, 0
    log_shares_V = np.log(counts_V + 1) - np.log(counts_V.sum() + vocab_size)
    return Score(float(-(tests_V * log_shares_V).sum()), int(tests_V.sum()), int(test.text_bytes.sum()))


def _labels(split: TokenSplit) -> np.ndarray:
    return split.tokens if split.trained is None else split.tokens[split.trained == 1]
