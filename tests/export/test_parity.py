"""The judgement of log-probabilities on arrays with known answers."""

import numpy as np
import pytest

from training.core.errors import RunError
from training.export import parity
from training.export.parity import Comparison
from training.export.probes import Prompt

N, V = 40, 64


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    return (logits - np.log(np.exp(logits).sum(1, keepdims=True))).astype(np.float32)


def _comparison(change=lambda logits: logits, lengths=None) -> Comparison:
    logits = np.random.default_rng(3).normal(0, 2, (N, V))
    prefixes = [[1] * length for length in (lengths or [1] * 4 + [5] * (N - 4))]
    return Comparison(prefixes, _log_softmax(logits), _log_softmax(change(logits.copy())))


def test_equal_sides_have_no_gap():
    figures = parity.judge(_comparison(), "F16")
    assert figures["max_nats"] == figures["median_nats"] == figures["kl_mean_nats"] == 0.0
    assert figures["positions"] == N and figures["same_first_choice"] == 1.0
    assert figures["kl_over"] == "the whole vocabulary"
    assert figures["limits"] == {"p90_nats": 0.025, "median_nats": 0.005}


def test_gap_and_divergence_have_the_values_of_their_definitions():
    reference = np.log(np.array([[0.5, 0.25, 0.125, 0.0625, 0.0625]] * 2, np.float32))
    served = np.log(np.array([[0.25, 0.5, 0.125, 0.0625, 0.0625]] * 2, np.float32))
    comparison = Comparison([[1], [1, 2]], reference, served)
    assert comparison.gaps_N5.max() == pytest.approx(np.log(2), rel=1e-6)
    assert comparison.divergence_N == pytest.approx([0.25 * np.log(2)] * 2, rel=1e-6)


def test_tokens_not_asked_for_count_as_one():
    reference = np.log(np.array([[0.6, 0.2, 0.1, 0.1]], np.float32))
    served = np.log(np.array([[0.5, 0.3, 0.1, 0.1]], np.float32))
    served[0, 2:] = np.nan
    expected = 0.6 * np.log(0.6 / 0.5) + 0.2 * np.log(0.2 / 0.3) + 0.2 * np.log(0.2 / 0.2)
    assert Comparison([[1]], reference, served).divergence_N == pytest.approx([expected], rel=1e-5)


@pytest.mark.parametrize(("left_nats", "seen"), [(4e-8, False), (1e-3, True)])
def test_what_the_servers_own_sum_cannot_tell_is_no_divergence(left_nats: float, seen: bool):
    """Its log-probabilities are of a sum in float32: all of them may be the same little too high."""
    reference = np.log(np.array([[0.9, 0.0999, 5e-5, 5e-5]], np.float32))
    served = reference + np.float32(left_nats)
    served[0, 2:] = np.nan
    divergence = Comparison([[1]], reference, served).divergence_N[0]
    assert (divergence > 1e-4) == seen and (divergence < 1e-9) != seen


def test_a_position_in_twenty_may_be_off_in_f16_and_in_f32_none():
    """F16's kernels round what they multiply, and after a few odd tokens that is very large."""

    def spoiled(num_rows: int) -> Comparison:
        def spoil(logits: np.ndarray) -> np.ndarray:
            for row in logits[4 : 4 + num_rows]:
                row[row.argmax()] += 0.2
            return logits

        return _comparison(spoil)

    assert parity.judge(spoiled(N // 20), "F16")["max_nats"] > 0.05
    with pytest.raises(RunError, match="not the one that was trained"):
        parity.judge(spoiled(1), "F32")
    with pytest.raises(RunError) as failure:
        parity.judge(spoiled(N // 5), "F16")
    assert "p90_nats" in failure.value.expected


def test_one_position_over_the_limit_fails_and_is_named():
    def spoil(logits: np.ndarray) -> np.ndarray:
        logits[17, logits[17].argmax()] += 0.2
        return logits

    with pytest.raises(RunError) as failure:
        parity.judge(_comparison(spoil, lengths=[1] * 4 + list(range(2, N - 2))), "F32")
    assert "max_nats" in failure.value.found and "the 15 ids" in failure.value.where
    assert failure.value.exit_code == 4


def test_a_small_shift_everywhere_fails_by_the_median():
    draw = np.random.default_rng(5)
    with pytest.raises(RunError, match="is not the one") as failure:
        parity.judge(_comparison(lambda logits: logits + draw.normal(0, 0.009, logits.shape)), "F16")
    assert "median_nats" in failure.value.found and "max_nats" not in failure.value.expected


def test_a_token_the_server_did_not_list_is_as_far_as_can_be():
    comparison = _comparison()
    comparison.served_NV[0, comparison.reference_NV[0].argmax()] = np.nan
    with pytest.raises(RunError):
        parity.judge(comparison, "F32")


def test_quantised_types_may_round_but_not_break():
    draw = np.random.default_rng(5)
    noise = draw.normal(0, 0.05, (N, V))
    figures = parity.judge(_comparison(lambda logits: logits + noise), "Q8_0")
    assert 0 < figures["kl_median_share"] < 0.01 and figures["kl_p99_nats"] >= figures["kl_mean_nats"] > 0
    with pytest.raises(RunError):
        parity.judge(_comparison(lambda logits: logits + 10 * noise), "Q8_0")


@pytest.mark.parametrize(("quant", "instead"), [("F32", None), ("F16", "F32"), ("BF16", "F32"), ("Q8_0", "F16")])
def test_a_type_that_rounds_names_the_one_that_rounds_less(quant: str, instead: str | None):
    noise = np.random.default_rng(5).normal(0, 0.5, (N, V))
    with pytest.raises(RunError) as failure:
        parity.judge(_comparison(lambda logits: logits + noise), quant)
    assert ("rounding where its F32 is right" in failure.value.found) == (instead is not None)
    assert (failure.value.next_command or "None").endswith(str(instead))


@pytest.mark.parametrize(
    ("rows", "cause"), [(slice(0, N), "weights of a layer"), (slice(4, N), "query and key rows")], ids=["all", "longer"]
)
def test_the_likely_cause_is_read_off_the_single_tokens(rows: slice, cause: str):
    def spoil(logits: np.ndarray) -> np.ndarray:
        logits[rows] += np.random.default_rng(9).normal(0, 1, logits[rows].shape)
        return logits

    with pytest.raises(RunError) as failure:
        parity.judge(_comparison(spoil), "F32")
    assert cause in failure.value.found


def test_a_token_that_is_gone_hides_no_cause():
    """As a zeroed layer of the 135 M base does: all positions differ, and a few have lost their likeliest token."""

    def spoil(logits: np.ndarray) -> np.ndarray:
        logits += np.random.default_rng(9).normal(0, 1, logits.shape)
        return logits

    comparison = _comparison(spoil)
    comparison.served_NV[20, comparison.reference_NV[20].argmax()] = np.nan
    assert comparison.gaps_N5.max() > 80
    with pytest.raises(RunError, match="not the one that was trained") as failure:
        parity.judge(comparison, "F16")
    assert "the weights of a layer" in failure.value.found


def test_what_has_no_digits_in_the_servers_float32_is_no_gap():
    """A model trained to be certain: behind its first choice it tells log-probabilities that the server has as zero."""

    def certain(logits: np.ndarray) -> np.ndarray:
        return 60 * logits

    comparison = _comparison(certain)
    certain_NV = comparison.served_NV.copy()
    assert np.sort(certain_NV, axis=1)[:, -5].min() < -120
    served_NV = np.maximum(certain_NV, parity._LEAST_LOGPROB)
    assert parity.judge(Comparison(comparison.prefixes, certain_NV, served_NV), "F32")["max_nats"] == 0.0
    with pytest.raises(RunError, match="not the one that was trained"):
        parity.judge(Comparison(comparison.prefixes, certain_NV, served_NV[:, ::-1]), "F32")


def test_the_server_is_asked_for_every_prefix_once():
    asked = []

    class Server:
        def top_logprobs(self, prefix: list[int], top: int, *, reuse: bool) -> list[tuple[int, float]]:
            asked.append((list(prefix), top))
            return [(0, -1.0), (1, -3.4e38)]

    reference = np.zeros((3, 6), np.float32)
    found = parity.compare(Server(), [Prompt([5, 6, 7], [2, 3]), Prompt([8], [1])], reference)
    assert asked == [([5, 6], 6), ([5, 6, 7], 6), ([8], 6)]
    assert found.served_NV[0, 0] == -1.0 and found.served_NV[0, 1] == -87.0 and np.isnan(found.served_NV[0, 2])
