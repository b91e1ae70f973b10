"""Methods are plugins: each that the schema names is there, and one more is a module and its fragment."""

import json
import math
import sys
import types
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.engine.test_run import losses, train
from tests.objectives.tiny import resume_in_the_middle
from training.calculator import formula
from training.core.errors import Problems
from training.core.paths import REPOSITORY
from training.objectives import registry
from training.objectives.method import Method
from training.recipe import schema
from training.recipe.load import load
from training.runs.events import read_events


def test_every_method_of_the_schema_has_its_plugin():
    methods = schema.recipe_schema()["properties"]["method"]["enum"]
    assert {"pretrain", "full", "lora", "qlora"} <= set(methods) == set(schema.plugins())
    for name in methods:
        assert isinstance(registry.of(name), Method) and registry.of(name).name == name


def test_a_plugins_module_loads_no_torch():
    import subprocess

    names = ", ".join(f"training.objectives.{name}" for name in sorted(set(schema.plugins().values())))
    code = f"import sys, {names}; print('torch' in sys.modules, 'transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


@pytest.fixture
def another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A plugin that answers questions, laid beside the real ones."""
    folder = tmp_path / "objectives"
    folder.mkdir()
    for path in schema._FRAGMENTS.glob("*.schema.json"):
        (folder / path.name).write_text(path.read_text())
    own = {
        "description": "Questions.", "type": "object", "x-methods": {"ask": "the options of a question"},
        "additionalProperties": False,
        "properties": {"options": {"description": "How many.", "type": "integer", "default": 4, "minimum": 2}},
    }  # fmt: skip
    (folder / "ask.schema.json").write_text(json.dumps(own))
    monkeypatch.setattr(schema, "_FRAGMENTS", folder)
    caches = (schema.recipe_schema, schema.plugins, schema._fragments)
    for one in caches:
        one.cache_clear()

    from tests.objectives.asking import Ask

    module = types.ModuleType("training.objectives.ask")
    module.METHODS = {"ask": Ask("ask")}
    monkeypatch.setitem(sys.modules, "training.objectives.ask", module)
    yield module
    monkeypatch.undo()
    for one in caches:
        one.cache_clear()


def test_a_foreign_objective_is_built_trained_validated_and_gone_on_with(world: Path, another):
    """D1 to D4: no token is a label; a row is a question, its label one of the recipe's options."""
    recipe = world / "ask.yaml"
    recipe.write_text((world / "full.yaml").read_text().replace("method: full", "method: ask") + "ask: {options: 3}\n")
    code, run = train(recipe, "stop.max_steps=8", "checkpoint.keep=9")
    assert code == 0 and run.summary()["method"] == "ask" and run.summary()["trainable_parameters"] == 384 * 8 + 8 * 3
    assert losses(run)[1] == pytest.approx(math.log(3), abs=0.3) and losses(run)[8] < losses(run)[1]
    events = list(read_events(run.path, "step"))
    assert [event["train/tokens"] for event in events[:2]] == [4, 8]  # a label a row, four rows a window
    assert len(list(read_events(run.path, "validation"))) == 3
    assert set(load_file(run.step_folder(8) / "model.safetensors")) == {"0.weight", "1.weight"}
    resume_in_the_middle(run)


def test_one_more_plugin_touches_no_other_room(another, tmp_path: Path):
    recipe = tmp_path / "r.yaml"
    text = "name: r\nmethod: METHOD\nmodel: {base: smollm2-135m-instruct}\nstop: {max_steps: 1}\n"
    recipe.write_text(text.replace("METHOD", "ask") + "ask: {options: 3}\n")
    resolved = load(recipe)
    assert resolved.recipe.sections["ask"] == {"options": 3} and resolved.recipe.lora is None
    assert registry.of("ask") is another.METHODS["ask"]
    recipe.write_text(text.replace("METHOD", "full") + "ask: {options: 3}\n")
    with pytest.raises(Problems, match="does not belong to method full"):
        load(recipe)


def test_what_a_plugin_says_of_itself_the_other_rooms_keep_to(another, tmp_path: Path):
    """Its model, its rows, its base's type and its loss's memory: by no room's list of methods."""
    recipe, fragment = tmp_path / "r.yaml", schema._FRAGMENTS / "ask.schema.json"

    def resolved(said: dict, *overrides: str):
        fragment.write_text(json.dumps(json.loads(fragment.read_text()) | said))
        schema._fragments.cache_clear()
        schema.recipe_schema.cache_clear()
        return load(recipe, overrides)

    def problems(said: dict, *overrides: str) -> str:
        with pytest.raises(Problems) as caught:
            resolved(said, *overrides)
        return str(caught.value)

    recipe.write_text("name: r\nmethod: ask\nmodel: {base: smollm2-135m-instruct}\nstop: {max_steps: 1}\n")
    plain = (REPOSITORY / "recipes/demo/pretrain-stdlib.yaml").read_text()
    assert "starts from random weights" in problems({"x-models": ["arch"]})
    recipe.write_text(plain.replace("method: pretrain", "method: ask"))
    assert "method ask packs" in problems({"x-stream": True}, "data.packing=false")
    assert "does not fit method ask" in problems({"x-takes": ["lora"]}, "memory.weights=nf4")
    assert "does not fit method ask" in problems({"x-nf4": {"ask": False}}, "memory.weights=nf4", "lora.rank=4")
    num_logits = 2 * 256 * 4096
    found = [formula.estimate(resolved({"x-loss-bytes": each}).recipe) for each in (12, 20)]
    at_loss = [one.to_json()["instants"]["loss_backward"] for one in found]
    assert at_loss[1] - at_loss[0] == 8 * num_logits
