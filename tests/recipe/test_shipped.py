"""The recipes that are shipped: each fits the card that its header names, by the estimate that stands there."""

import re

import pytest

from training.calculator import fit, formula
from training.core.paths import REPOSITORY
from training.recipe import schema
from training.recipe.load import load

RECIPES = sorted((REPOSITORY / "recipes").glob("*/*.yaml"))
_ESTIMATE = re.compile(r"^#\s+([0-9.]+) (GiB|MiB) of (a card|this machine's memory) for rows of (\d+) tokens$", re.M)
_CARD = re.compile(r"""^#\s+estimate .*--(vram|gpu) '?([^'"]+)""", re.M)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_header_names_its_own_file_and_command(path):
    head = path.read_text().partition("\n\n")[0]
    own = str(path.relative_to(REPOSITORY))
    named = re.findall(r"CONFIG=(\S+)", head)
    assert f"make train CONFIG={own}" in head and f"make memfit CONFIG={own}" in head and set(named) == {own}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_the_estimate_in_a_header_is_the_calculators(path):
    text = path.read_text()
    number, unit, where, length = _ESTIMATE.search(text).groups()
    told = float(number) * {"GiB": 2**30, "MiB": 2**20}[unit]
    resolved = load(path)
    assert resolved.recipe.data.seq_len == int(length)
    if where == "a card":
        found = fit.fit(resolved, with_levers=False, **dict([_CARD.search(text).groups()]))
        assert found.verdict == "fits"
        estimate = found.estimate
    else:
        estimate = formula.estimate(resolved.recipe, on_cpu=True)
    assert estimate.peak.device_bytes == pytest.approx(told, abs=0.006 * {"GiB": 2**30, "MiB": 2**20}[unit])


def test_every_method_has_a_recipe_for_a_small_card_and_a_large_one():
    """10 GB and 24 GB, whichever methods there are."""
    there = {(load(path).recipe.method, card[2]) for path in RECIPES if (card := _CARD.search(path.read_text()))}
    wanted = {(method, card) for method in schema.plugins() for card in ("10GiB", "24GiB")}
    assert wanted <= there
