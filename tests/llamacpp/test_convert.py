"""The conversion's process on a converter made here, which tells what it sees: no torch, no llama.cpp."""

import json
import time
from pathlib import Path

import pytest

from training.core import files
from training.core.errors import MachineError, RunError
from training.llamacpp import convert, source
from training.llamacpp import pin as pins

CONVERTER = """
import json, os, sys
from pathlib import Path
from conversion.base import TextModel
def main():
    model, output = Path(sys.argv[1]), Path(sys.argv[sys.argv.index("--outfile") + 1])
    print("a line of the converter")
    if (model / "model.safetensors").read_text() == "bad":
        raise ValueError("a tensor of a wrong shape")
    output.write_text(json.dumps({
        "argv": sys.argv, "files": sorted(path.name for path in model.iterdir()), "model": model.name,
        "config": json.loads((model / "config.json").read_text()),
        "tokenizer_config": json.loads((model / "tokenizer_config.json").read_text()),
        "pre": TextModel().get_vocab_base_pre("a tokenizer"), "environment": dict(os.environ),
    }))
"""
BASE = "class TextModel:\n    def get_vocab_base_pre(self, tokenizer): raise NotImplementedError\n"
TABLE = "TEXT_MODEL_MAP: dict[str, str] = {'LlamaForCausalLM': 'llama', 'Qwen3ForCausalLM': 'qwen'}\n"


@pytest.fixture(autouse=True)
def fake_source(monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source in the test's own cache, with a pin of its own."""
    pinned = pins.load()
    folder = source.folder_of(pinned)
    parts = {"convert_hf_to_gguf.py": CONVERTER, "conversion/base.py": BASE, "conversion/__init__.py": TABLE}
    for name, text in parts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    files.write_json(folder / "manifest.json", {})
    values = {**vars(pinned), "converter_sha256": pins.converter_hash(folder)}
    monkeypatch.setattr(pins, "load", lambda: pins.Pin(**values))
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with more in it than a conversion may see."""
    folder = tmp_path / "My-Model-v2"
    folder.mkdir()
    texts = {
        "model.safetensors": "weights", "tokenizer.json": "{}", "chat_template.jinja": "{{ x }}",
        "README.md": "---\nlicense: mit\n---", "generation_config.json": '{"repetition_penalty": 1.2}',
        "config.json": '{"_name_or_path": "/home/someone/secret", "vocab_size": 8}',
        "tokenizer_config.json": '{"bos_token": "<s>"}', "manifest.json": "{}",
    }  # fmt: skip
    for name, text in texts.items():
        (folder / name).write_text(text)
    return folder


def _convert(model: Path, workspace: Path, quants: tuple[str, ...] = ("F16",), **changes: object) -> dict[str, dict]:
    workspace.mkdir()
    outputs = {quant: workspace / f"{quant}.gguf" for quant in quants}
    arguments = {"tokenizer": model, "pre_tokenizer": "llama-bpe", "add_bos": True, "name": "tiny", **changes}
    with convert.Conversion.start(model, outputs, workspace=workspace, **arguments) as conversion:
        conversion.wait()
    return {quant: json.loads(path.read_text()) for quant, path in outputs.items()}


def test_the_converter_sees_only_what_must_count(model: Path, tmp_path: Path):
    seen = _convert(model, tmp_path / "work")["F16"]
    assert seen["files"] == [
        "chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"
    ]  # fmt: skip
    assert seen["model"] == "model" and seen["config"] == {"vocab_size": 8}
    assert seen["tokenizer_config"] == {"bos_token": "<s>", "add_bos_token": True}
    assert seen["argv"][seen["argv"].index("--model-name") + 1] == "tiny"
    assert seen["pre"] == "llama-bpe"


def test_the_environment_is_fixed_and_offline(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("NO_LOCAL_GGUF", "1")
    environment = _convert(model, tmp_path / "work")["F16"]["environment"]
    assert environment["PYTHONHASHSEED"] == "0" and environment["HF_HUB_OFFLINE"] == "1"
    assert not {"HF_TOKEN", "NO_LOCAL_GGUF"} & environment.keys()


def test_one_process_writes_every_type(model: Path, tmp_path: Path):
    seen = _convert(model, tmp_path / "work", ("F32", "Q8_0"))
    assert [one["argv"][one["argv"].index("--outtype") + 1] for one in seen.values()] == ["f32", "q8_0"]


def test_weights_and_tokenizer_may_lie_in_two_folders(model: Path, tmp_path: Path):
    other = tmp_path / "tokenizer"
    other.mkdir()
    (other / "tokenizer.json").write_text("{}")
    (other / "tokenizer_config.json").write_text('{"bos_token": "<other>"}')
    seen = _convert(model, tmp_path / "work", tokenizer=other, add_bos=False)["F16"]
    assert seen["tokenizer_config"] == {"bos_token": "<other>", "add_bos_token": False}
    assert "chat_template.jinja" not in seen["files"]


def test_a_failure_is_told_with_the_converters_last_lines(model: Path, tmp_path: Path):
    (model / "model.safetensors").write_text("bad")
    with pytest.raises(RunError) as failure:
        _convert(model, tmp_path / "work")
    assert "a tensor of a wrong shape" in failure.value.found and failure.value.exit_code == 4


def test_a_failure_for_want_of_space_is_told_as_that(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """numpy tells no reason for a short write, so the disk is looked at."""
    (model / "model.safetensors").write_text("bad")
    monkeypatch.setattr(files, "free_bytes", lambda path: 0)
    with pytest.raises(MachineError, match="the disk is full"):
        _convert(model, tmp_path / "work")


def test_a_conversion_ends_with_its_block(model: Path, tmp_path: Path, fake_source: Path, monkeypatch):
    slow = CONVERTER.replace('print("a line', 'import time; time.sleep(60); print("a line')
    (fake_source / "convert_hf_to_gguf.py").write_text(slow)
    values = {**vars(pins.load()), "converter_sha256": pins.converter_hash(fake_source)}
    monkeypatch.setattr(pins, "load", lambda: pins.Pin(**values))
    started = time.monotonic()
    (tmp_path / "work").mkdir()
    with pytest.raises(KeyboardInterrupt), convert.Conversion.start(
        model, {"F16": tmp_path / "work" / "x"}, tokenizer=model, pre_tokenizer="gpt-2", add_bos=True, name="tiny",
        workspace=tmp_path / "work",
    ):  # fmt: skip
        raise KeyboardInterrupt
    assert time.monotonic() - started < 10 and not (tmp_path / "work" / "x").exists()


def test_without_the_source_nothing_starts(model: Path, tmp_path: Path, fake_source: Path):
    (fake_source / "manifest.json").unlink()
    with pytest.raises(MachineError, match="not on this machine"):
        _convert(model, tmp_path / "work")


def test_architectures_are_read_without_running_the_converter(fake_source: Path):
    assert convert.architectures(fake_source) == {"LlamaForCausalLM", "Qwen3ForCausalLM"}
