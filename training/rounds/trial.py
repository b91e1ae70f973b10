"""A trial: bare candidates on one exam under one precision; nothing is trained. Each is measured in its own process.

A candidate that cannot be loaded costs itself alone: it is reported with the reason, and the others go on. Candidates
whose scores would not compare are refused before any is measured.
"""

from dataclasses import dataclass

from training.core.errors import RunError
from training.core.log import say
from training.core.report import make_command
from training.evaluation import conditions
from training.evaluation.conditions import Identity
from training.evaluation.kept import EXAM
from training.rounds.steps import StepFailed, options, run_step

_OWN = ("tokenizer", "template")
"""What each candidate has for itself; all else is the same."""


@dataclass(frozen=True)
class Candidate:
    """One candidate's outcome: its score, or why it has none."""

    reference: str
    score: dict | None
    identity: dict | None
    why: str | None = None


def run(references: list[str], exam: str, num_questions: int | None, precision: str) -> list[Candidate]:
    """Measure every candidate and return them, the best first, those without a score last.

    Raises RunError where none could be measured, UserError where two would be measured under other conditions.
    """
    _require_alike(references, exam, num_questions, precision)
    found = [_measured(reference, exam, num_questions, precision) for reference in references]
    scored = [one for one in found if one.score]
    if not scored:
        raise RunError(
            "no candidate could be measured", found="; ".join(f"{one.reference}: {one.why}" for one in found),
            expected="at least one that loads", next_command="make recipe",
        )  # fmt: skip
    return sorted(found, key=lambda one: -1.0 if one.score is None else one.score["agreement"], reverse=True)


def _require_alike(references: list[str], exam: str, num_questions: int | None, precision: str) -> None:
    """Raise UserError where two would be measured under other conditions; one that cannot be loaded is passed over."""
    from training.evaluation import record, subject

    planned: list[tuple[str, Identity]] = []
    for reference in references:
        request = record.Request(
            exam=exam, num_questions=num_questions, precision=_own_precision(reference, precision)
        )  # fmt: skip
        try:
            planned.append((reference, record.Evaluation(subject.find(reference), request).planned[EXAM].identity))
        except Exception:  # whatever is wrong with a candidate, its own process tells it
            continue
    if not planned:
        return
    first = planned[0][1]
    alike = [one for one, identity in planned if not set(conditions.differences(first, identity)) - set(_OWN)]
    asked = options(("--questions", num_questions), ("--precision", precision))
    for _, other in planned[1:]:
        conditions.require_comparable(first, other, _OWN, lambda _: make_command("trial", *alike, *asked, EXAM=exam))


def _own_precision(reference: str, precision: str) -> str | None:
    return None if reference.endswith(".gguf") else precision  # a file has the type that it was written in


def _measured(reference: str, exam: str, num_questions: int | None, precision: str) -> Candidate:
    own = _own_precision(reference, precision)
    asked = options(("--exam", exam), ("--questions", num_questions), ("--precision", own))
    try:
        document, _ = run_step(f"Trial of {reference}", ["evaluate", reference, *asked])
    except StepFailed as failure:
        say(f"{reference} has no score: {failure.found}")
        return Candidate(reference, None, None, failure.found)
    [record] = document["records"]
    return Candidate(reference, record[EXAM], record["identities"][EXAM])
