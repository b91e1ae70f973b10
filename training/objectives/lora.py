"""LoRA and QLoRA: an adapter is trained beside a frozen base, which QLoRA holds in NF4."""

from __future__ import annotations

from training.objectives.tuning import Tuning


class Adapters(Tuning):
    """Trains an adapter on a frozen base."""

    def build(self, recipe, tokenizer, device, dtype):
        import torch

        from training.objectives import base

        model, record = base.load(recipe, tokenizer, device, dtype)
        torch.manual_seed(recipe.seeds.train)
        return self._adapted(recipe, model, record)

    def imagine(self, recipe, device, dtype):
        from training.objectives import architecture

        model = architecture.blank(recipe, dtype).to(device)
        if recipe.memory.weights == "nf4":
            from training.objectives import nf4

            nf4.pack(model, device, dtype)
        return self._adapted(recipe, model, None)

    def _adapted(self, recipe, model, record):
        from training.objectives import adapter

        names = adapter.attach(model, recipe.lora, recipe.memory.adapter_dtype)
        quantization = "nf4" if recipe.memory.weights == "nf4" else None
        return adapter.AdapterTrainee(model, record, recipe.lora, names, quantization)


METHODS = {"lora": Adapters("lora"), "qlora": Adapters("qlora")}
