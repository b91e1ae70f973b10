"""The unigram model against a count by hand."""

import dataclasses
import math
import tracemalloc

import numpy as np
import pytest

from training.evaluation import unigram


@dataclasses.dataclass
class Split:
    tokens: np.ndarray
    offsets: np.ndarray
    trained: np.ndarray | None = None


def split(*documents: list[int], trained: list[int] | None = None) -> Split:
    offsets = np.cumsum([0, *map(len, documents)]).astype(np.uint64)
    labels = None if trained is None else np.array(trained, np.uint8)
    return Split(np.array([one for document in documents for one in document], np.uint16), offsets, labels)


def test_the_score_is_that_of_a_count_by_hand():
    """Ids 0 (BOS, not counted) to 3; the train split has 3 of id 1, 1 of id 2, none of id 3."""
    train, test = split([0, 1, 1, 2], [0, 1]), split([0, 1, 3])
    score = unigram.score(train, test, np.array([0, 2, 1, 3]))
    assert score.nats == pytest.approx(-math.log(4 / 8) - math.log(1 / 8))
    assert (score.num_tokens, score.num_bytes) == (2, 5)
    assert score.bits_per_byte == pytest.approx((1 + 3) / 5)


def test_without_a_bos_a_texts_first_token_is_no_label_and_its_end_is_one():
    """As of a model: where BOS is EOS, or there is none, a document begins with its text."""
    train, test = split([1, 2, 3, 0], [1, 2, 0]), split([3, 2, 0])
    score = unigram.score(train, test, np.array([0, 2, 1, 3]))
    assert score.nats == pytest.approx(-2 * math.log(3 / 9))  # of five labels two are id 2, and two the end
    assert (score.num_tokens, score.num_bytes) == (2, 1)


def test_of_records_with_answers_the_labels_alone_count():
    train, test = split([0, 1, 2], trained=[0, 0, 1]), split([0, 1, 2], [0, 2], trained=[0, 0, 1, 0, 1])
    score = unigram.score(train, test, np.array([0, 2, 1, 3]))
    assert score.nats == pytest.approx(-2 * math.log(2 / 5)) and (score.num_tokens, score.num_bytes) == (2, 2)


@pytest.mark.parametrize("has_answers", [False, True])
def test_memory_does_not_grow_with_the_tokens(has_answers: bool):
    tokens = np.zeros(4 << 20, np.uint16)
    trained = np.ones(len(tokens), np.uint8) if has_answers else None
    large = Split(tokens, np.array([0, len(tokens)], np.uint64), trained)
    tracemalloc.start()
    score = unigram.score(large, large, np.ones(4, np.int64))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert score.num_tokens == len(tokens) - (not has_answers) and peak < len(tokens)
