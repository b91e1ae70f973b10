"""A tiny base with data, and exams for it."""

import json
from pathlib import Path

import pytest

from tests.objectives.tiny import make_world


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with `full.yaml`, `lora.yaml` and `qlora.yaml`, whose base and data are there."""
    return make_world(tmp_path, monkeypatch)


def write_exam(path: Path, questions: list[dict], **settings: object) -> Path:
    """Write an exam as one file, its settings on the first line."""
    lines = [{"exam": settings}] if settings else []
    path.write_text("".join(json.dumps(line) + "\n" for line in [*lines, *questions]))
    return path


@pytest.fixture
def exam_file(tmp_path: Path) -> Path:
    """Twelve questions that the tiny chat data answers, with short answers."""
    questions = [{"question": f"f{i}", "answer": f"x * {i % 7}" + " + 1" * (i % 3)} for i in range(12)]
    return write_exam(tmp_path / "exam.jsonl", questions, max_answer_tokens=12)
