"""Methods are plugins: each that the schema names is there, and one more is a module and its fragment."""

import json
import sys
import types
from pathlib import Path

import pytest

from training.core.errors import Problems
from training.objectives import registry
from training.objectives.method import Method
from training.recipe import schema
from training.recipe.load import load


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

    class Ask(Method):
        def require_dataset(self, recipe, dataset): ...
        def require_tokenizer(self, recipe, tokenizer): ...
        def build(self, recipe, tokenizer, device, dtype): ...

    module = types.ModuleType("training.objectives.ask")
    module.METHODS = {"ask": Ask("ask")}
    monkeypatch.setitem(sys.modules, "training.objectives.ask", module)
    yield module
    monkeypatch.undo()
    for one in caches:
        one.cache_clear()


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
