"""The figures of a judgement, each against a value by hand."""

import math
from statistics import NormalDist

import numpy as np
import pytest

from training.evaluation import bootstrap, calibration, sitting
from training.evaluation.loss import total
from training.objectives.contract import Score


def test_losses_are_summed_and_never_averaged_over_batches():
    """B81: 8 tokens with 16 nats and 2 with 10 are 2.6 nats a token, and not 3.5."""
    score = total([Score(16.0, 8, 20), Score(10.0, 2, 5)])
    assert score.loss_nats == 2.6
    assert score.bits_per_byte == pytest.approx(26 / math.log(2) / 25)


def test_the_difference_is_that_of_weighted_sums():
    """Two rows of 1 and 3 bytes: (2 + 6) / 4 before, (1 + 3) / 4 after; every draw halves it."""
    found = bootstrap.paired([2, 6], [1, 3], [1, 3])
    assert (found.before, found.after, found.difference) == (2.0, 1.0, -1.0)
    assert found.low == pytest.approx(-1.0) and found.high == pytest.approx(-1.0)
    assert found.probability_higher == 0.0


def test_the_interval_is_that_of_the_normal_approximation():
    """1,000 questions, 100 gained and 60 lost: 0.04, and 1.96 standard errors of sqrt(0.16 - 0.04^2) / sqrt(1000)."""
    before = np.array([0] * 100 + [1] * 60 + [0] * 840)
    after = np.array([1] * 100 + [0] * 60 + [0] * 840)
    found = bootstrap.paired(before, after, np.ones(1000))
    half = 1.96 * math.sqrt((0.16 - 0.04**2) / 1000)
    assert found.difference == pytest.approx(0.04)
    assert found.low == pytest.approx(0.04 - half, abs=0.003) and found.high == pytest.approx(0.04 + half, abs=0.003)
    assert found == bootstrap.paired(before, after, np.ones(1000))
    assert 0.99 < found.probability_higher <= 1


def test_a_tie_is_no_gain():
    found = bootstrap.paired([1, 0, 1], [1, 0, 1], [1, 1, 1])
    assert (found.low, found.high, found.probability_higher) == (0.0, 0.0, 0.5)
    with pytest.raises(ValueError, match="not the same records"):
        bootstrap.paired([1], [1, 0], [1])


def test_so_few_records_are_by_chance_what_they_are():
    """The test of signs against counts by hand: McNemar's exact one for answers, whatever the interval says."""
    for gained, lost, p in ((2, 0, 0.5), (5, 0, 0.0625), (6, 0, 0.03125), (4, 1, 0.375), (0, 0, 1.0), (3, 3, 1.0)):
        before, after = [0] * gained + [1] * lost + [0], [1] * gained + [0] * lost + [0]
        found = bootstrap.paired(before, after, np.ones(len(before)))
        assert found.p_value == p and found.num_differing == gained + lost
    found = bootstrap.paired([0] * 40, [1] * 27 + [0] * 13, np.ones(40))
    assert found.p_value == 1 / 10_000, "of more patterns than are drawn, the observed one counts"
    generator = np.random.default_rng(2)
    many = generator.normal(0.1, 1.0, 60)
    exact = 2 * (1 - NormalDist().cdf(abs(many.sum()) / np.sqrt((many**2).sum())))
    assert bootstrap.paired(np.zeros(60), many, np.ones(60)).p_value == pytest.approx(exact, abs=0.03)


def test_intervals_hold_what_they_promise():
    """Of 200 pairs of equal models the 95 % interval leaves 0 out in about one in twenty."""
    generator, missed = np.random.default_rng(3), 0
    for _ in range(200):
        first, second = generator.random((2, 80)) < 0.4
        found = bootstrap.paired(first, second, np.ones(80))
        missed += found.low > 0 or found.high < 0
    assert 3 <= missed <= 20


def test_calibration_against_a_count_by_hand():
    """Two questions of two options: right at 0.8, wrong at 0.6."""
    choices = [
        calibration.Choice([math.log(0.8), math.log(0.2)], 0), calibration.Choice([math.log(0.6), math.log(0.4)], 1)
    ]  # fmt: skip
    found = calibration.measure(choices)
    assert found["brier"] == pytest.approx(((0.2**2 * 2) + (0.6**2 * 2)) / 2)
    assert found["ece"] == pytest.approx(0.5 * abs(1 - 0.8) + 0.5 * abs(0 - 0.6))
    assert found["nats"] == pytest.approx(-(math.log(0.8) + math.log(0.4)) / 2)
    assert [one["count"] for one in found["bins"]] == [1, 1]


def test_the_temperature_undoes_what_was_multiplied():
    """True probabilities, logarithms three times too large: T is 3, and the calibration error goes."""
    generator, choices = np.random.default_rng(5), []
    for _ in range(3000):
        logits = generator.normal(0, 1.5, 4)
        shares = np.exp(logits) / np.exp(logits).sum()
        choices.append(calibration.Choice(list(np.log(shares) * 3), int(generator.choice(4, p=shares))))
    found = calibration.measure(choices)
    assert found["temperature"] == pytest.approx(3.0, rel=0.1)
    assert found["at_temperature"]["ece"] < 0.04 < found["ece"]
    assert found["at_temperature"]["nats"] < found["nats"]


def answers(texts: list[str], references: list[str]) -> list[dict]:
    return [{"text": one, "read": one, "reference": other} for one, other in zip(texts, references, strict=True)]


def test_one_answer_to_everything_is_a_collapse():
    various = [str(i) for i in range(20)]
    assert sitting.collapse(answers(["4"] * 19 + ["5"], various))["collapsed"]
    assert sitting.collapse(answers([""] * 20, various))["collapsed"], "a model that answers nothing"
    assert not sitting.collapse(answers(["4"] * 20, ["4"] * 20))["collapsed"], "where that is right"
    assert not sitting.collapse(answers(various, various))["collapsed"]
    assert not sitting.collapse(answers(["4"] * 3, various[:3]))["collapsed"], "too few to tell"


def test_a_collapse_is_of_what_was_read_and_not_of_the_words_around_it():
    """Twenty texts that all name one tool are one answer; twenty that cannot be read are what they say."""
    wordy = [{"text": f'{{"tool": "read", "why": "{i}"}}', "read": "read", "reference": f"tool {i}"} for i in range(20)]
    found = sitting.collapse(wordy)
    assert found["collapsed"] and found["answer"] == "read"
    assert not sitting.collapse([one | {"read": None} for one in wordy])["collapsed"]
