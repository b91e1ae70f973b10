"""The same exam both ways: in PyTorch and through the server of a GGUF file; a server that reads otherwise is told."""

import shutil
from pathlib import Path

import pytest

from tests.evaluation.conftest import base_file, write_exam, write_gguf
from training.core import paths
from training.core.errors import RunError
from training.evaluation import record, served, subject
from training.evaluation.exam import Question
from training.evaluation.rendering import Prompts
from training.tokenizer.chat_templates import TEMPLATES


def test_a_server_that_reads_a_question_otherwise_is_told_before_anything_is_judged(own_roots: Path):
    """B68: the served file's template has one newline more; the first position that differs is named."""
    wrong_template = TEMPLATES["chatml"].source.replace("assistant\\n", "assistant\\n\\n")
    right, wrong = write_gguf("right"), write_gguf("wrong", wrong_template)
    question = Question("1", ({"role": "user", "content": "Hi"},), None, "x")
    prompts = Prompts(subject.find(str(right)).tokenizer)
    [asked] = prompts.asked([question])
    found = subject.find(str(right))
    with served.answering(found, served.arguments(found, 64, 4), prompts, [asked], 4) as answerer:
        nats = answerer.logprobs(asked.ids, [[7], [7, 8]])
        assert nats[1] < nats[0] < 0
    found = subject.find(str(wrong))
    with (
        pytest.raises(RunError, match=f"from position {len(asked.ids)} on"),
        served.answering(found, served.arguments(found, 64, 4), prompts, [asked], 4),
    ):
        pass


@pytest.mark.slow
def test_the_same_exam_in_pytorch_and_through_the_server(smollm2: Path, tmp_path: Path):
    """The base is unpacked from this very file, so both ways have the same weights; the server rounds activations."""
    gguf = paths.roots().models / "smollm2.gguf"
    shutil.copyfile(base_file(), gguf)
    asked = ("the capital of France", "2 + 2", "the color of the sky", "the opposite of hot", "the first month")
    exam = write_exam(
        tmp_path / "e.jsonl", [{"question": f"What is {one}? One word.", "answer": "Paris"} for one in asked],
        scorer="regex", pattern="Paris", max_answer_tokens=6,
    )  # fmt: skip
    choice = write_exam(
        tmp_path / "c.jsonl",
        [{"prompt": f"The capital of {one} is", "answer": f" {city}", "options": [" Paris", " Rome", " Madrid"]}
         for one, city in (("France", "Paris"), ("Italy", "Rome"), ("Spain", "Madrid"))],
    )  # fmt: skip
    found = []
    for reference in ("smollm2-135m-instruct", str(gguf)):
        request = record.Request(exam=str(exam), guard=str(choice))
        _, measured = record.measure(record.Evaluation(subject.find(reference), request))
        found.append(measured)
    (plain, through) = ([answer["text"] for answer in one["exam"]["answers"]] for one in found)
    assert sum(one == other for one, other in zip(plain, through, strict=True)) >= 4, (plain, through)
    assert found[0]["exam"]["score"]["agreement"] == found[1]["exam"]["score"]["agreement"] > 0
    for one, other in zip(*(each["guard"]["answers"] for each in found), strict=True):
        assert one["text"] == other["text"] and one["logprobs"] == pytest.approx(other["logprobs"], abs=0.3)
