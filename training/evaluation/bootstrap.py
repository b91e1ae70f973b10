"""Is a difference more than luck? The paired bootstrap: the same records are drawn for both models, again and again.

A record i has a weight w_i (its bytes; 1 for a question) and each model a sum s_i over it (nats; 1 for a right answer).
A draw takes n records with replacement; its difference is sum(s'_i) / sum(w_i) - sum(s_i) / sum(w_i), so the figures
stay token-weighted. The interval is that of percentiles (Efron and Tibshirani 1993, section 13.3).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from training.evaluation import thresholds

_ROWS_AT_ONCE = 64


@dataclass(frozen=True)
class Difference:
    """After minus before, with its interval; `probability_higher` is the share of draws above 0, a tie counts half."""

    before: float
    after: float
    difference: float
    low: float
    high: float
    probability_higher: float
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
    return Difference(
        float(first * scale), float(second * scale), float((second - first) * scale), float(low * scale),
        float(high * scale), higher, num_records,
    )  # fmt: skip
