"""Two exported tiny models with their tokenizer, and a service of the test's own that is stopped at its end."""

import json
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.llamacpp import tiny_gguf
from tests.serving.room import Room
from training.containers import engine
from training.core import files
from training.llamacpp.client import Client
from training.llamacpp.server import ServerProcess, free_port
from training.serving import control, evaluate

SMOKE = """
prompts:
  - {name: text, text: "hello 12", max_tokens: 4}
  - {name: chat, messages: [{role: user, content: hi}], max_tokens: 4, expect: {finish_reason: length}}
"""


def write_tokenizer(folder: Path) -> dict:
    """The tokenizer of the tiny models as a training artifact; returns what a GGUF manifest says of it."""
    from training.tokenizer.pretokenizers import CONFIGURATIONS

    tokens = [*tiny_gguf.byte_letters(), *tiny_gguf.SPECIALS]
    ids = {token: number for number, token in enumerate(tokens)}
    bos = tiny_gguf.SPECIALS[0]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": ids[text], "content": text, **flags} for text in tiny_gguf.SPECIALS],
        "normalizer": None,
        "pre_tokenizer": CONFIGURATIONS["llama-bpe"],
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {bos: {"id": bos, "ids": [ids[bos]], "tokens": [bos]}},
        },
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": True,
            "vocab": ids, "merges": [],
        },
    }  # fmt: skip
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    digest = files.sha256_file(folder / "tokenizer.json")
    said = {"name": "tiny", "hash": digest, "pre_tokenizer": "llama-bpe", "add_bos": True}
    specials = {text: ids[text] for text in tiny_gguf.SPECIALS}
    files.write_manifest(folder, "tokenizer", said | {"vocab_size": len(tokens), "specials": specials})
    return said


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`models/{old,new}/<name>-F16.gguf` with manifests, and `tokenizers/tiny/<hash>`."""
    root = tmp_path_factory.mktemp("exported")
    said = write_tokenizer(root / "tokenizers" / "tiny" / "made")
    (root / "tokenizers" / "tiny" / "made").rename(root / "tokenizers" / "tiny" / files.short(said["hash"]))
    for name, seed in (("old", 1), ("new", 2)):
        path = tiny_gguf.write(root / "models" / name / f"{name}-F16.gguf", seed=seed)
        with ServerProcess.start(path, log=root / "log", ctx_size=256, threads=1) as server:
            server.wait_healthy(30)
            tiny_gguf.write_manifest(path, tiny_gguf.fingerprint(Client(server.url)), tokenizer=said)
    return root


def furnish(data: Path, exported: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> Room:
    """A room with copies of the exported models, their tokenizer and a short smoke file."""
    shutil.copytree(exported / "models", data / "models" / "trained")
    shutil.copytree(exported / "tokenizers", data / "training" / "tokenizers")
    smoke = folder / "smoke.yaml"
    smoke.write_text(SMOKE)
    reports = folder / "eval"
    monkeypatch.setattr(evaluate, "REPORTS", reports)
    return Room(data, free_port(), reports, smoke, name)


@pytest.fixture
def room(own_roots: Path, exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Room]:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})  # one thread: two that spin are slow on a busy machine
    room = furnish(own_roots, exported, tmp_path, monkeypatch, "test")
    yield room
    control.stop(room.name)


@pytest.fixture
def harbour(
    own_roots: Path, exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, llama_image: dict
) -> Iterator[Room]:
    """The same with the service llama-cpu of a Compose project of the test's own."""
    project = f"trainyard-test-{uuid.uuid4().hex[:8]}"
    settings = {"RUNTIME": "docker", "COMPOSE_PROJECT_NAME": project, "LLAMA_CPU_THREADS": "1"}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    yield furnish(own_roots, exported, tmp_path, monkeypatch, "llama-cpu")
    engine.run(["compose", "--project-name", project, "down", "--timeout", "5", "--remove-orphans"], "clearing up")
