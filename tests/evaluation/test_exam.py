"""Exams: what is read, everything that is wrong told at once, and what a score's identity depends on."""

import dataclasses
import json
from pathlib import Path

import pytest

from tests.evaluation.conftest import write_exam
from training.core.errors import Problems, UserError
from training.evaluation import exam, guard, scorers, thresholds

GOOD = {"question": "2 + 2?", "answer": "4"}


def test_a_file_and_a_folder_are_the_same_exam(tmp_path: Path):
    questions = [GOOD, {"prompt": "a b", "answer": " c", "options": [" c", " d"]}]
    file = write_exam(tmp_path / "e.jsonl", [GOOD], scorer="regex", pattern=r"\d", max_answer_tokens=5, name="sums")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "questions.jsonl").write_text(json.dumps(GOOD) + "\n")
    (folder / "exam.json").write_text('{"scorer": "regex", "pattern": "\\\\d", "max_answer_tokens": 5, "name": "sums"}')
    assert exam.read(file).identity() == exam.read(folder).identity()
    assert exam.read(write_exam(tmp_path / "c.jsonl", questions[1:])).scorer.name == "choice"
    assert exam.read(write_exam(tmp_path / "d.jsonl", [GOOD])).max_answer_tokens == 320


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([GOOD, {**GOOD, "id": "again"}], "stands twice"),
        ([{**GOOD, "id": "a"}, {"question": "3?", "answer": "3", "id": "a"}], "stands twice"),
        ([{"question": "2 + 2?", "answer": " "}], "empty answer"),
        ([{"question": "2 + 2?"}], "a question without an answer"),
        ([{"question": "2 + 2?", "answer": 4}], "an answer is a text"),
        ([{"question": " ", "answer": "4"}], "an empty question"),
        ([{"messages": [], "answer": "4"}], "an empty question"),
        ([{"question": 4, "answer": "4"}], "a question is a text"),
        ([{"answer": "4"}], "one of question, messages and prompt"),
        ([{**GOOD, "prompt": "x"}], "one of question, messages and prompt"),
        ([{**GOOD, "anser": "4"}], "unknown key"),
        ([{"prompt": "x", "answer": "a", "options": ["b", "c"]}], "options"),
        ([{"prompt": "x", "answer": "a", "options": ["a"]}], "options"),
        ([{"prompt": "x", "answer": "a", "options": ["a", " a"]}], "options"),
        ([{"question": "\ud800", "answer": "a"}], "not JSON"),
        ([{"messages": [{"role": "assistant", "content": "x"}], "answer": "a"}], "not a conversation"),
        ([{"messages": "x", "answer": "a"}], "not a conversation"),
        ([[1]], "not a question"),
        ([], "without questions"),
        ([{"exam": {"scorer": "best"}}, GOOD], "no such scorer"),
        ([{"exam": {"max_answer_tokens": 0}}, GOOD], "not a setting"),
        ([{"exam": {"colour": "red"}}, GOOD], "not a setting"),
        ([{"exam": []}, GOOD], "settings are an object"),
    ],
)
def test_what_is_wrong_is_told_with_its_line(tmp_path: Path, lines: list, words: str):
    with pytest.raises(Problems) as error:
        exam.read(write_exam(tmp_path / "e.jsonl", lines))
    assert words in str(error.value)


def test_every_wrong_line_is_told_at_once(tmp_path: Path):
    path = write_exam(tmp_path / "e.jsonl", [GOOD, GOOD, {"question": "x"}])
    path.write_text(path.read_text() + "{\n")
    with pytest.raises(Problems) as error:
        exam.read(path)
    assert len(error.value.problems) == 3
    assert all(f"line {number}" in str(error.value) for number in (2, 3, 4))


def test_of_very_many_wrong_lines_a_block_tells_the_first_and_the_document_all(tmp_path: Path):
    with pytest.raises(Problems) as error:
        exam.read(write_exam(tmp_path / "e.jsonl", [{"question": f"{number}?"} for number in range(300)]))
    assert str(error.value).count("a question without an answer") == 20 and "- and 280 more" in str(error.value)
    assert len(error.value.to_json()["problems"]) == 300


def test_questions_may_be_numbered_from_0(tmp_path: Path):
    questions = [{"id": i, "question": f"{i}?", "answer": str(i)} for i in range(3)]
    whole = exam.read(write_exam(tmp_path / "e.jsonl", [*questions, {"question": "x?", "answer": "x"}]))
    assert [one.id for one in whole.questions] == ["0", "1", "2", "4"]


def test_the_answer_budget_and_the_draw_are_part_of_the_identity(tmp_path: Path):
    """The same model scores otherwise where its answer is cut off, so that is another measurement."""
    questions = [{"question": f"{i}?", "answer": str(i)} for i in range(30)]
    whole = exam.read(write_exam(tmp_path / "e.jsonl", questions))
    found = [
        whole, dataclasses.replace(whole, max_answer_tokens=8), whole.drawn(9, 7), whole.drawn(9, 8),
        dataclasses.replace(whole, scorer=scorers.Scorer("regex", "1")),
    ]  # fmt: skip
    assert len({json.dumps(one.identity(), sort_keys=True) for one in found}) == 5
    assert whole.drawn(9, 7).identity() == whole.drawn(9, 7).identity()
    assert whole.drawn(99, 1) == whole


def test_an_exam_that_is_not_there_is_told(tmp_path: Path):
    with pytest.raises(UserError, match="no such exam"):
        guard.open_exam(str(tmp_path / "none.jsonl"))


def test_a_split_with_answers_is_an_exam(world: Path):
    found = guard.open_exam("chat:train")
    assert found.max_answer_tokens == len("x * 6 + 1 + 1")
    assert found.scorer.name == "exact" and len(found.questions) > 20
    assert found.questions[0].messages[-1]["role"] == "user" and found.questions[0].answer.startswith("x *")
    with pytest.raises(UserError, match="no answers"):
        guard.open_exam("texts:train")


def test_a_guard_set_is_drawn_by_its_seed(own_roots: Path):
    one, again, other = (guard.drawn(seed, None) for seed in (7, 7, 8))
    assert one == again and one.sha256 != other.sha256
    assert len(one.questions) == 60
    assert all(question.answer in question.options and len(question.options) == 4 for question in one.questions)


def test_a_guard_set_leaves_out_what_was_trained_on(own_roots: Path):
    class Trained:
        splits = ["train"]

        def iter_texts(self, _: str):
            from pydoc_data.topics import topics

            return iter(topics.values())

    with pytest.raises(UserError, match="no guard set can be drawn"):
        guard.drawn(7, Trained())


def test_only_passages_that_were_trained_on_are_left_out(own_roots: Path, monkeypatch: pytest.MonkeyPatch):
    """Of a data set that holds one topic, that topic's passages go, and every other is still asked."""
    from pydoc_data.topics import topics

    class Trained:
        splits = ["train"]

        def iter_texts(self, _: str):
            return iter(["Something else.", topics["exprlists"] + "\n\n" + topics["lambda"]])

    monkeypatch.setattr(guard.thresholds, "GUARD_QUESTIONS", thresholds.Threshold(9999, "", ""))
    whole, rest = guard.drawn(7, None), guard.drawn(7, Trained())
    gone = {one.prompt for one in whole.questions} - {one.prompt for one in rest.questions}
    assert gone == {one.prompt for one in whole.questions if one.group in ("exprlists", "lambda")} != set()
    assert rest.left_out == {"in the trained data": len(gone)}
    assert {one.prompt for one in rest.questions} < {one.prompt for one in whole.questions}
