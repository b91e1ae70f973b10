"""TRL's SFTTrainer, with PEFT's adapters. `make setup EXTRA=trl` brings it."""

from __future__ import annotations

from training.core.report import again
from training.engine.backends import contract


class Trl(contract.Backend):
    packages = ("trl", "datasets")

    def problems(self, resolved):
        return contract.missing(
            "trl", self.packages, f"make setup EXTRA=trl && RUNTIME=local {again()}"
        ) + contract.foreign_problems(resolved)

    def build(self, recipe, tokenizer, device, dtype):
        from training.engine.backends import peft_trainee
        from training.objectives import base

        model, record = base.load(recipe, tokenizer, device, dtype)
        return peft_trainee.of(model, record, recipe)

    def loop(self, recipe, trainee, *parts):
        from training.engine.backends.sft import SftLoop

        return SftLoop(recipe, trainee, *parts)


BACKEND = Trl()
