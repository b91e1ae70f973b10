"""Recipes resolved: numbers, text, duplicates, unknown keys, extends, overrides, origins, all errors at once."""

from pathlib import Path

import pytest
import yaml

from tests.recipe.conftest import VALID, problems
from training.core.errors import Problems, UserError
from training.core.paths import REPOSITORY
from training.recipe import kept
from training.recipe.load import Resolved, load

# ---- scalars


@pytest.mark.parametrize(
    ("text", "number"),
    [("1e-4", 1e-4), ("2E-5", 2e-5), ("5e-05", 5e-5), ("1.0e-1", 0.1), ("1.e-4", 1e-4), ("+1e-4", 1e-4), (".5", 0.5)],
)
def test_scientific_notation_is_a_number(write, text: str, number: float):
    """B73."""
    recipe = load(write(f"{VALID}optimizer: {{lr: {text}}}\n")).recipe
    assert recipe.optimizer.lr == number and isinstance(recipe.optimizer.lr, float)
    assert load(write(), [f"optimizer.lr={text}"]).recipe.optimizer.lr == number


@pytest.mark.parametrize("text", ["abc", '"1e-4"', "010", "1_000", "0x1f", "12:30", ".nan", ".inf", "1e999", "no", "~"])
def test_what_is_no_number_is_refused_with_the_key_and_a_good_spelling(write, text: str):
    """B73."""
    message = problems(write(f"{VALID}optimizer:\n  lr: {text}\n"))
    assert "optimizer.lr" in message and "1e-4" in message and "tiny.yaml:15" in message


@pytest.mark.parametrize("text", ["no", "on", "010", "1e3", "true", "yes"])
def test_text_stays_text(write, text: str):
    recipe = load(write(VALID.replace("name: tiny", f"name: {text}"))).recipe
    assert recipe.name == text
    assert load(write(), ["tokenizer.path=12:30"]).recipe.tokenizer.path == "12:30"


@pytest.mark.parametrize("text", ["yes", "on", "1", '"true"', "True"])
def test_a_switch_is_true_or_false(write, text: str):
    assert "true or false" in problems(write(), f"data.packing={text}")


def test_whole_numbers_may_be_written_as_1e2_and_fractions_may_not(write):
    assert load(write(), ["stop.max_steps=1e2"]).recipe.stop.max_steps == 100
    assert "a whole number" in problems(write(), "stop.max_steps=1.5")


@pytest.mark.parametrize("tag", ["!!python/object/apply:os.system [true]", "!!float 1", "!mine x", "!!binary aGk="])
def test_no_tag_is_followed(write, tag: str):
    message = problems(write(f"{VALID}optimizer: {{lr: {tag}}}\n"))
    assert "optimizer.lr" in message or "tags" in message


# ---- structure


def test_duplicate_keys_are_refused_with_both_lines_at_every_depth(write):
    """B74."""
    text = VALID.replace("data: {seq_len: 64, packing: true}", "data:\n  seq_len: 64\n  packing: true\n  seq_len: 32")
    message = problems(write(text + "name: again\n"))
    assert "duplicate key 'seq_len'" in message and "first on line 13, again on line 15" in message
    assert "duplicate key 'name'" in message and "first on line 1, again on line 17" in message


def test_merge_keys_work_and_the_own_key_wins(write):
    text = VALID.replace("stop: {max_steps: 10}", "stop: &s {max_steps: 10, max_hours: 1}\n")
    text += "checkpoint: {every_steps: 5}\nevaluate:\n  <<: {every_steps: 7, records: 3}\n  records: 9\n"
    recipe = load(write(text)).recipe
    assert (recipe.evaluate.every_steps, recipe.evaluate.records) == (7, 9)


@pytest.mark.parametrize(
    ("line", "near"),
    [
        ("learing_rate: 1e-4", "optimizer.lr (elsewhere learning_rate)"),
        ("optimizer: {learing_rate: 1e-4}", "optimizer.lr (elsewhere learning_rate)"),
        ("optimizer: {weight_decy: 0.1}", "optimizer.weight_decay"),
        ("micro_batch: 4", "data.micro_batch"),
        ("max_length: 4", "data.seq_len"),
    ],
)
def test_an_unknown_key_is_told_with_line_and_nearest(write, line: str, near: str):
    """B74."""
    message = problems(write(f"{VALID}{line}\n"))
    assert "unknown key" in message and ":14" in message and f"perhaps {near}" in message


def test_an_unknown_override_is_told_with_the_nearest(write):
    assert "perhaps optimizer.lr" in problems(write(), "optimizer.lrr=1")
    assert "dotted.key=value" in problems(write(), "nonsense")
    assert "given twice" in problems(write(), "optimizer.lr=1e-3", "optimizer={lr: 1e-4}")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "no keys"),
        ("- a\n", "no keys"),
        ("a: [1\n", "not YAML"),
        ("a: 1\n---\nb: 2\n", "not YAML"),
        ("a: &a [*a]\n", "contains itself"),
        ("[" * 3000, "nested too deeply"),
        ("? [a, b]\n: 1\n", "no plain word"),
    ],
)
def test_what_is_no_recipe_at_all_is_a_users_error(write, text: str, part: str):
    with pytest.raises(UserError) as caught:
        load(write(text))
    assert part in str(caught.value)


def test_bytes_that_are_no_text_are_a_users_error(tmp_path: Path):
    (tmp_path / "x.yaml").write_bytes(b"name: \xff\xfe\x00")
    with pytest.raises(UserError, match="1"):
        load(tmp_path / "x.yaml")


def test_everything_wrong_is_told_at_once(write):
    text = VALID.replace("hidden_size: 32", "hidden_size: 30").replace("max_steps: 10", "patience: 3")
    message = problems(write(text + "bogus: 1\noptimizer: {lr: abc, eps: 0}\n"), "schedule.warmup=often")
    for part in ("bogus", "optimizer.lr", "optimizer.eps", "schedule.warmup", "hidden_size", "never end"):
        assert part in message
    assert "(6)" in message


# ---- extends, overrides, origins


def test_extends_merges_depth_first_relative_to_the_file(write, tmp_path: Path):
    write(name="base/root.yaml")
    write("extends: root.yaml\noptimizer: {lr: 1e-3, eps: 1e-6}\n", "base/middle.yaml")
    path = write("extends: base/middle.yaml\nname: top\noptimizer: {lr: 2e-3}\n", "top.yaml")
    resolved = load(path, ["optimizer.eps=1e-5"])
    assert (resolved.recipe.name, resolved.recipe.optimizer.lr, resolved.recipe.optimizer.eps) == ("top", 2e-3, 1e-5)
    origins = resolved.origins
    assert (origins["optimizer.lr"].file, origins["optimizer.lr"].line) == (tmp_path / "top.yaml", 3)
    assert origins["model.arch.hidden_size"].file == tmp_path / "base" / "root.yaml"
    assert str(origins["optimizer.eps"]) == "command line" and str(origins["optimizer.betas"]) == "default"


def test_extends_in_a_circle_is_refused(write):
    write("extends: b.yaml\n", "a.yaml")
    message = problems(write("extends: a.yaml\n", "b.yaml"))
    assert "circle" in message and "b.yaml ->" in message and "a.yaml:1" in message


def test_a_missing_extended_recipe_is_told_where_it_is_named(write):
    assert "tiny.yaml:1" in problems(write(f"extends: nowhere.yaml\n{VALID}"))


def test_null_takes_a_value_back(write):
    write(VALID.replace("{max_steps: 10}", "{max_steps: 10, max_hours: 2}"), "base.yaml")
    path = write("extends: base.yaml\nstop: {max_hours: null}\n", "top.yaml")
    assert load(path).recipe.stop.max_hours is None and load(path).recipe.stop.max_steps == 10


def test_the_hash_is_of_the_values_alone(write):
    plain = load(write())
    assert load(write(f"# a comment\n{VALID}seeds: {{train: 42}}\n", "other.yaml")).sha256 == plain.sha256
    assert load(write(), ["seeds.train=43"]).sha256 != plain.sha256


def test_a_kept_recipe_loads_to_the_same_values_in_any_loader(write, tmp_path: Path):
    resolved = load(write(), ["optimizer.lr=1e-5", "schedule.warmup=7 steps"])
    kept.write(resolved, tmp_path / "recipe.yaml")
    assert load(tmp_path / "recipe.yaml").values == resolved.values
    assert Resolved.from_values(resolved.values).sha256 == resolved.sha256
    assert yaml.safe_load((tmp_path / "recipe.yaml").read_text()).keys() == resolved.values.keys()


def test_values_from_elsewhere_are_checked_too(write):
    values = load(write()).values
    with pytest.raises(Problems, match=r"micro_batch"):
        Resolved.from_values(values | {"data": values["data"] | {"micro_batch": 0}})


def test_the_documents_older_path_is_answered_with_the_new_one():
    with pytest.raises(UserError) as caught:
        load(Path("training/recipes/reference/pretrain-1b.yaml"))
    assert "recipes/reference/pretrain-1b.yaml" in caught.value.next_command
    assert "training/recipes" not in caught.value.next_command


@pytest.mark.parametrize("path", sorted((REPOSITORY / "recipes").glob("*/*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_that_we_ship_is_valid_and_says_its_commands(path: Path):
    load(path)
    header = [line for line in path.read_text().splitlines() if line.startswith("#")]
    shown = str(path.relative_to(REPOSITORY))
    assert any(f"make train CONFIG={shown}" in line for line in header)
    assert any(f"make memfit CONFIG={shown}" in line for line in header)


@pytest.mark.parametrize("name", ["a\\0b.yaml", "x" * 5000 + ".yaml"], ids=["null byte", "too long"])
def test_a_name_that_no_file_can_have_is_refused(tmp_path: Path, name: str):
    path = tmp_path / "r.yaml"
    path.write_text(f'name: r\nmethod: pretrain\nextends: "{name}"\n')
    with pytest.raises(Problems, match="not a file's name"):
        load(path)
    with pytest.raises(UserError, match=r"not a file's name|no such recipe"):
        load(tmp_path / name.replace("\\0", "\0"))


def test_every_default_reads_back_from_a_kept_recipe_to_the_same_hash(tmp_path: Path):
    """With no value of one's own: a run's recipe is read again when it goes on."""
    for method, weights in (("full", "bf16"), ("lora", "bf16"), ("qlora", "nf4")):
        path = tmp_path / "bare.yaml"
        path.write_text(
            f"name: bare\nmethod: {method}\nmodel: {{base: smollm2-135m-instruct}}\nmemory: {{weights: {weights}}}\n"
            "stop: {max_epochs: 3}\n"
        )
        first = load(path)
        kept.write(first, tmp_path / "kept.yaml")
        assert load(tmp_path / "kept.yaml").sha256 == first.sha256
