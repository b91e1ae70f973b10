"""This trainer's own loop, with the method's own model."""

from __future__ import annotations

from training.engine.backends.contract import Backend
from training.objectives import registry


class Native(Backend):
    def build(self, recipe, tokenizer, device, dtype):
        return registry.of(recipe.method).build(recipe, tokenizer, device, dtype)

    def loop(self, recipe, trainee, *parts):
        from training.engine.loop import Loop

        return Loop(recipe, trainee.model, *parts)


BACKEND = Native()
