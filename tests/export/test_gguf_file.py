"""The facts and the two hashes of a GGUF, on files written here by gguf-py."""

import hashlib
from pathlib import Path

import gguf
import numpy as np
import pytest

from training.core import files
from training.core.errors import IntegrityError
from training.export import gguf_file


def _write(path: Path, *, name: str = "tiny", value: float = 1.0, type_: type = np.float32, order: str = "ab") -> Path:
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name(name)
    writer.add_context_length(64)
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(["a", "b", "c"])
    writer.add_add_bos_token(True)
    writer.add_bos_token_id(0)
    tensors = {"a": np.full((3, 32), value, type_), "b": np.arange(7, dtype=np.float32)}
    for key in order:
        writer.add_tensor(f"{key}.weight", tensors[key])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_facts_are_those_of_the_file(tmp_path: Path):
    path = _write(tmp_path / "a.gguf", type_=np.float16)
    facts = gguf_file.inspect(path)
    assert facts.sha256 == files.sha256_file(path) and facts.bytes == path.stat().st_size
    assert (facts.architecture, facts.vocab_size, facts.context_length, facts.parameters) == ("llama", 3, 64, 103)
    assert facts.tensor_types == {"F16": 1, "F32": 1}
    assert (facts.pre_tokenizer, facts.add_bos, facts.bos_id, facts.eos_id) == ("llama-bpe", True, 0, None)
    assert facts.chat_template is None and "output.weight" not in facts.tensor_names


def test_tensor_hash_is_over_name_type_shape_and_data_in_file_order(tmp_path: Path):
    path = _write(tmp_path / "a.gguf")
    digest = hashlib.sha256()
    digest.update(b'["a.weight","F32",[32,3]]\n' + np.full((3, 32), 1.0, np.float32).tobytes())
    digest.update(b'["b.weight","F32",[7]]\n' + np.arange(7, dtype=np.float32).tobytes())
    assert gguf_file.inspect(path).tensor_sha256 == digest.hexdigest()


def test_another_display_name_changes_the_file_and_not_the_tensors(tmp_path: Path):
    """B61."""
    one, two = (gguf_file.inspect(_write(tmp_path / f"{name}.gguf", name=name)) for name in ("one", "two, longer"))
    assert one.sha256 != two.sha256 and one.tensor_sha256 == two.tensor_sha256


def test_value_type_and_order_change_the_tensor_hash(tmp_path: Path):
    variants = [{}, {"value": 1.5}, {"type_": np.float16}, {"order": "ba"}]
    hashes = {
        gguf_file.inspect(_write(tmp_path / f"{number}.gguf", **variant)).tensor_sha256
        for number, variant in enumerate(variants)
    }
    assert len(hashes) == len(variants)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a model at all" * 10], ids=["empty", "cut", "text"])
def test_what_is_no_gguf_is_refused(tmp_path: Path, content: bytes):
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(IntegrityError, match="not a whole GGUF"):
        gguf_file.inspect(path)
