"""A model sits an exam: each question asked once, each answer kept as it comes, then scored.

Owns the figures of an exam: agreement (right answers by questions, what cannot be read counts as wrong), the collapse
check, and for choices the calibration. Who answers is handed in: PyTorch or a server.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from training.core.errors import RunError, UserError
from training.core.progress import Progress
from training.evaluation import calibration, thresholds
from training.evaluation.conditions import Identity
from training.evaluation.exam import Exam, Question
from training.evaluation.kept import Partial
from training.evaluation.rendering import Asked, Prompts
from training.evaluation.scorers import normalised


def sit(exam: Exam, asked: Sequence[Asked], prompts: Prompts, answerer, identity: Identity, label: str) -> dict:
    """Ask every question that has no answer yet and return `{"score", "answers", "left_out"}`.

    Args:
        asked: the exam's questions as ids, in their order.
        answerer: an `Answerer` of PyTorch or a `ServedAnswerer`.

    Raises UserError where a choice does not fit into the model's context, RunError where its log-probabilities are no
    numbers.
    """
    partial, by_id = Partial(identity), {question.id: question for question in exam.questions}
    scored = {key: _scored(exam, by_id[key], found) for key, found in partial.answers.items()}
    waiting = [one for one in asked if one.question.id not in scored]
    ask = _choose if exam.scorer.name == "choice" else _answer
    with Progress(f"exam {exam.name}, {label}", len(exam.questions), "question", done=len(scored)) as progress:
        for found in ask(waiting, prompts, answerer):
            partial.add(found)
            scored[found["id"]] = _scored(exam, by_id[found["id"]], found)
            progress.advance(1, f"agreement {sum(one['right'] for one in scored.values())}/{len(scored)}")
    answers = [scored[question.id] for question in exam.questions]
    return {"score": score(exam, answers), "answers": answers, "left_out": exam.left_out}


def _answer(asked: Sequence[Asked], prompts: Prompts, answerer) -> Iterator[dict]:
    for number, found in answerer.answers([one.ids for one in asked]):
        yield {"id": asked[number].question.id, "text": prompts.answer(found)}


def _choose(asked: Sequence[Asked], _: Prompts, answerer) -> Iterator[dict]:
    if too_long := [one for one in asked if one.num_tokens > answerer.context_tokens]:
        raise UserError(
            "a choice does not fit into the model's context", where=f"question {too_long[0].question.id}",
            found=f"{too_long[0].num_tokens} tokens with its longest option; {len(too_long)} such questions",
            expected=f"at most {answerer.context_tokens} tokens",
        )  # fmt: skip
    for one in asked:
        nats, question = answerer.logprobs(one.ids, one.options), one.question
        if not all(map(math.isfinite, nats)):
            raise RunError("the model gives no probabilities", where=f"question {question.id}", found=f"{nats}",
                           expected="numbers; its weights have diverged")  # fmt: skip
        best = max(range(len(nats)), key=nats.__getitem__)
        yield {"id": question.id, "text": question.options[best], "logprobs": [round(nat, 6) for nat in nats]}


def _scored(exam: Exam, question: Question, found: dict) -> dict:
    reference, read = exam.scorer.reference(question.answer), exam.scorer.read(found["text"])
    kept = {"id": question.id, "question": question.text, "reference": reference, "text": found["text"], "read": read}
    if "logprobs" in found:
        kept |= {"logprobs": found["logprobs"], "options": list(question.options)}
    return kept | {"right": read == reference}


def score(exam: Exam, answers: list[dict]) -> dict:
    """The figures of an exam's scored answers."""
    right = sum(answer["right"] for answer in answers)
    figures = {
        "agreement": right / len(answers), "num_right": right, "num_questions": len(answers),
        "num_unread": sum(answer["read"] is None for answer in answers), "collapse": collapse(answers),
    }  # fmt: skip
    if exam.scorer.name == "choice":
        right_places = [answer["options"].index(_as_option(answer)) for answer in answers]
        choices = [calibration.Choice(one["logprobs"], at) for one, at in zip(answers, right_places, strict=True)]
        figures["calibration"] = calibration.measure(choices)
    return figures


def _as_option(answer: dict) -> str:
    """The option that is right, as it is written."""
    return next(option for option in answer["options"] if normalised(option) == answer["reference"])


def collapse(answers: Sequence[dict]) -> dict:
    """Whether one answer is given nearly always: `{"collapsed", "answer", "share", "reference_share"}`.

    An answer is what the scorer read; where it could read nothing, the text.
    """
    said, share = _commonest([answer["read"] or normalised(answer["text"]) for answer in answers])
    _, reference_share = _commonest([answer["reference"] for answer in answers])
    most = thresholds.COLLAPSED_SHARE.value
    collapsed = len(answers) >= thresholds.FEWEST_ANSWERS.value and share >= most > reference_share
    return {"collapsed": collapsed, "answer": said[:200], "share": share, "reference_share": reference_share}


def _commonest(texts: list[str]) -> tuple[str, float]:
    text, count = Counter(texts).most_common(1)[0]
    return text, count / len(texts)
