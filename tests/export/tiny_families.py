"""Tiny random models of the families that people fine-tune, made by transformers, every norm and bias at random."""

from pathlib import Path

from training.core import files

_SIZES = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
_LLAMA3 = {
    "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64, "rope_theta": 10000.0,
}  # fmt: skip
_YARN = {
    "rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 64,
    "rope_theta": 10000.0,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict]] = {
    "llama": ("Llama", {"rope_parameters": _LLAMA3, "tie_word_embeddings": False}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}),
    "llama-yarn": ("Llama", {"rope_parameters": _YARN, "tie_word_embeddings": False}),
    "smollm": ("Llama", {"tie_word_embeddings": True, "rope_theta": 100000.0}),
    "smollm3": ("SmolLM3", {"tie_word_embeddings": True, "num_hidden_layers": 4}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 16}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True, "use_sliding_window": False}),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": False}),
    "gemma3": ("Gemma3", {"head_dim": 32, "sliding_window": 16, "query_pre_attn_scalar": 32, "num_hidden_layers": 6}),
    "phi": ("Phi", {"partial_rotary_factor": 0.5, "num_key_value_heads": 4, "intermediate_size": 256}),
    "phi3": ("Phi3", {"sliding_window": None}),
}
"""transformers' class and what the configuration has beyond the sizes."""


def write_family(folder: Path, family: str, tokenizer: Path) -> Path:
    """Write a Hugging Face folder of a tiny random model with a byte-level tokenizer of 512 entries."""
    import torch
    import transformers
    from safetensors.torch import save_file

    kind, extra = FAMILIES[family]
    base = "Gemma3Text" if kind == "Gemma3" else kind
    config = getattr(transformers, f"{base}Config")(**{**_SIZES, **extra})
    torch.manual_seed(3)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _fill(name, parameter, centre=0.0 if kind == "Gemma3" else 1.0)
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    folder.mkdir(parents=True)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    files.write_json(folder / "config.json", config.to_dict() | {"architectures": [type(model).__name__]})
    for file in tokenizer.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def _fill(name: str, parameter, centre: float) -> None:
    if "norm" in name and name.endswith("weight"):
        parameter.uniform_(centre - 0.4, centre + 0.4)
    elif parameter.dim() == 1 or "embed" in name:
        parameter.normal_(0, 0.3)
    else:
        parameter.normal_(0, 1.3 / parameter.shape[1] ** 0.5)
