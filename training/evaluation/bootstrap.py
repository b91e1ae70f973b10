"""Is a difference more than luck? The paired bootstrap: the same records are drawn for both models, again and again.

A record i has a weight w_i (its bytes; 1 for a question) and each model a sum s_i over it (nats; 1 for a right answer).
A draw takes n records with replacement; its difference is sum(s'_i) / sum(w_i) - sum(s_i) / sum(w_i), so the figures
stay token-weighted. The interval is that of percentiles (Efron and Tibshirani 1993, section 13.3).

Of few records such an interval is too narrow, and of records that all say the same it is a point, be they two. So the
paired randomization test stands beside it (Fisher 1935, section 21): were the models equal, each record's difference
d_i = s'_i - s_i could as well have the other sign; p is the share of the patterns of signs whose |sum(+-d_i)| is no
less than |sum(d_i)|. Of answers this is McNemar's exact test. With k records that differ p is never below 2^(1 - k).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from training.evaluation import thresholds

_ROWS_AT_ONCE = 64


@dataclass(frozen=True)
class Difference:
    """After minus before, with its interval.

    `probability_higher` is the share of draws above 0, a tie counts half; `p_value` is the randomization test's, and
    `num_differing` the records that it rests on.
    """

    before: float
    after: float
    difference: float
    low: float
    high: float
    probability_higher: float
    p_value: float
    num_differing: int
    num_records: int


def paired(before: Sequence[float], after: Sequence[float], weights: Sequence[float], scale: float = 1.0) -> Difference:
    """Compare two models' sums over the same records. `scale` multiplies every figure (nats to bits: 1 / ln 2).

    Raises ValueError where there are no records, or not as many of one as of the other.
    """
    num_records = len(weights)
    if not len(before) == len(after) == num_records or sum(weights) <= 0:
        raise ValueError("not the same records")
    sums_2N, weights_N = np.array([before, after], np.float64), np.asarray(weights, np.float64)
    draws, generator = int(thresholds.DRAWS.value), np.random.default_rng(int(thresholds.BOOTSTRAP_SEED.value))
    found = np.empty(draws)
    for start in range(0, draws, _ROWS_AT_ONCE):
        stop = min(draws, start + _ROWS_AT_ONCE)
        drawn = generator.integers(0, num_records, (stop - start, num_records))
        found[start:stop] = (sums_2N[1][drawn] - sums_2N[0][drawn]).sum(1) / np.maximum(weights_N[drawn].sum(1), 1e-12)
    tail = 50 * (1 - thresholds.CONFIDENCE.value)
    low, high = np.percentile(found, [tail, 100 - tail])
    first, second = sums_2N.sum(1) / weights_N.sum()
    higher = float((found > 0).mean() + (found == 0).mean() / 2)
    differing_K = (sums_2N[1] - sums_2N[0])[sums_2N[0] != sums_2N[1]]
    return Difference(
        float(first * scale), float(second * scale), float((second - first) * scale), float(low * scale),
        float(high * scale), higher, _p_value(differing_K), len(differing_K), num_records,
    )  # fmt: skip


def _p_value(differing_K: np.ndarray) -> float:
    """The randomization test's p of differences, none of them 0; exact where the patterns of signs can be counted."""
    most, count = int(thresholds.SIGN_FLIPS.value), len(differing_K)
    if count == 0:
        return 1.0
    observed = abs(differing_K.sum()) - 1e-9 * np.abs(differing_K).sum()  # sums in another order round otherwise
    if 2**count <= most:
        flipped = (np.arange(2**count)[:, None] >> np.arange(count)) & 1
        return float((np.abs((2 * flipped - 1) @ differing_K) >= observed).mean())
    generator, reached = np.random.default_rng(int(thresholds.BOOTSTRAP_SEED.value)), 0
    for start in range(0, most, _ROWS_AT_ONCE):
        signs = 2 * generator.integers(0, 2, (min(_ROWS_AT_ONCE, most - start), count), np.int8) - 1
        reached += int((np.abs(signs @ differing_K) >= observed).sum())
    return (1 + reached) / (1 + most)
