"""Tiny random Llama checkpoints, written without torch, with a 512-entry tokenizer of their own."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from training.core import files
from training.tokenizer import pretokenizers

ENTRIES, HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, CONTEXT = 512, 64, 128, 2, 4, 2, 256
SPECIALS = ("<|bos|>", "<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>")
BASE = "tiny-base"


def text_with_numbers(lines: int = 400) -> list[str]:
    """Lines whose digits, contractions and blanks make merges across every split rule's boundary."""
    return [
        f"    def area{i}(x): return {i * 37} + 1234567 * {1900 + i}  # don't, it's {i:03d}\r\n\t\tif x == {i}:\n\n"
        for i in range(lines)
    ]


def train_tokenizer(folder: Path, pre_tokenizer: str = "llama-bpe", entries: int = ENTRIES) -> None:
    """Train a byte-level BPE that puts BOS first and write its two files."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE(ignore_merges=pretokenizers.ignores_merges(pre_tokenizer)))
    tokenizer.pre_tokenizer = pretokenizers.build(pre_tokenizer)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=entries, special_tokens=list(SPECIALS), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(text_with_numbers(), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A <|bos|> $B", special_tokens=[("<|bos|>", 0)]
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": SPECIALS[0], "eos_token": SPECIALS[1],
        "pad_token": SPECIALS[2], "add_bos_token": True, "add_eos_token": False,
        "clean_up_tokenization_spaces": False, "model_max_length": CONTEXT,
    }  # fmt: skip
    files.write_json(folder / "tokenizer_config.json", settings)


def random_weights(*, rows: int = ENTRIES, tied: bool = False, seed: int = 1) -> dict[str, np.ndarray]:
    """Random weights, large enough that every layer and every position matters in the log-probabilities."""
    draw = np.random.default_rng(seed)

    def normal(*shape: int, scale: float) -> np.ndarray:
        return draw.normal(0.0, scale, shape).astype(np.float32)

    weights = {"model.embed_tokens.weight": normal(rows, HIDDEN, scale=0.3)}
    width = HIDDEN // HEADS
    for layer in range(LAYERS):
        shapes = {
            "self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (KV_HEADS * width, HIDDEN),
            "self_attn.v_proj": (KV_HEADS * width, HIDDEN), "self_attn.o_proj": (HIDDEN, HIDDEN),
            "mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN), "mlp.down_proj": (HIDDEN, INNER),
        }  # fmt: skip
        for name, shape in shapes.items():
            weights[f"model.layers.{layer}.{name}.weight"] = normal(*shape, scale=0.8 / shape[1] ** 0.5)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{norm}.weight"] = np.ones(HIDDEN, np.float32)
    weights["model.norm.weight"] = np.ones(HIDDEN, np.float32)
    if not tied:
        weights["lm_head.weight"] = normal(rows, HIDDEN, scale=0.2)
    return weights


def write_model(folder: Path, *, weights: dict[str, np.ndarray] | None = None, tied: bool = False, **config) -> Path:
    """Write config.json and model.safetensors; `config` overrides keys of the configuration."""
    weights = random_weights(tied=tied) if weights is None else weights
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    values = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": ENTRIES, "hidden_size": HIDDEN,
        "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "tie_word_embeddings": tied, "hidden_act": "silu", "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    files.write_json(folder / "config.json", values | config)
    return folder


def edit_json(path: Path, **changes: object) -> None:
    """Change keys of a JSON file in place; None removes one."""
    value = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: entry for key, entry in value.items() if entry is not None}))


def dataset_files() -> dict[str, str]:
    lines = text_with_numbers(120)
    texts = [json.dumps({"text": "".join(lines[start : start + 3])}) + "\n" for start in range(0, 120, 3)]
    return {"train.jsonl": "".join(texts[:4]), "validation.jsonl": "".join(texts), "stats.json": "{}\n"}


def write_artifact(parent: Path, kind: str, texts: dict[str, str], digest: str | None = None) -> dict:
    digest = digest or files.sha256_json(texts)
    folder = parent / files.short(digest)
    folder.mkdir(parents=True)
    for name, text in texts.items():
        (folder / name).write_text(text)
    splits = {"train": {}, "validation": {}}
    body = {"name": parent.name, "hash": digest, "form": "text", "splits": splits, "vocab_size": ENTRIES}
    files.write_manifest(folder, kind, body)
    return {"name": parent.name, "hash": digest}
