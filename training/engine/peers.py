"""Other trainers on the very rows of a recipe, in a process of its own: `python -m training.engine.peers NAME RECIPE`.

Owns what makes the comparison fair: the same model, adapter, rows in the same order, batch, optimizer, rate, attention
and threads, no evaluation, no saving. Prints one JSON document: when each step ended, its loss, and the peak of memory.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

from training.core import process
from training.engine.backends import hugging_face
from training.recipe.load import load
from training.recipe.model import Recipe


def main(name: str, path: str) -> None:
    import torch
    import transformers

    from training.engine import device
    from training.engine.inputs import resolve_inputs, rows_of
    from training.engine.order import epoch_order, window_rows

    device.use_cores()
    transformers.utils.logging.set_verbosity_error()
    recipe = load(Path(path)).recipe
    rows = rows_of(resolve_inputs(recipe), "train", recipe)
    order = epoch_order(recipe.seeds.data, 0, rows.num_rows)[: recipe.stop.max_steps * window_rows(recipe)]
    examples = [_example(rows.batch(order[i : i + 1]).tensors, name) for i in range(len(order))]
    torch.manual_seed(recipe.seeds.train)
    with tempfile.TemporaryDirectory() as folder:
        trainer = {"trainer": _trainer, "sft": _sft}[name](recipe, examples, folder)
        trainer.train()
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    print(json.dumps({
        "ends": trainer.clock.ends, "losses": [entry["loss"] for entry in history],
        "peak_bytes": process.peak_rss_bytes(), "input_tokens": [len(one["input_ids"]) for one in examples],
    }))  # fmt: skip


def _example(tensors: dict, name: str) -> dict:
    """A row as the library takes it: of a stream every token is trained."""
    if name == "sft":
        return hugging_face.example(tensors)
    ids = tensors["input_ids_BT"][0].tolist()
    return {"input_ids": ids, "labels": ids}


def _arguments(recipe: Recipe, folder: str) -> dict:
    """What a backend is given, and what it is not: the library's own optimizer and plan."""
    return hugging_face.arguments(recipe, folder, on_cpu=True) | {
        "max_steps": recipe.stop.max_steps, "learning_rate": recipe.optimizer.lr,
        "lr_scheduler_type": recipe.schedule.kind, "warmup_steps": 0, "weight_decay": recipe.optimizer.weight_decay,
        "adam_beta1": recipe.optimizer.betas[0], "adam_beta2": recipe.optimizer.betas[1], "optim": "adamw_torch_fused",
        "gradient_checkpointing": recipe.memory.gradient_checkpointing, "logging_steps": 1,
    }  # fmt: skip


def _clocked(kind: type, **given: object):
    """A trainer of a kind that takes rows in their order and notes when each step ends."""
    import torch
    import transformers

    class InOrder(kind):
        def _get_train_sampler(self, *_: object):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    class Clock(transformers.TrainerCallback):
        def __init__(self):
            self.ends = []

        def on_step_end(self, *_: object, **__: object) -> None:
            self.ends.append(time.time())

    trainer, clock = InOrder(**given), Clock()
    trainer.add_callback(clock)
    trainer.clock = clock
    return trainer


def _trainer(recipe: Recipe, examples: list[dict], folder: str):
    import transformers

    from training.engine.inputs import resolve_inputs
    from training.objectives import architecture

    model = architecture.random(recipe, resolve_inputs(recipe).tokenizer)
    arguments = transformers.TrainingArguments(**_arguments(recipe, folder))
    return _clocked(transformers.Trainer, model=model, args=arguments, train_dataset=examples)


def _sft(recipe: Recipe, examples: list[dict], folder: str):
    import datasets
    import peft
    import transformers
    import trl

    from training.recipe import bases

    base = bases.find(recipe.model.base).folder
    model = transformers.AutoModelForCausalLM.from_pretrained(
        base, dtype="float32", attn_implementation=recipe.memory.attention, local_files_only=True
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(base, local_files_only=True)
    adapter = peft.LoraConfig(
        r=recipe.lora.rank, lora_alpha=recipe.lora.alpha, lora_dropout=recipe.lora.dropout,
        target_modules=recipe.lora.targets, task_type="CAUSAL_LM",
    )  # fmt: skip
    arguments = trl.SFTConfig(**_arguments(recipe, folder), max_length=None, packing=False)
    return _clocked(
        trl.SFTTrainer, model=model, args=arguments, train_dataset=datasets.Dataset.from_list(examples),
        processing_class=tokenizer, peft_config=adapter,
    )  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
