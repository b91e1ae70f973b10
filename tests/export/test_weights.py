"""The reading of safetensors: what a header may claim, what a pass over a file tells, and its memory."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from training.core.errors import IntegrityError
from training.core.paths import REPOSITORY
from training.export import weights


def _write(path: Path, header: dict, data: bytes) -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def _entry(dtype: str, shape: list, begin: int, end: int) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "size"),
    [
        ({"a": _entry("F32", [2], 0, 8)}, 7),
        ({"a": _entry("F32", [2], 0, 8)}, 9),
        ({"a": _entry("F32", [3], 0, 8)}, 8),
        ({"a": _entry("F32", [2], 0, 8), "b": _entry("F32", [2], 4, 12)}, 12),
        ({"a": _entry("F32", [2], 4, 12)}, 12),
        ({"a": _entry("F32", [-2], 0, 8)}, 8),
        ({"a": _entry("F31", [2], 0, 8)}, 8),
        ({"a": _entry("F32", [1 << 40], 0, 1 << 42)}, 8),
        ({"a": {"dtype": "F32", "shape": [2]}}, 8),
        ({"a": [1]}, 8),
    ],
    ids=["cut", "more", "shape", "overlap", "hole", "negative", "type", "huge", "no place", "no entry"],
)
def test_a_header_that_lies_is_refused(tmp_path: Path, header: dict, size: int):
    with pytest.raises(IntegrityError, match="not a safetensors file"):
        weights.open_file(_write(tmp_path / "x.safetensors", header, bytes(size)))


@pytest.mark.parametrize("data", [b"", b"\0" * 8, (1 << 62).to_bytes(8, "little"), b"\x04" + bytes(7) + b"[[[["])
def test_what_has_no_header_is_refused(tmp_path: Path, data: bytes):
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(IntegrityError, match="not a safetensors file"):
        weights.open_file(tmp_path / "x")


def test_blocks_are_the_tensor_and_the_hash_is_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(weights, "BLOCK_BYTES", 100)
    values = {"m": np.arange(60, dtype=np.float32).reshape(20, 3), "v": np.ones(70, np.float32), "e": np.ones((0, 3))}
    path = tmp_path / "x.safetensors"
    save_file(values, path)
    opened = weights.open_file(path)
    for tensor in opened.tensors:
        np.testing.assert_array_equal(tensor.read().numpy(), values[tensor.name])
        assert all(block.nbytes <= 300 for _, block in tensor.blocks())
    assert opened.sweep() == (hashlib.sha256(path.read_bytes()).hexdigest(), None)


def test_a_writer_writes_what_safetensors_reads(tmp_path: Path):
    from safetensors.torch import load_file

    value = torch.arange(12).bfloat16().reshape(4, 3)
    layout = {"a": ("BF16", (4, 3)), "b": ("F32", (2,))}
    with weights.Writer(tmp_path / "x", layout) as writer:
        for block in (value[:1], value[1:], torch.ones(2)):
            writer.add(block)
        digest = writer.close()
    found = load_file(tmp_path / "x")
    assert torch.equal(found["a"], value) and found["b"].tolist() == [1, 1]
    assert digest == hashlib.sha256((tmp_path / "x").read_bytes()).hexdigest()


_MERGE = """
import sys
from pathlib import Path
from training.core import process
from training.export import merge
from training.export.checkpoint import open_checkpoint
import torch
checkpoint = open_checkpoint(sys.argv[1], base=sys.argv[2])
process.reset_peak_rss()
before = process.peak_rss_bytes()
merge.write(checkpoint, Path(sys.argv[3]), cast=False)
print(process.peak_rss_bytes() - before)
"""


@pytest.mark.slow
def test_a_merge_holds_a_block_and_not_a_tensor(make_folder, tmp_path: Path):
    """A matrix of 768 MiB, most of it a hole in the file, is merged in less than a third of that."""
    from tests.export.tiny_adapter import write_adapter
    from tests.export.tiny_checkpoint import random_weights

    base = make_folder("base")
    rows, width = 3 << 14, 4096
    tensors = random_weights() | {"model.layers.0.mlp.extra_proj.weight": np.zeros((0, width), np.float32)}
    adapter = write_adapter(tmp_path / "adapter", base)
    save_file(tensors, base / "model.safetensors")
    _grow(base / "model.safetensors", "model.layers.0.mlp.extra_proj.weight", rows, width)
    draw = np.random.default_rng(1)
    factors = {
        "base_model.model.model.layers.0.mlp.extra_proj.lora_A.weight": draw.normal(size=(4, width)).astype(np.float32),
        "base_model.model.model.layers.0.mlp.extra_proj.lora_B.weight": draw.normal(size=(rows, 4)).astype(np.float32),
    }
    save_file(factors, adapter / "adapter_model.safetensors")
    done = subprocess.run(
        [sys.executable, "-c", _MERGE, str(adapter), str(base), str(tmp_path / "merged")],
        cwd=REPOSITORY, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) < 256 << 20


def _grow(path: Path, name: str, rows: int, width: int) -> None:
    """Give a tensor rows of zeros that take no place on the disk."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    header[name] = _entry("F32", [rows, width], len(body), len(body) + rows * width * 4)
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text + body)
        file.truncate(8 + len(text) + len(body) + rows * width * 4)
