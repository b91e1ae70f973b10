"""lm-eval itself, from its own environment, asks the same server the same questions and gives the same score."""

import json
import shutil
from pathlib import Path

import pytest

from tests.conftest import REAL_CACHE
from tests.evaluation.conftest import base_file, write_exam, write_gguf
from training.cli import main
from training.core import paths
from training.core.errors import UserError
from training.evaluation import exam, harness


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ({"question": "a", "answer": "b", "options": ["b", "c"]}, "cannot ask a choice"),
        ({"prompt": "a", "answer": "b"}, "asks in one turn"),
        (
            {"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": "a"}], "answer": "b"},
            "one turn",
        ),
    ],
)
def test_what_the_harness_cannot_ask_is_refused_before_anything_is_fetched(tmp_path: Path, question: dict, words: str):
    with pytest.raises(UserError, match=words) as caught:
        harness.require_askable(exam.read(write_exam(tmp_path / "e.jsonl", [question])), "make evaluate")
    assert caught.value.next_command == "make evaluate"


@pytest.mark.parametrize("number", [0, -1])
def test_what_is_no_number_of_questions_is_refused_as_evaluate_does(exam_file: Path, number: int):
    assert main(["lm-eval", str(write_gguf("untrained")), "--exam", str(exam_file), f"--questions={number}"]) == 2


@pytest.mark.slow
def test_the_harness_finds_what_the_exam_finds(tmp_path: Path, capsys: pytest.CaptureFixture):
    """Two questions that the base answers right in one word or not; both ways the same answers and the same score."""
    cache = paths.roots().cache
    (REAL_CACHE / "environments").mkdir(parents=True, exist_ok=True)
    cache.mkdir(parents=True, exist_ok=True)
    (cache / "environments").symlink_to(REAL_CACHE / "environments")  # made once for this machine
    gguf = paths.roots().models / "smollm2.gguf"
    gguf.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(base_file(), gguf)
    questions = [
        {"question": "What is the capital of France? Answer with the name alone.", "answer": "Paris"},
        {"question": "Name a colour.", "answer": "of no model"},
    ]
    path = write_exam(tmp_path / "e.jsonl", questions, max_answer_tokens=8)
    capsys.readouterr()
    assert main(["lm-eval", str(gguf), "--exam", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert main(["evaluate", str(gguf), "--exam", str(path), "--json"]) == 0
    [own] = json.loads(capsys.readouterr().out)["records"]
    assert found["exact_match"] == found["agreement"] == own["exam"]["agreement"]
    kept = next((paths.roots().data / "training" / "evaluations").glob("*.json"))
    answers = {one["id"]: one["text"] for one in json.loads(kept.read_text())["answers"]}
    assert {key: " ".join(text.split()) for key, text in found["answers"].items()} == {
        key: " ".join(text.split()) for key, text in answers.items()
    }
