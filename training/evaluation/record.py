"""The evaluation record of a model: splits, an exam and a guard set, each measured once and kept by identity.

A measurement is one model on one paper (`kept`); a record puts the measurements of one model together, the split that
is the headline first. All that is asked for is looked at before anything is measured, and the model is loaded when the
first measurement needs it.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

from training.core import files
from training.core.errors import UserError
from training.core.report import make_command
from training.data import dataset as datasets
from training.data.settings import SPLITS
from training.engine.inputs import Inputs
from training.evaluation import conditions, guard, kept, loading, loss, served, sitting, thresholds
from training.evaluation.answering import Answerer
from training.evaluation.conditions import Identity
from training.evaluation.exam import Exam
from training.evaluation.kept import EXAM, GUARD
from training.evaluation.rendering import Prompts
from training.evaluation.subject import CHECKPOINT, GGUF, Subject
from training.objectives import registry
from training.recipe.model import Recipe


@dataclass(frozen=True)
class Request:
    """What to measure. Raises UserError for what is no number of questions.

    Args:
        splits: of the data set; empty for the headline alone.
        exam, guard: an exam's path, `name@hash:split`, for the guard also `drawn` (`guard.is_drawn`); None for none.
        num_questions: the most questions of the exam; None for the document's number.
        recipe: whose data, precision and attention are every model's; None for the model's own.
        config: the recipe's file, where one was named.
        precision: of the weights; None for what the recipe says.
    """

    splits: tuple[str, ...] = ()
    exam: str | None = None
    guard: str | None = None
    num_questions: int | None = None
    recipe: Recipe | None = None
    config: str | None = None
    precision: str | None = None

    def __post_init__(self) -> None:
        if self.num_questions is not None and self.num_questions < 1:
            raise UserError("not a number of questions", where="--questions", found=self.num_questions,
                            expected="1 or more")  # fmt: skip


@dataclass(frozen=True)
class Planned:
    """A measurement that is to be made: of what, by which reference it was asked for, and how it is made."""

    role: str
    reference: str | None
    identity: Identity
    make: Callable[[], dict]


class Evaluation:
    """The measuring of one model."""

    def __init__(self, subject: Subject, request: Request):
        self.subject, self.request = subject, settled(request, [subject])
        self.recipe = self.request.recipe
        self.precision = request.precision or loading.default_precision(self.recipe)
        self.attention = loading.default_attention(self.recipe)

    def run(self) -> dict[str, dict]:
        """Measure what is asked for and return the measurements by their role: a split's name, `exam`, `guard`."""
        try:
            return {role: self._once(one) for role, one in self.planned.items()}
        finally:
            self.__dict__.pop("loaded", None)  # the next model needs the room

    @cached_property
    def planned(self) -> dict[str, Planned]:
        """What is to be measured, by role: exams read, questions rendered, splits there. Raises UserError."""
        found = {split: self._split(split) for split in self._splits()}
        if self.request.exam:
            found[EXAM] = self._exam(EXAM, self.exam, self.request.exam)
        if self.request.guard:
            paper = guard.open_guard(self.request.guard, self._seed)
            found[GUARD] = self._exam(GUARD, paper, self.request.guard)
        if not found:
            raise UserError(
                "nothing says what to measure", where=self.subject.label, found="no split and no exam",
                expected="an exam, or a recipe whose data it is measured on",
                next_command=f"make evaluate CHECKPOINT={self.subject.label} ARGS='--exam my-exam.jsonl'",
            )  # fmt: skip
        return found

    @cached_property
    def exam(self) -> Exam:
        """The exam that is asked for, as many of its questions as are drawn."""
        return guard.open_exam(self.request.exam).drawn(self._num_questions(), self._seed)

    @property
    def _seed(self) -> int:
        return self.recipe.seeds.eval if self.recipe else int(thresholds.BOOTSTRAP_SEED.value)

    @property
    def _date(self) -> str | None:
        """What a template that asks for the day is told."""
        return self.recipe.data.template_date if self.recipe else None

    def _num_questions(self) -> int:
        import torch

        on_gpu = torch.cuda.is_available()
        number = thresholds.QUESTIONS_GPU if on_gpu else thresholds.QUESTIONS_CPU
        return self.request.num_questions or int(number.value)

    # ---- splits

    def _splits(self) -> tuple[str, ...]:
        if self.subject.form == GGUF or self.recipe is None:
            if self.request.splits:
                raise self._no_loss(self.request.splits[0])
            return ()
        if self.request.splits:  # the headline is first whatever order was typed, the train split last
            order = (*thresholds.HEADLINE_SPLITS, *SPLITS)
            return tuple(sorted(set(self.request.splits), key=order.index))
        there = [split for split in thresholds.HEADLINE_SPLITS if split in self._dataset.splits]
        return tuple(there[:1])

    def _no_loss(self, split: str) -> UserError:
        """What is said where --split asks for the loss of a model that has none, or no data of its own."""
        label, paper = self.subject.label, self.request.exam or "my-exam.jsonl"
        found = "no recipe, which would say on whose data"
        expected = "--config RECIPE, of whose data set it is a split; a data set's split as an exam is name@hash:split"
        if self.subject.form == GGUF:
            found = "a GGUF file, whose server tells no log-probabilities of a text it is given"
            expected = "the checkpoint that it was made of, or an exam alone"
        return UserError(
            "--split asks for a loss, and none is measured of it", where=label, found=found, expected=expected,
            next_command=make_command("evaluate", "--exam", guard.of_split(paper, split), CHECKPOINT=label),
        )  # fmt: skip

    @cached_property
    def _dataset(self) -> datasets.Dataset:
        return datasets.load(datasets.resolve(self.recipe.data.dataset))

    @cached_property
    def inputs(self) -> Inputs:
        """The data set as this model's own tokens."""
        method, tokenizer = registry.of(self.recipe.method), self.subject.tokenizer
        method.require_dataset(self.recipe, self._dataset)
        return Inputs(self._dataset, tokenizer, method.prepare(self.recipe, self._dataset, tokenizer))

    def _split(self, split: str) -> Planned:
        self._dataset.path(split)
        data = self.recipe.data
        paper = {
            "kind": "split", "dataset": self._dataset.hash, "split": split, "loss_on": data.loss_on,
            "seq_len": data.seq_len, "overlong": data.overlong, "on_error": data.on_error,
            "template_date": data.template_date,
        }  # fmt: skip
        identity = Identity(self.subject.identity(), paper, self._pytorch())

        def make() -> dict:
            rows = loss.rows_of(self.inputs, split, self.recipe)
            measured = loss.measured(self.loaded, rows, f"evaluate {self.subject.label} on {split}")
            return measured | {"left_out": loss.left_out(self.inputs, split)}

        return Planned(split, None, identity, make)

    # ---- exams

    def _exam(self, role: str, paper: Exam, reference: str) -> Planned:
        prompts = Prompts(self.subject.tokenizer, self._date)
        asked, most = prompts.asked(paper.questions), paper.max_answer_tokens
        if self.subject.form == GGUF:
            server = served.arguments(self.subject, max(one.num_tokens for one in asked), most)
            under = conditions.served(self.subject.tokenizer, self._date, self.subject.quant_type, server)
            answering = partial(served.answering, self.subject, server, prompts, asked, most)
        else:
            under, answering = self._pytorch(), partial(self._answering, prompts, most)
        identity = Identity(self.subject.identity(), paper.identity(), under)

        def make() -> dict:
            with answering() as answerer:
                return sitting.sit(paper, asked, prompts, answerer, identity, f"{self.subject.label} ({role})")

        return Planned(role, reference, identity, make)

    @contextlib.contextmanager
    def _answering(self, prompts: Prompts, max_answer_tokens: int) -> Iterator[Answerer]:
        yield Answerer(self.loaded, prompts.stop_ids, max_answer_tokens)

    # ---- both

    def _pytorch(self) -> dict:
        import torch

        kind = "cuda" if torch.cuda.is_available() else "cpu"
        return conditions.pytorch(self.subject.tokenizer, self._date, self.precision, self.attention, kind)

    @cached_property
    def loaded(self) -> loading.Loaded:
        return loading.load(self.subject, self.precision, self.attention)

    def _once(self, planned: Planned) -> dict:
        """The kept measurement of an identity, else a new one, which is kept; it is kept how it was asked for."""
        found = kept.find(planned.identity)
        body = found or {"subject": self.subject.to_json(), **planned.make()}
        places = _absolute(planned.reference), _absolute(self.request.config)
        return kept.write(planned.identity, body, planned.role, *places) | {"reused": found is not None}


def _absolute(reference: str | None) -> str | None:
    """An exam's or a recipe's reference that means the same from any folder."""
    return str(Path(reference).absolute()) if reference and Path(reference).exists() else reference


def record(evaluation: Evaluation, measured: dict[str, dict]) -> dict:
    """Put one model's measurements together; kept in the run's `eval/` where the model is a run's."""
    subject = evaluation.subject
    splits = {role: one["score"] for role, one in measured.items() if role not in (EXAM, GUARD)}
    document = {
        "schema": 2, "kind": "evaluation", "model": subject.to_json(), "step": subject.origin.get("step"),
        "splits": splits, "score": next(iter(splits.values()), None),
        **{role: measured[role]["score"] if role in measured else None for role in (EXAM, GUARD)},
        "unigram": _unigram(evaluation, splits), "identities": {
            role: {"sha256": files.sha256_json(one["identity"]), **one["identity"]} for role, one in measured.items()
        },
        "left_out": {role: one["left_out"] for role, one in measured.items() if one.get("left_out")},
    }  # fmt: skip
    if subject.run is not None:
        files.write_json(subject.run / "eval" / f"{subject.path.name}.json", document)
    return document | {"reused": all(one["reused"] for one in measured.values())}


def _unigram(evaluation: Evaluation, splits: dict) -> dict | None:
    if evaluation.subject.form != CHECKPOINT or not splits:
        return None
    return loss.unigram_score(evaluation.inputs, next(iter(splits))).to_json()


def recipe_of(subjects: list[Subject]) -> Recipe | None:
    """The recipe of the first checkpoint among models, on the very data that it was trained on: all are measured so."""
    for one in subjects:
        if one.resolved:
            recipe = one.resolved.recipe
            return replace(recipe, data=replace(recipe.data, dataset=one.dataset or recipe.data.dataset))
    return None


def settled(request: Request, subjects: list[Subject]) -> Request:
    """The request with what is decided once for all models: whose recipe counts, and what a drawn guard set leaves out.

    That is what the recipe's data hold, or without a recipe those of the first model's manifest.
    """
    recipe = request.recipe or recipe_of(subjects)
    trained = [recipe and recipe.data.dataset, *(one.dataset for one in subjects)]
    asked = request.guard and guard.leaving_out(request.guard, next(filter(None, trained), None))
    return replace(request, recipe=recipe, guard=asked)


def measure(evaluation: Evaluation) -> tuple[dict, dict[str, dict]]:
    """Measure one model; returns its record and its measurements by role."""
    measured = evaluation.run()
    return record(evaluation, measured), measured
