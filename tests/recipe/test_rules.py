"""What keys ask of each other, durations, bases, and what training asks beyond planning."""

import json
from pathlib import Path

import pytest

from tests.recipe.conftest import VALID, problems
from training.core.errors import UserError
from training.recipe import bases
from training.recipe.load import load
from training.recipe.model import Duration
from training.recipe.rules import training_problems

BASED = "name: x\nmethod: lora\nmodel: {base: smollm2-135m-instruct}\nstop: {max_steps: 1}\n"


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("model.arch.hidden_size=30", "not divisible by model.arch.num_attention_heads"),
        ("model.arch.num_key_value_heads=3", "not divisible by model.arch.num_key_value_heads"),
        ("model.arch.hidden_size=12", "even head dimension"),
        ("data.seq_len=129", "longer than the model's positions"),
        ("stop.max_steps=null", "never end"),
        ("data.packing=false", "method pretrain packs"),
        ("data.loss_on=completion", "trains every token"),
        ("memory.weights=nf4", "does not fit method pretrain"),
        ("model.base=smollm2-135m-instruct", "names one model"),
        ("model.arch=null", "names a model"),
        ("lora.rank=8", "does not belong to method pretrain"),
        ("method=lora", "starts from a base"),
    ],
)
def test_keys_that_contradict_each_other_are_told(write, override: str, part: str):
    assert part in problems(write(), override)


def test_one_slip_gives_one_message(write):
    assert "(1)" in problems(write(VALID.replace("hidden_size: 32", "hidden_size: many")))


@pytest.mark.parametrize("name", ["latest", "Qwen/Qwen3-8B@main", "smollm2-135m:latest"])
def test_a_floating_base_is_refused(write, name: str):
    message = problems(write(BASED), f"model.base={name}")
    assert "floating" in message


def test_an_unknown_base_is_told_with_the_nearest(write):
    assert "perhaps smollm2-135m-instruct" in problems(write(BASED), "model.base=smollm2-135m")


def test_an_unpinned_base_is_planned_and_not_trained(write):
    pinned = load(write(BASED), ["data.dataset=d"])
    assert training_problems(pinned) == []
    unpinned = load(write(BASED), ["model.base=qwen3-8b"])
    told = [problem.what for problem in training_problems(unpinned)]
    assert told == ["an unpinned base cannot be trained", "no data set is named"]


def test_a_config_is_found_beside_the_recipe_and_only_planned_with(write, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 32}))
    path = write(BASED.replace("{base: smollm2-135m-instruct}", "{config: config.json}"))
    resolved = load(path, ["data.seq_len=32"])
    assert resolved.recipe.model.config == tmp_path / "config.json"
    assert "for planning" in training_problems(resolved)[0].what
    assert "at most 32" in problems(path, "data.seq_len=33")
    assert "no such config.json" in problems(path, "model.config=gone.json")


def test_lora_has_its_section_and_defaults(write):
    recipe = load(write(BASED), ["lora.targets=[q_proj, v_proj]"]).recipe
    assert (recipe.lora.rank, recipe.lora.alpha, recipe.lora.targets) == (16, 32.0, ("q_proj", "v_proj"))
    assert load(write()).recipe.lora is None
    assert "lora.targets" in problems(write(BASED), "lora.targets=everything")


@pytest.mark.parametrize(
    ("text", "total", "steps"), [("5%", 400, 20), ("5%", 10, 1), ("7 steps", 400, 7), ("7 steps", 3, 3), ("0%", 9, 0)]
)
def test_a_duration_carries_its_unit(text: str, total: int, steps: int):
    assert Duration(text).steps(total) == steps


@pytest.mark.parametrize("text", ["5", "often", "5 %%", "-1 steps", "101%", "12:30"])
def test_a_warmup_without_a_unit_is_refused(write, text: str):
    assert "5%" in problems(write(), f"schedule.warmup={text}")


# ---- the file of bases


def test_the_file_of_bases_is_valid_and_pins_what_it_can():
    known = bases.load()
    assert known["smollm2-135m-instruct"].pinned and not known["qwen3-8b"].pinned
    assert all(base.licence and base.config["model_type"] for base in known.values())


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ("revision: main", "floating revision"),
        ("files: {a: 12ab}", "64 digits"),
        ("licence: null", "licence"),
        ("sha: 1", "unknown key x.sha"),
        ("source: somewhere", "hub:OWNER/NAME"),
    ],
)
def test_a_bad_base_is_told(tmp_path: Path, change: str, part: str):
    path = tmp_path / "bases.yaml"
    lines = {"source": "hub:a/b", "licence": "MIT", "config": "{model_type: llama}"}
    key, _, value = change.partition(": ")
    path.write_text("x:\n" + "".join(f"  {name}: {text}\n" for name, text in (lines | {key: value}).items()))
    with pytest.raises(UserError) as caught:
        bases.load(path)
    assert part in str(caught.value)
