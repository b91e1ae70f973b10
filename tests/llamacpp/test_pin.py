"""The pin: its file, its name, and a converter hash that sees every byte and every name."""

import dataclasses
from pathlib import Path

import pytest

from training.core.errors import IntegrityError
from training.llamacpp import pin


def _converter(folder: Path) -> Path:
    for name, text in {"convert_hf_to_gguf.py": "a", "conversion/base.py": "b", "gguf-py/gguf/x.py": "c"}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_the_pin_in_the_repository_is_whole():
    pinned = pin.load()
    assert pinned.name == "b11312-0c1e57098"
    assert len(pinned.commit) == 40 and len(pinned.sdist_sha256) == len(pinned.converter_sha256) == 64
    assert pinned.to_json()["sdist"] == f"llama_cpp_python-{pinned.version}.tar.gz"


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: text.replace("commit:", "comit:"),
        lambda text: text + "commit: 1\n",
        lambda text: text.replace("build: b11312", "build:"),
    ],
    ids=["unknown key", "key twice", "no value"],
)
def test_a_damaged_pin_is_refused(tmp_path: Path, spoil):
    path = tmp_path / "pin.txt"
    path.write_text(spoil(pin.PIN_FILE.read_text()))
    with pytest.raises(IntegrityError):
        pin.load(path)


def test_converter_hash_sees_bytes_names_and_extra_files(tmp_path: Path):
    first = pin.converter_hash(_converter(tmp_path / "one"))
    assert pin.converter_hash(_converter(tmp_path / "two")) == first
    changes = {
        "bytes": lambda folder: (folder / "conversion/base.py").write_text("B"),
        "name": lambda folder: (folder / "conversion/base.py").rename(folder / "conversion/case.py"),
        "extra": lambda folder: (folder / "gguf-py/gguf/__pycache__.pyc").write_text("x"),
        "missing": lambda folder: (folder / "convert_hf_to_gguf.py").unlink(),
    }
    hashes = {first}
    for name, change in changes.items():
        folder = _converter(tmp_path / name)
        change(folder)
        hashes.add(pin.converter_hash(folder))
    assert len(hashes) == 1 + len(changes)


def test_files_beside_the_converter_do_not_count(tmp_path: Path):
    folder = _converter(tmp_path)
    before = pin.converter_hash(folder)
    (folder / "README.md").write_text("x")
    assert pin.converter_hash(folder) == before


def test_a_pin_is_a_value():
    with pytest.raises(dataclasses.FrozenInstanceError):
        pin.load().commit = "x"
