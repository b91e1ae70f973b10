"""Which plugin a recipe's method is: found by listing this folder, imported when it is asked for."""

from __future__ import annotations

import importlib

from training.objectives.method import Method
from training.recipe import schema


def of(name: str) -> Method:
    """The method of a name that the schema knows."""
    module = importlib.import_module(f"training.objectives.{schema.plugins()[name]}")
    return module.METHODS[name]
