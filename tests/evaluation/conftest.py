"""A tiny base with data, and exams for it."""

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import REAL_CACHE, made_once
from tests.objectives.tiny import make_world
from training.core import paths
from training.engine import base_source
from training.evaluation import kept
from training.llamacpp import tiny
from training.recipe import bases
from training.tokenizer.chat_templates import TEMPLATES


@pytest.fixture(scope="module")
def made_world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The tiny base with its data and one trained adapter, made once for a module's tests."""
    folder = tmp_path_factory.mktemp("world")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DATA_ROOT", str(folder / "data"))
        patch.setenv("TRAINYARD_CACHE", str(folder / "cache"))
        patch.setenv("RUNTIME", "local")
        make_world(folder, patch)
        yield folder


@pytest.fixture
def world(made_world: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with `full.yaml`, `lora.yaml` and `qlora.yaml`, whose base and data are there; nothing is measured."""
    monkeypatch.setenv("DATA_ROOT", str(made_world / "data"))
    monkeypatch.setenv("TRAINYARD_CACHE", str(made_world / "cache"))
    monkeypatch.setattr(bases, "FILE", made_world / "bases.yaml")
    shutil.rmtree(kept.folder(), ignore_errors=True)
    return made_world


def write_exam(path: Path, questions: list[dict], **settings: object) -> Path:
    """Write an exam as one file, its settings on the first line."""
    lines = [{"exam": settings}] if settings else []
    path.write_text("".join(json.dumps(line) + "\n" for line in [*lines, *questions]))
    return path


def write_gguf(name: str, template: str | None = None) -> Path:
    """A GGUF of random weights under the models, whose vocabulary holds what its one merge makes."""
    own = tiny._own_vocabulary()
    merged = own.merges[0].replace(" ", "")
    words = dataclasses.replace(own, tokens=[*own.tokens, merged], types=[*own.types, "NORMAL"])
    template = template or TEMPLATES["chatml"].source
    return tiny.write(paths.roots().models / f"{name}.gguf", seed=1, template=template, vocabulary=words)


def base_file() -> Path:
    """The file that the base is unpacked from, obtained once for this machine."""
    base = bases.find("smollm2-135m-instruct")
    place = REAL_CACHE / "tests" / "files" / base.name
    (name,) = base.files
    with made_once(place / name) as is_there:
        if not is_there:
            base_source.obtain(base, place)
    return place / name


@pytest.fixture
def exam_file(tmp_path: Path) -> Path:
    """Twelve questions that the tiny chat data answers, with short answers."""
    questions = [{"question": f"f{i}", "answer": f"x * {i % 7}" + " + 1" * (i % 3)} for i in range(12)]
    return write_exam(tmp_path / "exam.jsonl", questions, max_answer_tokens=12)
