"""Are the probabilities that a model gives its options true? Brier score, calibration error, the fitted temperature.

Of question i with options o and log-probabilities l: p = softmax(l / T). Brier = mean sum_o (p_o - [o is right])^2.
ECE: answers in ten bins by the probability of the likeliest option, sum over bins of the share times |hit rate - mean
probability| (Guo et al. 2017, equation 3). T minimises the mean of -log p(right) (there, section 4.2); the figures at T
are of each half of the questions under the T fitted on the other, so that they are of questions T has not seen.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from training.evaluation import thresholds

_LOWEST, _HIGHEST = 0.05, 100.0
_STEPS = 60


@dataclass(frozen=True)
class Choice:
    """The log-probabilities of one question's options, in nats, and which is right."""

    logprobs: Sequence[float]
    right: int


def measure(choices: Sequence[Choice]) -> dict:
    """`{"brier", "ece", "nats", "temperature", "at_temperature": {"brier", "ece", "nats"}, "bins"}`."""
    halves = choices[::2], choices[1::2]
    fitted = [fit(half) for half in halves]
    crossed = [*_probabilities(halves[0], fitted[1] if halves[1] else 1.0), *_probabilities(halves[1], fitted[0])]
    mixed = [*halves[0], *halves[1]]
    plain = _probabilities(choices, 1.0)
    return {
        **_figures(plain, choices), "temperature": fit(choices), "at_temperature": _figures(crossed, mixed),
        "bins": _bins(plain, choices),
    }  # fmt: skip


def fit(choices: Sequence[Choice]) -> float:
    """The temperature at which the right options are likeliest, by golden section on its logarithm; 1 for none."""
    if not choices:
        return 1.0
    low, high, ratio = np.log(_LOWEST), np.log(_HIGHEST), (np.sqrt(5) - 1) / 2
    for _ in range(_STEPS):
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        lower, upper = (_nats(_probabilities(choices, np.exp(one)), choices) for one in (left, right))
        if lower <= upper:
            high = right
        else:
            low = left
    return float(np.exp((low + high) / 2))


def _probabilities(choices: Sequence[Choice], temperature: float) -> list[np.ndarray]:
    found = []
    for choice in choices:
        scaled = np.asarray(choice.logprobs, np.float64) / temperature
        powers = np.exp(scaled - scaled.max())
        found.append(powers / powers.sum())
    return found


def _nats(shares: list[np.ndarray], choices: Sequence[Choice]) -> float:
    return float(np.mean([-np.log(max(p[one.right], 1e-300)) for p, one in zip(shares, choices, strict=True)]))


def _figures(shares: list[np.ndarray], choices: Sequence[Choice]) -> dict:
    brier = []
    for p, choice in zip(shares, choices, strict=True):
        target = np.zeros(len(p))
        target[choice.right] = 1
        brier.append(float(((p - target) ** 2).sum()))
    bins = _bins(shares, choices)
    total = sum(one["count"] for one in bins)
    ece = sum(one["count"] * abs(one["hit_rate"] - one["mean_probability"]) for one in bins) / total
    return {"brier": float(np.mean(brier)), "ece": float(ece), "nats": _nats(shares, choices)}


def _bins(shares: list[np.ndarray], choices: Sequence[Choice]) -> list[dict]:
    """The bins that hold answers: `{"mean_probability", "hit_rate", "count"}`."""
    number = int(thresholds.BINS.value)
    tops = np.array([p.max() for p in shares])
    hits = np.array([p.argmax() == choice.right for p, choice in zip(shares, choices, strict=True)])
    places = np.minimum((tops * number).astype(int), number - 1)
    return [
        {"mean_probability": float(tops[places == place].mean()), "hit_rate": float(hits[places == place].mean()),
         "count": int((places == place).sum())}
        for place in range(number) if (places == place).any()
    ]  # fmt: skip
