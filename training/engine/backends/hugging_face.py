"""A recipe and its rows in the words of Hugging Face's trainers, and of those that are built on them."""

from __future__ import annotations

from training.objectives.contract import IGNORED_LABEL, Tensors
from training.recipe.model import Recipe


def example(tensors: Tensors) -> dict[str, list[int]]:
    """A row of one record as such a trainer takes it: labels stand at their own token, not at the one before."""
    ids = tensors["input_ids_BT"][0].tolist()
    labels = [IGNORED_LABEL] * (len(ids) + 1)
    for place, label in zip(tensors["trained_N"].tolist(), tensors["labels_N"].tolist(), strict=True):
        labels[place + 1] = label
    return {"input_ids": [*ids, labels[-1] if labels[-1] >= 0 else 0], "labels": labels}


def arguments(recipe: Recipe, folder: str, *, on_cpu: bool) -> dict:
    """The part of `TrainingArguments` that says what a step is; nothing is saved, reported or drawn."""
    return {
        "output_dir": folder, "per_device_train_batch_size": recipe.data.micro_batch,
        "gradient_accumulation_steps": recipe.batch.accumulate, "max_grad_norm": recipe.optimizer.grad_clip,
        "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": on_cpu, "bf16": False,
        "fp16": False, "dataloader_num_workers": 0, "seed": recipe.seeds.train,
    }  # fmt: skip
