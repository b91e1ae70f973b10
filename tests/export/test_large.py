"""The memory of an export of 8 B widths, conversion and PyTorch side: Llama 3.1 8B's matrices, holes for weights.

TRAINYARD_LARGE says of how many layers: 1 writes 1.4 GB in a minute, 32 are the whole model's shape, 8.5 GB. Memory is
that of the largest tensor, so both show the same.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from training.core import files
from training.export import speed
from training.export.checkpoint import open_checkpoint
from training.llamacpp import convert, gguf_header

NUM_LAYERS = int(os.environ.get("TRAINYARD_LARGE", "0"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(NUM_LAYERS == 0, reason="TRAINYARD_LARGE=1 asks for it"),
]
VOCAB, HIDDEN, INNER, KEYS = 128256, 4096, 14336, 1024


def _sparse(folder: Path, tokenizer: Path) -> Path:
    shapes = {
        "model.embed_tokens.weight": [VOCAB, HIDDEN], "lm_head.weight": [VOCAB, HIDDEN], "model.norm.weight": [HIDDEN]
    }  # fmt: skip
    for layer in (f"model.layers.{number}." for number in range(NUM_LAYERS)):
        shapes |= {
            f"{layer}input_layernorm.weight": [HIDDEN], f"{layer}post_attention_layernorm.weight": [HIDDEN],
            f"{layer}self_attn.q_proj.weight": [HIDDEN, HIDDEN], f"{layer}self_attn.k_proj.weight": [KEYS, HIDDEN],
            f"{layer}self_attn.v_proj.weight": [KEYS, HIDDEN], f"{layer}self_attn.o_proj.weight": [HIDDEN, HIDDEN],
            f"{layer}mlp.gate_proj.weight": [INNER, HIDDEN], f"{layer}mlp.up_proj.weight": [INNER, HIDDEN],
            f"{layer}mlp.down_proj.weight": [HIDDEN, INNER],
        }  # fmt: skip
    header, place = {}, 0
    for name, shape in shapes.items():
        size = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [place, place + size]}
        place += size
    folder.mkdir(parents=True)
    text = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + place)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB, "hidden_size": HIDDEN,
        "intermediate_size": INNER, "num_hidden_layers": NUM_LAYERS, "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False,
        "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    files.write_json(folder / "config.json", config)
    for file in tokenizer.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.mark.usefixtures("llama_cpp")
def test_a_conversion_of_8b_widths_stays_under_3_gb(tmp_path: Path, tokenizer_files: Path):
    checkpoint = open_checkpoint(str(_sparse(tmp_path / "wide", tokenizer_files)))
    (tmp_path / "work").mkdir()

    def work() -> None:
        with convert.Conversion.start(
            checkpoint.folder, {"Q8_0": tmp_path / "wide.gguf"}, tokenizer=checkpoint.tokenizer_folder,
            pre_tokenizer="llama-bpe", add_bos=True, name="wide", workspace=tmp_path / "work",
        ) as conversion:  # fmt: skip
            conversion.wait()

    took_seconds, peak_bytes = speed.watched(work)
    made = gguf_header.read(tmp_path / "wide.gguf")
    (tmp_path / "wide.gguf").unlink()
    print(f"{NUM_LAYERS} layers: peak of the conversion {peak_bytes / 1e9:.2f} GB, {took_seconds:.0f} s")
    assert made.tensor_types == {"F32": 2 * NUM_LAYERS + 1, "Q8_0": 7 * NUM_LAYERS + 2}
    assert 1 << 30 < peak_bytes < 3 * 10**9


_LOGPROBS = """
import resource, sys
from training.export import probes, reference
from training.export.checkpoint import open_checkpoint
checkpoint = open_checkpoint(sys.argv[1])
if sys.argv[2:]:
    reference.logprobs(checkpoint, [probes.Prompt([one] * 24, [8, 16, 24]) for one in range(1, 33)])
else:
    reference._empty(checkpoint)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def _peak_bytes(*arguments: str) -> int:
    command = [sys.executable, "-c", _LOGPROBS, *arguments]
    return int(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout.split()[-1])


def test_the_pytorch_side_needs_its_largest_tensor_and_500_mb(tmp_path: Path, tokenizer_files: Path):
    """Beside what PyTorch and the architecture take before a weight is read."""
    folder = str(_sparse(tmp_path / "wide", tokenizer_files))
    before, peak = _peak_bytes(folder), _peak_bytes(folder, "all")
    print(f"{NUM_LAYERS} layers: {before / 1e9:.2f} GB before the weights, {peak / 1e9:.2f} GB at most")
    assert VOCAB * HIDDEN * 2 < peak - before < VOCAB * HIDDEN * 4 + 500 * 10**6
