"""A llama.cpp server as a teacher: the convention, the bucket, what is refused; a real one beside a folder."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from training.core.errors import RunError, UserError
from training.engine import gguf_folder
from training.llamacpp import tiny
from training.objectives import teacher
from training.objectives.teacher import Teacher
from training.objectives.teacher_model import TeacherModel
from training.objectives.teacher_server import TeacherServer
from training.tokenizer import artifact


class Fake:
    """A client whose model says of any beginning: the next token is its length with 0.9, then 0 with 0.05."""

    url = "http://127.0.0.1:1"

    def __init__(self, first: float = 0.9):
        self.first, self.asked = first, []

    def top_logprobs(self, prompt_ids, top=5, *, reuse=False):
        assert reuse
        self.asked.append([int(token) for token in prompt_ids])
        return [(len(prompt_ids), math.log(self.first)), (0, math.log(0.05))][:top]


def test_a_label_is_asked_for_by_what_is_before_it():
    """B82: tokens [1, 5, 6, 2], three labels; a row is about the token behind what was sent."""
    client = Fake()
    (said,) = TeacherServer(client, 10).say([(np.array([1, 5, 6, 2]), np.array([1, 2, 3]))], 2)
    assert client.asked == [[1], [1, 5], [1, 5, 6]]
    assert said.top_NK.tolist() == [[1, 0], [2, 0], [3, 0]]
    assert np.exp(said.logprobs_NC) == pytest.approx(np.array([[0.9, 0.05, 0.05]] * 3))
    assert said.label_N == pytest.approx(np.log([0.05] * 3))  # none is among them: at most the last one's
    (one,) = TeacherServer(Fake(), 10).say([(np.array([7, 1]), np.array([1]))], 2)
    assert len(one.top_NK) == 1 and one.label_N == pytest.approx(np.log([0.9]))


def test_likeliest_that_leave_nothing_leave_a_billionth():
    (said,) = TeacherServer(Fake(first=0.95), 10).say([(np.array([7, 1]), np.array([1]))], 2)
    assert np.exp(said.logprobs_NC[0, -1]) == pytest.approx(1e-9, rel=1e-6)


def test_an_answer_that_is_not_whole_is_refused():
    with pytest.raises(RunError, match="one for each"):
        TeacherServer(Fake(), 10).say([(np.array([7, 1]), np.array([1]))], 3)
    with pytest.raises(RunError, match="under 1"):
        TeacherServer(Fake(), 1).say([(np.array([7, 1]), np.array([1]))], 2)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A random model as a GGUF file and as the folder unpacked from it."""
    place = tmp_path_factory.mktemp("teachers")
    folder = place / "unpacked"
    folder.mkdir()
    file = tiny.write(place / "tiny.gguf", seed=3)
    gguf_folder.convert(file, folder)
    return file, folder


def test_a_server_and_a_folder_of_one_model_say_the_same(both: tuple[Path, Path], tmp_path: Path):
    """Two ways to one answer, on documents of unlike lengths, shifted by nothing (B82)."""
    file, folder = both
    random = np.random.default_rng(0)
    documents = [
        (random.integers(0, 256, length), np.arange(first, length)) for length, first in ((9, 4), (23, 20), (2, 1))
    ]
    model = TeacherModel(folder, torch.device("cpu"), torch.float32, tiny.VOCAB_SIZE)
    with Teacher("tiny", file).served(256, tmp_path / "log") as client:
        served = TeacherServer(client, tiny.VOCAB_SIZE).say(documents, 5)
    own = model.say(documents, 5)
    for one, other, (_, places) in zip(served, own, documents, strict=True):
        assert one.top_NK.shape == other.top_NK.shape == (len(places), 5)
        assert np.allclose(one.logprobs_NC, other.logprobs_NC, atol=1e-2)
        assert (one.top_NK[:, 0] == other.top_NK[:, 0]).all()
        assert (one.label_N >= other.label_N - 1e-2).all()


def test_a_file_has_its_own_tokens_and_padding_at_most(both: tuple[Path, Path], tmp_path: Path):
    file, folder = both
    student = artifact.Tokenizer(folder, {"name": "tiny", "vocab_size": tiny.VOCAB_SIZE})
    Teacher("tiny", file).require_same_ids(student)
    own = tiny._own_vocabulary()
    padded = replace(own, tokens=[*own.tokens, "[PAD261]"], types=[*own.types, "UNUSED"])
    Teacher("padded", tiny.write(tmp_path / "padded.gguf", seed=3, vocabulary=padded)).require_same_ids(student)
    for tokens in ([*own.tokens[:-2], own.tokens[-1], own.tokens[-2]], [*own.tokens, "one more"]):
        types = [*own.types, "NORMAL"][: len(tokens)]
        other = tiny.write(tmp_path / "other.gguf", seed=3, vocabulary=replace(own, tokens=tokens, types=types))
        with pytest.raises(UserError, match="do not mean the same tokens"):
            Teacher("other", other).require_same_ids(student)


def test_a_running_server_is_told_by_its_file(both: tuple[Path, Path], tmp_path: Path):
    file, _ = both
    with Teacher("tiny", file).served(256, tmp_path / "log") as client:
        found = teacher.find(client.url)
        assert (found.name, found.weights, found.url) == ("tiny", file, client.url)
        assert found.identity("float32") == Teacher("tiny", file).identity("float32")
