"""An exam: questions with right answers, and how an answer is read. Strict: everything wrong is told at once.

A folder with `exam.json` (settings) and `questions.jsonl`, or one JSONL file whose first line may be
`{"exam": {settings}}`. Settings: `name`, `scorer`, `field`, `pattern`, `max_answer_tokens`. A question has `question`
(a text), `messages`, or `prompt` (a text that is read as it stands), an `answer`, and if need be `options`, `id`,
`group`. A data set's split is an exam too: what its records' last answers say (`of_split`).
"""

import dataclasses
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from training.core import files
from training.core.errors import Problems, TrainyardError, UserError
from training.data import dataset as datasets
from training.data.conversation import of_record
from training.evaluation import scorers, thresholds

SETTINGS, QUESTIONS = "exam.json", "questions.jsonl"
_EXAMPLE = "make evaluate CHECKPOINT=latest ARGS='--exam my-exam.jsonl'"
_QUESTION_KEYS = {"id", "question", "messages", "prompt", "answer", "options", "group"}


@dataclass(frozen=True)
class Question:
    """One question: a conversation up to its answer, or a text that is read as it stands."""

    id: str
    messages: tuple[dict, ...] | None
    prompt: str | None
    answer: str
    options: tuple[str, ...] = ()
    group: str | None = None
    tools: tuple[dict, ...] | None = None

    @property
    def text(self) -> str:
        """The question for people: its last words."""
        return self.prompt if self.messages is None else str(self.messages[-1].get("content") or "")

    def to_json(self) -> dict:
        return {key: value for key, value in dataclasses.asdict(self).items() if value}


@dataclass(frozen=True)
class Exam:
    """Questions in their order, and how they are scored; `left_out` counts the records that are none, by reason."""

    name: str
    scorer: scorers.Scorer
    max_answer_tokens: int
    questions: tuple[Question, ...]
    left_out: dict[str, int] = dataclasses.field(default_factory=dict)

    @cached_property
    def sha256(self) -> str:
        """Of the questions alone; what else decides a score stands beside it in `identity`."""
        return files.sha256_json([question.to_json() for question in self.questions])

    def identity(self) -> dict:
        """What a score on it depends on: questions, scorer, and the most tokens of an answer."""
        return {
            "kind": "exam", "name": self.name, "sha256": self.sha256, "num_questions": len(self.questions),
            "scorer": self.scorer.identity(), "max_answer_tokens": self.max_answer_tokens,
        }  # fmt: skip

    def drawn(self, count: int, seed: int) -> "Exam":
        """A seeded draw of so many questions, in their order; the same seed draws the same ones."""
        if count >= len(self.questions):
            return self
        kept = sorted(random.Random(seed).sample(range(len(self.questions)), count))
        return dataclasses.replace(self, questions=tuple(self.questions[index] for index in kept))


def read(path: Path) -> Exam:
    """Read an exam from a folder or a file. Raises Problems with every question that is wrong."""
    if not path.exists():
        raise UserError("no such exam", where=path, found="nothing", expected="a folder or a JSONL file",
                        next_command=_EXAMPLE)  # fmt: skip
    is_folder = path.is_dir()
    questions = path / QUESTIONS if is_folder else path
    if not questions.is_file():
        raise UserError("an exam without questions", where=path, found=f"no {QUESTIONS}", expected=f"a {QUESTIONS}")
    lines = list(_lines(questions))
    settings = _settings_of(path / SETTINGS) if is_folder and (path / SETTINGS).is_file() else {}
    if not is_folder and lines and isinstance(lines[0][1], dict) and set(lines[0][1]) == {"exam"}:
        settings = lines.pop(0)[1]["exam"]
    return _build(settings, lines, questions, path.stem)


def _settings_of(path: Path) -> object:
    try:
        return files.parse_json(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UserError("an exam's settings are no JSON", where=path, found=error, next_command=_EXAMPLE) from error


def _lines(path: Path) -> Iterator[tuple[int, object]]:
    """Each line's number and value; what is no JSON is handed on as the error that says so."""
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if line.strip():
            try:
                value = files.parse_json(line)
                files.canonical_json(value)  # half of a surrogate pair has no UTF-8
                yield number, value
            except (ValueError, RecursionError) as error:
                yield number, UserError("not JSON", where=f"{path} line {number}", found=error)


def _build(settings: object, lines: list[tuple[int, object]], path: Path, name: str) -> Exam:
    problems: list[TrainyardError] = []
    settings = _checked_settings(settings, path, problems)
    with_options = any(isinstance(value, dict) and value.get("options") for _, value in lines)
    questions, seen = [], {}
    for place, (number, value) in enumerate(lines, 1):
        where = f"{path} line {number}"
        try:
            question = _question(value, place, where)
        except UserError as error:
            problems.append(error)
            continue
        asked = files.sha256_json([question.messages, question.prompt, question.options])
        if asked in seen or question.id in seen:
            first = seen.get(asked) or seen[question.id]
            problems.append(UserError("a question stands twice", where=where, found=f"the one of line {first}",
                                      expected="each question and each id once"))  # fmt: skip
        seen[asked] = seen[question.id] = number
        questions.append(question)
    if not questions and not problems:
        problems.append(UserError("an exam without questions", where=path, found="no line", expected="at least one"))
    scorer = None
    try:
        scorer = scorers.of(settings.get("scorer") or ("choice" if with_options else "exact"), settings, str(path))
        problems += [error for question in questions if (error := scorer.problem(question, str(path)))]
    except UserError as error:
        problems.append(error)
    if problems:
        raise Problems("the exam is wrong", problems, next_command=_EXAMPLE)
    most = settings.get("max_answer_tokens") or int(thresholds.ANSWER_TOKENS.value)
    return Exam(settings.get("name") or name, scorer, most, tuple(questions))


def _checked_settings(settings: object, path: Path, problems: list[TrainyardError]) -> dict:
    known = {"name": str, "scorer": str, "field": str, "pattern": str, "max_answer_tokens": int}
    if not isinstance(settings, dict):
        problems.append(UserError("an exam's settings are an object", where=path, found=type(settings).__name__))
        return {}
    for key, value in settings.items():
        if key not in known or not isinstance(value, known[key]) or isinstance(value, bool) or not value:
            problems.append(UserError("not a setting of an exam", where=path, found=f"{key}: {value!r}",
                                      expected=", ".join(known)))  # fmt: skip
    if isinstance(most := settings.get("max_answer_tokens"), int) and not 1 <= most <= 1 << 16:
        problems.append(UserError("not a number of answer tokens", where=path, found=most, expected="1 to 65,536"))
    return settings


def _question(value: object, place: int, where: str) -> Question:
    if isinstance(value, UserError):
        raise value
    if not isinstance(value, dict):
        raise UserError("not a question", where=where, found=type(value).__name__, expected="an object")
    if unknown := sorted(value.keys() - _QUESTION_KEYS):
        raise UserError(
            "unknown key", where=where, found=", ".join(unknown), expected=", ".join(sorted(_QUESTION_KEYS))
        )
    asked = [key for key in ("question", "messages", "prompt") if value.get(key) is not None]
    if len(asked) != 1:
        raise UserError("a question has one of question, messages and prompt", where=where,
                        found=", ".join(asked) or "none of them", expected="one")  # fmt: skip
    if not value[asked[0]] or not str(value[asked[0]]).strip():
        raise UserError("an empty question", where=where, found=f"{asked[0]}: {value[asked[0]]!r}",
                        expected="what is asked")  # fmt: skip
    answer, options = value.get("answer"), value.get("options") or []
    if answer is None:
        raise UserError("a question without an answer", where=where, found=f"the keys {', '.join(sorted(value))}",
                        expected="answer, the right one as a text")  # fmt: skip
    if not isinstance(answer, str):
        raise UserError("an answer is a text", where=where, found=f"{answer!r}, a {type(answer).__name__}",
                        expected="a text")  # fmt: skip
    if not answer.strip():
        raise UserError("an empty answer", where=where, found=f"answer: {answer!r}",
                        expected="the right answer as a text")  # fmt: skip
    if (
        not _are_texts(options)
        or len({scorers.normalised(one) for one in options}) != len(options)
        or (options and answer not in options)
    ):
        raise UserError("the options are no list of different texts with the answer among them", where=where,
                        found=repr(options)[:120])  # fmt: skip
    messages, prompt = value.get("messages"), value.get("prompt")
    if isinstance(value.get("question"), str):
        messages = [{"role": "user", "content": value["question"]}]
    if messages is not None and not _are_messages(messages):
        raise UserError("not a conversation that ends before an answer", where=where, found=repr(messages)[:120],
                        expected='[{"role", "content"}, ...], the last not the assistant\'s')  # fmt: skip
    if messages is None and not isinstance(prompt, str):
        raise UserError("a question is a text", where=where, found=f"{asked[0]}: a {type(value[asked[0]]).__name__}",
                        expected="a text")  # fmt: skip
    named = place if value.get("id") in (None, "") else value["id"]
    return Question(
        str(named), None if messages is None else tuple(messages), prompt, answer, tuple(options),
        value.get("group"),
    )  # fmt: skip


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) and one for one in value) and len(value) != 1


def _are_messages(value: object) -> bool:
    if not isinstance(value, list) or not value or not all(isinstance(one, dict) for one in value):
        return False
    return all(isinstance(one.get("role"), str) for one in value) and value[-1]["role"] != "assistant"


def of_split(data: datasets.Dataset, split: str) -> Exam:
    """The last answers of a split's records as an exam by exact match, a question each.

    The budget is as many tokens as the longest right answer has bytes, since a longer one cannot be right. Raises
    UserError for records without answers.
    """
    where = f"{data.reference}:{split}"
    left_out: Counter[str] = Counter()
    questions = list(_of_records(data.iter_records(split), left_out))
    if not questions:
        raise UserError("the records have no answers to ask for", where=where, found=f"records of the form {data.form}",
                        expected="conversations, or prompts with completions")  # fmt: skip
    longest_bytes = max(len(question.answer.encode()) for question in questions)  # no token has less than a byte
    most = min(int(thresholds.ANSWER_TOKENS.value), longest_bytes)
    return Exam(f"{data.name}-{split}", scorers.Scorer("exact"), most, tuple(questions), dict(left_out))


def _of_records(records: Iterable[dict], left_out: Counter[str]) -> Iterator[Question]:
    """The records' questions, each once; those that are none are counted into `left_out`."""
    seen = set()
    for number, value in enumerate(records, 1):
        question = _of_record(value, number)
        if question is None:
            left_out["no answer at the end"] += 1
            continue
        key = files.sha256_json([question.messages, question.prompt])
        if key in seen:
            left_out["asked before"] += 1
            continue
        named = question if question.id not in seen else dataclasses.replace(question, id=f"{question.id}-{number}")
        seen |= {key, named.id}
        yield named


def _of_record(value: dict, number: int) -> Question | None:
    identity, group = str(value.get("id") or number), value.get("group")
    conversation = of_record(value)
    if conversation is None:
        if "prompt" not in value or not value["completion"].strip():
            return None
        return Question(identity, None, value["prompt"], value["completion"], group=group)
    if not conversation.ends_with_answer or len(conversation.messages) < 2:
        return None
    *asked, said = conversation.messages
    if not (said.get("content") or "").strip():
        return None
    tools = tuple(conversation.tools) if conversation.tools else None
    return Question(identity, tuple(asked), None, said["content"], group=group, tools=tools)
