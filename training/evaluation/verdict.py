"""Better, same, worse or forgot: two models' measurements on the same papers, judged by `thresholds` alone.

The headline decides: the exam where there is one, else the bits per byte of the first split. Its whole interval above
`BETTER_ABOVE` is better, below it worse, else the same; the same too where so few records differ that chance explains
it (`bootstrap`). An exam that is the same is worse where a split's loss is: an exam that nobody passes hides what was
lost. A collapse is worse whatever the figures say. Forgot is a guard set that lost more than it may, beyond its
interval alone (a false alarm costs a look, a miss the model), where the headline is not worse.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from training.core.errors import UserError
from training.evaluation import bootstrap, conditions, thresholds
from training.evaluation.conditions import Advice, Identity, with_allow
from training.evaluation.kept import EXAM, GUARD

BETTER, SAME, WORSE, FORGOT = "better", "same", "worse", "forgot"
_BITS = 1 / np.log(2)


@dataclass(frozen=True)
class Comparison:
    """One paper's two measurements: figures, which answers flipped, and what of the conditions differs.

    `improvement` is positive where the second model is better, whatever the metric.
    """

    role: str
    metric: str
    before: float
    after: float
    improvement: float
    low: float
    high: float
    probability_better: float
    p_value: float
    num_differing: int
    num_records: int
    differing: tuple[str, ...]
    gained: tuple[dict, ...] = ()
    lost: tuple[dict, ...] = ()

    def to_json(self) -> dict:
        return {**self.__dict__, "differing": list(self.differing), "gained": list(self.gained),
                "lost": list(self.lost)}  # fmt: skip

    def text(self) -> str:
        """The figures for people: `agreement 0.0200 -> 0.3100, better by +0.2900 (+0.2200 to +0.3600), ...`."""
        return (
            f"{self.metric} {self.before:.4f} -> {self.after:.4f}, better by {self.improvement:+z.4f} "
            f"({self.low:+z.4f} to {self.high:+z.4f}), probability {self.probability_better:.3f}, "
            f"p {self.p_value:.4f}, {self.records}"
        )

    @property
    def records(self) -> str:
        """What it rests on, for people: `40 questions`."""
        return f"{self.num_records} {'questions' if self.metric == 'agreement' else 'rows'}"


@dataclass(frozen=True)
class Judgement:
    """The verdict and everything that it rests on."""

    verdict: str
    reasons: tuple[str, ...]
    headline: str
    comparisons: tuple[Comparison, ...]
    collapse: dict | None

    @property
    def is_win(self) -> bool:
        return self.verdict == BETTER

    @property
    def marked(self) -> tuple[str, ...]:
        """What of the conditions was allowed to differ, by name."""
        return tuple(sorted({name for one in self.comparisons for name in one.differing}))

    def of(self, role: str) -> Comparison | None:
        return next((one for one in self.comparisons if one.role == role), None)

    def to_json(self) -> dict:
        return {
            "verdict": self.verdict, "reasons": list(self.reasons), "headline": self.headline,
            "allowed_to_differ": list(self.marked), "comparisons": [one.to_json() for one in self.comparisons],
            "collapse": self.collapse,
            "confidence": thresholds.CONFIDENCE.value, "draws": int(thresholds.DRAWS.value),
            "seed": int(thresholds.BOOTSTRAP_SEED.value),
        }  # fmt: skip


def judge(
    before: Mapping[str, dict], after: Mapping[str, dict], allowed: Collection[str] = (), advice: Advice = with_allow
) -> Judgement:
    """Judge a second model against a first by their measurements by role.

    Raises UserError where they share no paper, or were measured under other conditions than `allowed` names.
    """
    differing = require_comparable(_identities(before), _identities(after), allowed, advice)
    comparisons = tuple(_compared(role, before[role], after[role], names) for role, names in differing.items())
    headline = EXAM if EXAM in differing else next(role for role in differing if role != GUARD)
    collapse = after[EXAM]["score"]["collapse"] if EXAM in differing else None
    verdict, reasons = _decide({one.role: one for one in comparisons}, headline, collapse)
    return Judgement(verdict, tuple(reasons), headline, comparisons, collapse)


def require_comparable(
    before: Mapping[str, Identity],
    after: Mapping[str, Identity],
    allowed: Collection[str] = (),
    advice: Advice = with_allow,
) -> dict[str, tuple[str, ...]]:
    """What of the conditions differs and is allowed, by the roles that both models have.

    It can be asked before anything is measured. Raises UserError where they share no paper, or anything else differs.
    """
    roles = [role for role in after if role in before]
    if not set(roles) - {GUARD}:
        raise UserError(
            "the two have no measurement in common", found=", ".join(after) or "none", expected=", ".join(before),
            next_command="make evaluate CHECKPOINT=latest ARGS='--exam my-exam.jsonl --against smollm2-135m-instruct'",
        )  # fmt: skip
    return {role: tuple(conditions.require_comparable(before[role], after[role], allowed, advice)) for role in roles}


def _identities(measured: Mapping[str, dict]) -> dict[str, Identity]:
    return {role: Identity.from_json(one["identity"]) for role, one in measured.items()}


def _compared(role: str, before: dict, after: dict, differing: tuple[str, ...]) -> Comparison:
    if before["identity"]["paper"]["kind"] == "exam":
        return _of_answers(role, before["answers"], after["answers"], differing)
    return _of_rows(role, before["rows"], after["rows"], differing)


def _of_answers(role: str, before: list[dict], after: list[dict], differing: tuple[str, ...]) -> Comparison:
    found = bootstrap.paired([one["right"] for one in before], [one["right"] for one in after], [1.0] * len(before))
    pairs = list(zip(before, after, strict=True))
    flips = [[_flip(one, other) for one, other in pairs if other["right"] == gain and one["right"] != gain]
             for gain in (True, False)]  # fmt: skip
    return Comparison(
        role, "agreement", found.before, found.after, found.difference, found.low, found.high,
        found.probability_higher, found.p_value, found.num_differing, found.num_records, differing, tuple(flips[0]),
        tuple(flips[1]),
    )  # fmt: skip


def _flip(before: dict, after: dict) -> dict:
    kept = {key: after[key] for key in ("id", "question", "reference")}
    return kept | {"before": before["text"], "after": after["text"]}


def _of_rows(role: str, before: list, after: list, differing: tuple[str, ...]) -> Comparison:
    """Bits per byte of the same rows, or nats a token where the labels stand for no text."""
    sums = [np.array(rows, np.float64) for rows in (before, after)]
    in_bytes = all(rows[:, 2].sum() > 0 for rows in sums)
    metric, column, scale = ("bits/byte", 2, _BITS) if in_bytes else ("nats/token", 1, 1.0)
    if sums[0].shape != sums[1].shape or (sums[0][:, column] != sums[1][:, column]).any():
        raise UserError(
            "the two have other texts in their rows, so no difference can be judged", where=role,
            found="another tokenizer cuts the split into other rows",
            expected="one tokenizer; `make evaluate` of both without --against shows their bits per byte",
        )  # fmt: skip
    found = bootstrap.paired(sums[0][:, 0], sums[1][:, 0], sums[0][:, column], scale)
    return Comparison(
        role, metric, found.before, found.after, -found.difference, -found.high, -found.low,
        1 - found.probability_higher, found.p_value, found.num_differing, found.num_records, differing,
    )  # fmt: skip


def _decide(found: dict[str, Comparison], headline: str, collapse: dict | None) -> tuple[str, list[str]]:
    main = found[headline]
    verdict = _direction(main)
    interval = f"{main.low:+z.4f} to {main.high:+z.4f}, p {main.p_value:.4f}"
    reasons = [f"{headline}: {main.metric} is {verdict}, the interval of the gain is {interval}"]
    reasons += [told for one in found.values() if (told := _too_few(one, verdict == SAME and one is main))]
    lost = [one for role, one in found.items() if role not in (headline, GUARD) and _direction(one) == WORSE]
    if verdict == SAME and lost:
        verdict = WORSE
        reasons += [
            f"{one.role}: {one.metric} is worse, {one.before:.4f} before and {one.after:.4f} after" for one in lost
        ]
    if collapse and collapse["collapsed"]:
        share = f"{100 * collapse['share']:.0f} %"
        reasons.append(f"collapsed: {share} of the answers are {collapse['answer'][:40]!r}")
        return WORSE, reasons
    guard = found.get(GUARD)
    if guard is not None and _forgot(guard):
        reasons.append(f"forgot: the guard set's {guard.metric} fell from {guard.before:.4f} to {guard.after:.4f}")
        return (WORSE if verdict == WORSE else FORGOT), reasons
    return verdict, reasons


def _direction(one: Comparison) -> str:
    """Better or worse where the whole interval says so and chance does not explain it, else the same."""
    if one.p_value > 1 - thresholds.CONFIDENCE.value:
        return SAME
    least = thresholds.BETTER_ABOVE.value
    return BETTER if one.low > least else WORSE if one.high < -least else SAME


def _too_few(one: Comparison, is_same: bool) -> str | None:
    """What so many records cannot show, in a line; None where that is nothing worth a word.

    Even where each record that differs says the same, p is 2^(1 - k) of k of them.
    """
    fewest = math.ceil(1 - math.log2(1 - thresholds.CONFIDENCE.value))
    if one.num_records < fewest:
        return f"{one.role}: {one.records} are too few to show any difference; at least {fewest} must differ"
    if is_same and one.metric == "agreement":
        return f"{one.role}: {one.records} show no gain below {fewest / one.num_records:.3f}"
    return None


def _forgot(guard: Comparison) -> bool:
    limit = thresholds.FORGOTTEN_SHARE.value
    if guard.metric != "agreement":
        limit = thresholds.FORGOTTEN_BITS.value * guard.before
    return guard.improvement < -limit and guard.high < 0
