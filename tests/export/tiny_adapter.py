"""Adapters in PEFT's form beside a tiny base, written tensor by tensor, and by PEFT itself."""

from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

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


def logits_by_peft(base: Path, adapter: Path, ids: list[int]):
    """What PEFT computes with an adapter beside its base, `[T, V]` float32."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with torch.inference_mode():
        return PeftModel.from_pretrained(model, adapter).eval()(input_ids=torch.tensor([ids])).logits[0]


def logits_of_folder(folder: Path, ids: list[int]):
    """What transformers computes with a whole model, `[T, V]` float32."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids])).logits[0]
