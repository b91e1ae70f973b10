"""A model sits an exam: each question asked once, each answer kept as it comes, then scored.

Owns the figures of an exam: agreement (right answers by questions, what cannot be read counts as wrong), the collapse
check, and for choices the calibration. Who answers is handed in: PyTorch or a server.
"""

from collections import Counter
from collections.abc import Sequence

from training.core.progress import Progress
from training.evaluation import calibration, thresholds
from training.evaluation.conditions import Identity
from training.evaluation.exam import Exam, Question
from training.evaluation.kept import Partial
from training.evaluation.rendering import Prompts
from training.evaluation.scorers import normalised


def sit(exam: Exam, prompts: Prompts, answerer, identity: Identity, label: str) -> dict:
    """Ask every question that has no answer yet and return `{"score", "answers"}`.

    `answerer` is an `Answerer` of PyTorch or a `ServedAnswerer`.
    """
    partial, by_id = Partial(identity), {question.id: question for question in exam.questions}
    scored = {key: _scored(exam, by_id[key], found) for key, found in partial.answers.items()}
    waiting = [question for question in exam.questions if question.id not in scored]
    ask = _choose if exam.scorer.name == "choice" else _answer
    with Progress(f"exam {exam.name}, {label}", len(exam.questions), "question", done=len(scored)) as progress:
        for found in ask(waiting, prompts, answerer):
            partial.add(found)
            scored[found["id"]] = _scored(exam, by_id[found["id"]], found)
            progress.advance(1, f"agreement {sum(one['right'] for one in scored.values())}/{len(scored)}")
    answers = [scored[question.id] for question in exam.questions]
    return {"score": score(exam, answers), "answers": answers}


def _answer(questions: Sequence[Question], prompts: Prompts, answerer):
    ids = [prompts.ids(question) for question in questions]
    if hasattr(answerer, "require_same_ids"):
        for question, one in zip(questions, ids, strict=True):
            answerer.require_same_ids(question, one)
            yield {"id": question.id, "text": prompts.answer(answerer.answer(one))}
        return
    for number, found in answerer.answers(ids):
        yield {"id": questions[number].id, "text": prompts.answer(found)}


def _choose(questions: Sequence[Question], prompts: Prompts, answerer):
    for question in questions:
        ids = prompts.ids(question)
        if hasattr(answerer, "require_same_ids"):
            answerer.require_same_ids(question, ids)
        nats = answerer.logprobs(ids, prompts.options(question))
        best = max(range(len(nats)), key=nats.__getitem__)
        yield {"id": question.id, "text": question.options[best], "logprobs": [round(one, 6) for one in nats]}


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
    """Whether one answer is given nearly always: `{"collapsed", "answer", "share", "reference_share"}`."""
    said, share = _commonest([normalised(answer["text"]) for answer in answers])
    _, reference_share = _commonest([answer["reference"] for answer in answers])
    most = thresholds.COLLAPSED_SHARE.value
    collapsed = len(answers) >= thresholds.FEWEST_ANSWERS.value and share >= most > reference_share
    return {"collapsed": collapsed, "answer": said[:200], "share": share, "reference_share": reference_share}


def _commonest(texts: list[str]) -> tuple[str, float]:
    text, count = Counter(texts).most_common(1)[0]
    return text, count / len(texts)
