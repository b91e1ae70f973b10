"""The unigram model against a count by hand."""

import dataclasses
import math

import numpy as np
import pytest

from training.evaluation import unigram


@dataclasses.dataclass
class Split:
    tokens: np.ndarray
    text_bytes: np.ndarray
    trained: None = None


def test_the_score_is_that_of_a_count_by_hand():
    """Ids 0 (BOS, not counted) to 3; the train split has 3 of id 1, 1 of id 2, none of id 3."""
    train = Split(np.array([0, 1, 1, 2, 0, 1], dtype=np.uint16), np.array([3, 1], dtype=np.uint64))
    test = Split(np.array([0, 1, 3], dtype=np.uint16), np.array([5], dtype=np.uint64))
    score = unigram.score(train, test, vocab_size=4, bos_id=0)
    assert score.nats == pytest.approx(-math.log(4 / 8) - math.log(1 / 8))
    assert (score.num_tokens, score.num_bytes) == (2, 5)
    assert score.bits_per_byte == pytest.approx((1 + 3) / 5)
