"""A trial: bare candidates on one exam under one precision; nothing is trained. Each is measured in its own process.

A candidate that cannot be loaded costs itself alone: it is reported with the reason, and the others go on. Candidates
whose scores would not compare are refused before any is measured.
"""

from dataclasses import dataclass

from training.core.errors import RunError
from training.core.log import say
from training.evaluation import conditions
from training.evaluation.kept import EXAM
from training.rounds.steps import StepFailed, options, run_step


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
            expected="at least one that loads", next_command="make base-fetch BASE=name fetches a base",
        )  # fmt: skip
    return sorted(found, key=lambda one: -1.0 if one.score is None else one.score["agreement"], reverse=True)


def _require_alike(references: list[str], exam: str, num_questions: int | None, precision: str) -> None:
    """Raise UserError where two would be measured under other conditions; one that cannot be loaded is passed over."""
    from training.evaluation import record, subject

    planned = []
    for reference in references:
        request = record.Request(
            exam=exam, num_questions=num_questions, precision=_own_precision(reference, precision)
        )  # fmt: skip
        try:
            planned.append(record.Evaluation(subject.find(reference), request).planned[EXAM].identity)
        except Exception:  # whatever is wrong with a candidate, its own process tells it
            continue
    for other in planned[1:]:  # each has a tokenizer of its own; everything else is the same
        conditions.require_comparable(planned[0], other, ("tokenizer", "template"), _alone)


def _alone(names: str) -> str:
    return f"make trial with the candidates alone that have the same {names.replace(',', ', ')}"


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
