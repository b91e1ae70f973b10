"""Adapters in PEFT's form beside a tiny base, written tensor by tensor, and by PEFT itself."""

from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.export.tiny_checkpoint import edit_json
from training.core import files

RANK, ALPHA = 4, 8


def write_adapter(
    folder: Path, base: Path, *, targets=("q_proj", "down_proj"), extra: dict | None = None, **settings
) -> Path:
    """Write random factors for the modules of these names, and `extra` tensors by their whole names.

    A `rank_pattern` among the settings gives modules by their last names ranks of their own.
    """
    ranks = settings.get("rank_pattern", {})
    from safetensors import safe_open

    draw, tensors = np.random.default_rng(5), {}
    with safe_open(base / "model.safetensors", "numpy") as weights:
        names = [name for name in weights.keys() if name.split(".")[-2] in targets]  # noqa: SIM118
        shapes = {name: weights.get_slice(name).get_shape() for name in names}
    for name, (num_out, num_in) in shapes.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        rank = ranks.get(module.rpartition(".")[2], RANK)
        tensors[f"{module}.lora_A.weight"] = draw.normal(0, 0.2, (rank, num_in)).astype(np.float32)
        tensors[f"{module}.lora_B.weight"] = draw.normal(0, 0.2, (num_out, rank)).astype(np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors | (extra or {}), folder / "adapter_model.safetensors", {"format": "pt"})
    values = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(base), "r": RANK,
        "lora_alpha": ALPHA, "lora_dropout": 0.0, "target_modules": list(targets), "bias": "none",
    }  # fmt: skip
    files.write_json(folder / "adapter_config.json", values | settings)
    return folder


DAMAGED = {
    "no alpha": {"lora_alpha": None}, "alpha a text": {"lora_alpha": "8"}, "alpha true": {"lora_alpha": True},
    "no rank": {"r": None}, "rank 0": {"r": 0}, "dropout a list": {"lora_dropout": []},
    "patterns a list": {"rank_pattern": [1]}, "base a list": {"base_model_name_or_path": ["x"]},
    "targets numbers": {"target_modules": [1]}, "scalar": (), "of rank 0": (0, 64), "a vector": (64,),
    "three dimensions": (4, 64, 1), "whole numbers": "int32", "twice": "twice", "rows without ids": "rows",
}  # fmt: skip
"""What somebody may have done to an adapter: to its settings (None takes a key out), to a factor's shape, or more."""


def damage(folder: Path, case: str) -> None:
    """Do to an adapter's folder what `DAMAGED` says."""
    change, path = DAMAGED[case], folder / "adapter_model.safetensors"
    if isinstance(change, dict):
        edit_json(folder / "adapter_config.json", **change)
        return
    tensors = load_file(path)
    name = next(one for one in tensors if one.endswith("lora_A.weight"))
    if change == "twice":
        tensors[name.replace("lora_A.weight", "lora_A.default.weight")] = tensors[name]
    elif change == "rows":
        rows = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
        tensors[rows] = np.zeros((0, 64), np.float32)
        edit_json(folder / "adapter_config.json", trainable_token_indices={"embed_tokens": []})
    else:
        tensors[name] = tensors[name].astype(change) if isinstance(change, str) else np.ones(change, np.float32)
    save_file(tensors, path, {"format": "pt"})


def logits_by_peft(base: Path, adapter: Path, ids: list[int], rows: int | None = None):
    """What PEFT computes with an adapter beside its base, grown to `rows`: `[T, V]` float32."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if rows is not None:
        model.resize_token_embeddings(rows, mean_resizing=False)
    with torch.inference_mode():
        return PeftModel.from_pretrained(model, adapter).eval()(input_ids=torch.tensor([ids])).logits[0]


def logits_of_folder(folder: Path, ids: list[int]):
    """What transformers computes with a whole model, `[T, V]` float32."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids])).logits[0]
