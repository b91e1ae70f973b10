"""Full tuning: every weight of a base is trained."""

from __future__ import annotations

from training.objectives.tuning import Tuning


class Full(Tuning):
    """Trains every weight of a base."""

    def build(self, recipe, tokenizer, device, dtype):
        from training.objectives import base
        from training.objectives.trainee import Trainee

        model, record = base.load(recipe, tokenizer, device, dtype)
        return Trainee(model, record)


METHODS = {"full": Full("full")}
