"""The memory of an export of 8 B widths: every matrix of Llama 3.1 8B's size, one layer of them, holes for weights.

Memory is that of the largest tensor, so one layer shows what 32 take. It writes 2.5 GB and takes minutes, so it runs
when TRAINYARD_LARGE is 1.
"""

import json
import os
from pathlib import Path

import pytest

from training.core import files
from training.export import speed
from training.export.checkpoint import open_checkpoint
from training.llamacpp import convert

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.environ.get("TRAINYARD_LARGE") != "1", reason="TRAINYARD_LARGE=1 asks for it"),
]
VOCAB, HIDDEN, INNER, KEYS = 128256, 4096, 14336, 1024


def _sparse(folder: Path, tokenizer: Path) -> Path:
    layer = "model.layers.0."
    shapes = {
        "model.embed_tokens.weight": [VOCAB, HIDDEN], "lm_head.weight": [VOCAB, HIDDEN], "model.norm.weight": [HIDDEN],
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
        "intermediate_size": INNER, "num_hidden_layers": 1, "num_attention_heads": 32, "num_key_value_heads": 8,
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

    _, peak_bytes = speed.watched(work)
    print(f"peak of the conversion: {peak_bytes / 2**30:.2f} GiB")
    assert 1 << 30 < peak_bytes < 3 * 10**9
