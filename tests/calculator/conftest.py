"""A recipe to plan with, changed by overrides."""

from collections.abc import Callable

import pytest

from training.core.paths import REPOSITORY
from training.recipe.load import load
from training.recipe.model import Recipe

DEMO = REPOSITORY / "recipes" / "demo" / "pretrain-stdlib.yaml"


@pytest.fixture
def recipe(tmp_path) -> Callable[..., Recipe]:
    """The demo's recipe with overrides; with `base=`, one that tunes a base instead."""

    def recipe(*overrides: str, base: str | None = None, method: str = "full") -> Recipe:
        if base is None:
            return load(DEMO, overrides).recipe
        path = tmp_path / "based.yaml"
        path.write_text(f"name: based\nmethod: {method}\nmodel: {{base: {base}}}\nstop: {{max_steps: 1}}\n")
        return load(path, overrides).recipe

    return recipe
