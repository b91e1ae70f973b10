"""The limit of a rounded type: a share of what the model tells, or of what the base tells where that is more."""

import re

import numpy as np
import pytest

from training.core.errors import RunError
from training.core.paths import REPOSITORY
from training.export import limits
from training.export.parity import Comparison, _information, judge
from training.export.plan import QUANTS

PAGE = REPOSITORY / "docs" / "training" / "export.md"
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
    hardly = comparison(spread=0.01, error=0.005)
    figures = judge(hardly, "Q8_0")
    assert figures["kl_mean_nats"] > 0.1 * _information(hardly.reference_NV)
    assert figures["kl_median_share"] == pytest.approx(
        np.median(hardly.divergence_N) / limits.LEAST_TOLD_NATS, rel=1e-3
    )


@pytest.mark.parametrize("spread", [0.01, 1.0])
def test_a_wrong_model_is_refused_trained_or_not(spread: float):
    with pytest.raises(RunError, match="too far from the one that was trained"):
        judge(comparison(spread, error=0.5), "Q8_0")


def test_a_trained_model_has_the_limit_of_its_share():
    trained = comparison(spread=4.0, error=0.03)
    figures, told_nats = judge(trained, "Q8_0"), _information(trained.reference_NV)
    assert told_nats > limits.LEAST_TOLD_NATS and figures["limits"] == limits.of("Q8_0")
    assert figures["kl_median_share"] == pytest.approx(np.median(trained.divergence_N) / told_nats, rel=1e-3)


@pytest.mark.parametrize("quant", limits.MEASURED)
def test_no_limit_is_more_than_twice_what_was_measured(quant: str):
    seen_each, allowed = limits.MEASURED[quant], limits.of(quant)
    for name in ("kl_median_share", "kl_p90_share"):
        assert allowed[name] <= 2 * max(getattr(seen, name) for seen in seen_each) + 1e-9
    assert 1 - allowed["same_first_choice"] <= 2 * max(1 - seen.same_first_choice for seen in seen_each) + 1e-9


def test_a_figure_that_is_no_number_is_over():
    figures = {"kl_mean_nats": 1.0, "kl_median_share": float("nan"), "kl_p90_share": 0.0, "same_first_choice": 0.5}
    assert limits.exceeded(figures, limits.of("Q8_0")) == ["kl_median_share", "same_first_choice"]


def test_every_type_that_is_exported_has_limits():
    assert {*limits.MEASURED, *limits.NATS} == set(QUANTS)


def test_the_page_and_the_limits_are_of_the_same_measurements():
    """The table of the 135 M base: a divergence over its share is what a position tells, the same for all types."""
    row = r"^\| (\w+) \|[^|]+\| (built-in|docstrings|German) \| ([\d.e-]+) \|[^|]+\|[^|]+\| ([\d.]+) % \|"
    table = {
        (quant, text): (float(nats), float(same)) for quant, text, nats, same in re.findall(row, PAGE.read_text(), re.M)
    }
    assert {quant for quant, _ in table} == set(QUANTS) and len(table) == 3 * len(QUANTS)
    least = []
    for place, text in enumerate(("built-in", "docstrings", "German")):
        seen = {quant: each[place] for quant, each in limits.MEASURED.items()}
        told_nats = [table[quant, text][0] / one.kl_median_share for quant, one in seen.items()]
        assert max(told_nats) <= 1.02 * min(told_nats)
        least.append(min(told_nats))
        for quant, one in seen.items():
            assert table[quant, text][1] == pytest.approx(100 * one.same_first_choice, abs=0.06)
    assert min(least) == pytest.approx(limits.LEAST_TOLD_NATS, rel=0.01)
