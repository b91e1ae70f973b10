"""Tiny checkpoints as folders and as a whole chain, and the real converter where it is fetched."""

import os
import shutil
from pathlib import Path

import pytest

from tests.export.tiny_adapter import write_adapter
from tests.export.tiny_checkpoint import BASE, dataset_files, train_tokenizer, write_artifact, write_model
from training.core import files, paths
from training.core.errors import TrainyardError
from training.export.checkpoint import Checkpoint, open_checkpoint
from training.llamacpp import quantize, source
from training.recipe import bases

REAL_CACHE = paths.roots().cache


@pytest.fixture(scope="session")
def tokenizer_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(folder)
    return folder


@pytest.fixture
def make_folder(tmp_path: Path, tokenizer_files: Path):
    """Make a plain Hugging Face folder: `make_folder("name", tied=True, vocab_size=503, ...)`."""

    def make(name: str = "tiny", **settings: object) -> Path:
        folder = write_model(tmp_path / "folders" / name, **settings)
        for file in tokenizer_files.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        return folder

    return make


@pytest.fixture
def plain(make_folder) -> Checkpoint:
    return open_checkpoint(str(make_folder()))


@pytest.fixture
def base(own_roots: Path, tokenizer_files: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pinned and fetched base of the test's own."""
    folder = write_model(paths.roots().bases / BASE)
    for file in tokenizer_files.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    digest = files.sha256_file(folder / "model.safetensors")
    pins = {"model.safetensors": digest}
    files.write_manifest(folder, bases.KIND, {"name": BASE, "revision": "1", "weights_sha256": digest, "pinned": pins})
    known = {BASE: bases.Base(BASE, "folder:x", "1", "MIT", pins, {})}
    monkeypatch.setattr(bases, "load", lambda path=None: known)
    return folder


@pytest.fixture(scope="session")
def _fetched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache that holds llama.cpp's source: the machine's, or one filled from LLAMA_CPP_SDIST."""
    before = os.environ.get("TRAINYARD_CACHE")
    candidates = [REAL_CACHE]
    if os.environ.get("LLAMA_CPP_SDIST"):
        candidates.append(tmp_path_factory.mktemp("cache"))
    try:
        for cache in candidates:
            os.environ["TRAINYARD_CACHE"] = str(cache)
            try:
                (source.require_source if cache == REAL_CACHE else source.ensure_source)()
                return cache
            except TrainyardError:
                continue
    finally:
        os.environ.pop("TRAINYARD_CACHE") if before is None else os.environ.update(TRAINYARD_CACHE=before)
    return pytest.skip("llama.cpp's source is not on this machine: make export-build")


@pytest.fixture
def llama_cpp(_fetched: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the real converter; skips by name where it is not fetched."""
    monkeypatch.setenv("TRAINYARD_CACHE", str(_fetched))


@pytest.fixture
def quantiser(llama_cpp: None) -> None:
    if shutil.which("cmake") is None or shutil.which("c++") is None:
        pytest.skip("K-quants: this machine has no compiler for llama.cpp's quantiser")
    quantize.require_tool()


@pytest.fixture
def ours(own_roots: Path, tokenizer_files: Path) -> Path:
    """A whole chain as training leaves it: data set, tokenizer, run, checkpoint of step 12. Returns the last."""
    dataset = write_artifact(own_roots / "training/datasets/tiny", "dataset", dataset_files())
    tokenizer_texts = {path.name: path.read_text() for path in tokenizer_files.iterdir()}
    digest = files.sha256_file(tokenizer_files / "tokenizer.json")
    tokenizer = write_artifact(own_roots / "training/tokenizers/tiny", "tokenizer", tokenizer_texts, digest)
    recipe = {"name": "tiny", "method": "pretrain"}
    origin = {
        "method": "pretrain", "base": None, "recipe_sha256": files.sha256_json(recipe), "dataset": dataset,
        "tokenizer": tokenizer | {"pre_tokenizer": "llama-bpe", "add_bos": True},
    }  # fmt: skip
    run = own_roots / "training/runs/20261129-000000-tiny-0001"
    folder = write_model(run / "checkpoints/step_000012")
    files.write_json(run / "run.json", {"schema": 1, "id": run.name, "status": "completed", **origin})
    files.write_json(run / "checkpoints/best.json", {"folder": folder.name, "step": 12})
    for name, text in tokenizer_texts.items():
        (folder / name).write_text(text)
    files.write_json(folder / "recipe.json", recipe)
    weights_sha256 = files.sha256_file(folder / "model.safetensors")
    body = {"run": run.name, "step": 12, **origin, "weights_sha256": weights_sha256}
    files.write_manifest(folder, "checkpoint", body)
    return folder


@pytest.fixture
def tuned_adapter(ours: Path, base: Path) -> Path:
    """`ours` as a checkpoint of lora would be: an adapter in the place of the weights, and the base by its hash."""
    manifest = files.read_json(ours / "manifest.json")
    for name in ("model.safetensors", "config.json"):
        (ours / name).unlink()
    write_adapter(ours, base)
    (ours / "manifest.json").unlink()
    record = {"name": BASE, "revision": "1", "weights_sha256": files.sha256_file(base / "model.safetensors")}
    keys = ("run", "step", "dataset", "tokenizer", "recipe_sha256")
    body = {key: manifest[key] for key in keys} | {"method": "lora", "base": record}
    digest = files.sha256_file(ours / "adapter_model.safetensors")
    files.write_manifest(ours, "checkpoint", body | {"weights_sha256": digest})
    return ours
