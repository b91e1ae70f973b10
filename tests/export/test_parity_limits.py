"""The limit of a rounded type: a share of what the model tells, and no less than rounding itself may cost."""

import numpy as np
import pytest

from training.core.errors import RunError
from training.export.parity import Comparison, judge

POSITIONS, VOCABULARY = 120, 64


def log_softmax(logits_NV: np.ndarray) -> np.ndarray:
    return (logits_NV - np.log(np.exp(logits_NV).sum(1, keepdims=True))).astype(np.float32)


def comparison(spread: float, error: float) -> Comparison:
    """A model whose positions differ by `spread`, served with logits that are `error` off."""
    generator = np.random.default_rng(0)
    common, own = generator.normal(size=(1, VOCABULARY)), generator.normal(size=(POSITIONS, VOCABULARY))
    noise = generator.normal(size=(POSITIONS, VOCABULARY))
    prefixes = [[0] * (1 + row % 3) for row in range(POSITIONS)]
    logits_NV = common + spread * own
    return Comparison(prefixes, log_softmax(logits_NV), log_softmax(logits_NV + error * noise))


def test_a_model_that_has_hardly_trained_is_not_refused_for_its_rounding():
    figures = judge(comparison(spread=0.01, error=0.005), "Q8_0")
    assert figures["kl_share"] > 0.1 and figures["kl_mean_nats"] < 2e-4 == figures["limits"]["kl_mean_nats"]


@pytest.mark.parametrize("spread", [0.01, 1.0])
def test_a_wrong_model_is_refused_trained_or_not(spread: float):
    with pytest.raises(RunError, match="not the one that was trained"):
        judge(comparison(spread, error=0.5), "Q8_0")


def test_a_trained_model_has_the_limit_of_its_share():
    figures = judge(comparison(spread=1.0, error=0.01), "Q8_0")
    assert 2e-4 < figures["limits"]["kl_mean_nats"] < 0.01
