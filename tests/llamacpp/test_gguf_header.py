"""A GGUF header is read like the package reads it, and no claim of it is believed beyond the file."""

import struct
from pathlib import Path

import gguf
import pytest

from training.core.errors import IntegrityError
from training.llamacpp import gguf_header, tiny

VERSION_AT, TENSORS_AT, KEYS_AT, FIRST_KEY_AT = 4, 8, 16, 24


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tiny.write(tmp_path / "tiny.gguf", seed=1, layers=2)


def test_it_says_what_the_package_says(path: Path):
    header, reader = gguf_header.read(path), gguf.GGUFReader(path)
    for key in ("general.architecture", "llama.context_length", "llama.block_count", "tokenizer.ggml.add_bos_token"):
        assert header.value(key) == reader.get_field(key).contents()
    assert sum(header.tensor_types.values()) == len(reader.tensors)
    assert header.tensor_types == {"F16": 16, "F32": 5}
    assert header.value("tokenizer.ggml.tokens")[256] == "<|bos|>"
    assert [(one.name, one.kind, list(one.shape), one.begin, one.num_bytes) for one in header.tensors] == [
        (one.name, one.tensor_type.name, one.shape.tolist(), one.data_offset, one.n_bytes) for one in reader.tensors
    ]
    with pytest.raises(KeyError, match=r"general\.nothing is not in the header"):
        header.value("general.nothing")


def patched(path: Path, at: int, value: bytes) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:at] + value + data[at + len(value) :])


@pytest.mark.parametrize(
    ("at", "value", "words"),
    [
        (0, b"GGML", "begins with"),
        (VERSION_AT, struct.pack("<I", 9), "version 9"),
        (TENSORS_AT, struct.pack("<Q", 1 << 40), f"claims {1 << 40} tensors"),
        (KEYS_AT, struct.pack("<Q", 1 << 40), f"claims {1 << 40} keys"),
        (KEYS_AT, struct.pack("<Q", 1 << 16), "keys"),
        (FIRST_KEY_AT, struct.pack("<Q", 1 << 62), "claims a text"),
    ],
)
def test_absurd_claims_are_refused(path: Path, at: int, value: bytes, words: str):
    patched(path, at, value)
    with pytest.raises(IntegrityError) as caught:
        gguf_header.read(path)
    assert words in caught.value.found


@pytest.mark.parametrize(("name", "other"), [(b"blk.1.attn_q", b"blk.0.attn_q"), (b".bos_token_id", b".eos_token_id")])
def test_a_name_that_stands_twice_is_refused(path: Path, name: bytes, other: bytes):
    """Who reads it takes the one or the other."""
    path.write_bytes(path.read_bytes().replace(name, other, 1))
    with pytest.raises(IntegrityError, match="not a whole GGUF") as caught:
        gguf_header.read(path)
    assert "stands twice" in caught.value.found


@pytest.mark.parametrize("claimed", [1 << 40, 1 << 22])
def test_a_list_that_claims_more_than_the_file_holds_is_refused(path: Path, claimed: int):
    key = b"tokenizer.ggml.tokens" + struct.pack("<II", 9, 8)
    patched(path, path.read_bytes().index(key) + len(key), struct.pack("<Q", claimed))
    with pytest.raises(IntegrityError, match="not a whole GGUF"):
        gguf_header.read(path)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.02, 0.5, 0.999])
def test_a_file_that_is_cut_is_refused(path: Path, share: float):
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(IntegrityError, match="not a whole GGUF"):
        gguf_header.read(path)
