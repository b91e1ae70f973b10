"""Which token ends an answer, and a chat template in Ollama's language."""

from pathlib import Path

import pytest

from tests.export.tiny_checkpoint import SPECIALS
from training.core.errors import MachineError, RunError
from training.export import modelfile, proof, turns
from training.export.checkpoint import Checkpoint, open_checkpoint

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
OPENED = "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}" + CHATML
TRIMMED = CHATML.replace("m['content']", "m['content'] | trim")


@pytest.fixture
def with_template(make_folder):
    def make(template: str | None, **settings) -> Checkpoint:
        folder = make_folder(**settings)
        if template is not None:
            (folder / "chat_template.jinja").write_text(template)
        return open_checkpoint(str(folder))

    return make


def test_the_end_of_a_turn_is_what_the_template_writes_behind_an_answer(with_template):
    """B56: EOS stays the end of a text, the end of a turn is one of its own."""
    checkpoint = with_template(CHATML)
    assert checkpoint.turn_end_id == SPECIALS.index("<|im_end|>") and checkpoint.special_id("eos") == 1


@pytest.mark.parametrize("template", [None, CHATML.replace("<|im_end|>", ""), "{{ raise_exception('no') }}"])
def test_without_one_eos_alone_ends(with_template, template):
    assert with_template(template).turn_end_id is None


def test_an_end_that_is_eos_is_written_once(with_template):
    assert with_template(CHATML.replace("<|im_end|>", "<|endoftext|>")).turn_end_id is None


@pytest.mark.parametrize("template", [CHATML, OPENED], ids=["chatml", "with an opening"])
def test_a_template_is_taken_apart_and_put_together(with_template, template: str):
    checkpoint = with_template(template)
    frame = modelfile.frame_of(checkpoint)
    own = turns.template_of(checkpoint)
    for conversation in turns.CONVERSATIONS:
        assert frame.render(conversation) == own.render(list(conversation), prompt=True)
    assert frame.without_system == ("<|im_start|>system\nBe kind.<|im_end|>\n" if template == OPENED else "")


def test_the_modelfile_names_file_template_stops_and_context(with_template, tmp_path: Path):
    text = modelfile.write(with_template(CHATML), tmp_path / "tiny-Q8_0.gguf", 256).read_text()
    assert text.startswith("FROM ./tiny-Q8_0.gguf\n") and "PARAMETER num_ctx 256" in text
    assert '{{ range .Messages }}{{ if eq .Role "system" }}<|im_start|>system\n{{ .Content }}<|im_end|>\n' in text
    assert text.count("PARAMETER stop") == 2 and 'PARAMETER stop "<|im_end|>"' in text
    assert '{{ end }}{{ end }}<|im_start|>assistant\n"""' in text


def test_a_template_that_is_more_is_left_to_ollama(with_template, tmp_path: Path):
    text = modelfile.write(with_template(TRIMMED), tmp_path / "x.gguf", 256).read_text()
    assert "TEMPLATE" not in text and text.splitlines()[1].startswith("# The chat template is more")


def test_a_model_without_a_template_continues_text(with_template, tmp_path: Path):
    assert 'TEMPLATE "{{ .Prompt }}"' in modelfile.write(with_template(None), tmp_path / "x.gguf", 256).read_text()


def _fake_ollama(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    folder.mkdir()
    (folder / "ollama").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "ollama").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_ollama_is_told_where_it_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    _fake_ollama(tmp_path / "bin", monkeypatch, 'echo "$@" > told')
    (tmp_path / "x.Modelfile").write_text("FROM ./x.gguf\n")
    modelfile.register("mine", tmp_path / "x.Modelfile")
    assert (tmp_path / "told").read_text() == "create mine -f x.Modelfile\n"


def test_without_ollama_or_its_server_the_command_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "x.Modelfile").write_text("FROM ./x.gguf\n")
    _fake_ollama(tmp_path / "bin", monkeypatch, "echo could not connect >&2; exit 1")
    with pytest.raises(MachineError, match="did not take") as failure:
        modelfile.register("mine", tmp_path / "x.Modelfile")
    assert failure.value.found == "could not connect"
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MachineError, match="no Ollama"):
        modelfile.register("mine", tmp_path / "x.Modelfile")


# ---- what the proof asks of a server


class _Server:
    """Renders by a template and reads by a tokenizer, as told."""

    def __init__(self, checkpoint: Checkpoint, template: str):
        self.checkpoint, self.template = checkpoint, template

    def apply_template(self, messages: list[dict]) -> str:
        other = turns.Template(self.template, {"bos_token": "<|bos|>"})
        return other.render(messages, prompt=True, thinking=True)

    def tokenize(self, text: str, **_: object) -> list[int]:
        return self.checkpoint.encoder.encode(text).ids

    def completion(self, prompt: list[int], *, max_tokens: int, logit_bias: list) -> dict:
        return {"stop_type": "eos" if logit_bias[0][0] == 1 else "limit"}


def test_conversations_are_compared_and_one_newline_fails(with_template):
    """B55."""
    checkpoint = with_template(CHATML)
    assert proof.check_conversations(_Server(checkpoint, CHATML), checkpoint) == len(turns.CONVERSATIONS)
    other = CHATML.replace("'<|im_end|>' + '\n'", "'<|im_end|>' + '\n\n'")
    with pytest.raises(RunError, match="renders a conversation otherwise") as failure:
        proof.check_conversations(_Server(checkpoint, other), checkpoint)
    assert "the chat template" in failure.value.found


def test_a_server_that_talks_on_fails(with_template):
    """B56."""
    checkpoint = with_template(CHATML)
    with pytest.raises(RunError, match="does not stop") as failure:
        proof.check_stops(_Server(checkpoint, CHATML), checkpoint)
    assert "<|im_end|>" in failure.value.where
    plain = with_template(None, name="plain")
    assert proof.check_stops(_Server(plain, ""), plain) == [1]
