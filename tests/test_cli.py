"""What is said of wrong arguments: the house's error form, by the names that a person types; and a command to paste."""

import re
import subprocess

import pytest

from training.cli import main
from training.core import paths, report


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["data-prepare", "--nme", "x"], {"found": "--nme", "expected": "did you mean --name?"}),
        (["evaluate", "x", "--split", "foo"], {"where": "--split", "found": "foo", "expected": "train, validation,"}),
        (["train", "--config", "x", "--ranks", "two"],
         {"where": "--ranks", "found": "two", "expected": "a whole number"}),
        (["data-prepare", "--cap", "much"], {"where": "--cap", "found": "much", "expected": "a share"}),
        (["serve-start", "x", "--port"], {"where": "--port", "expected": "one argument"}),
        (["evaluate"], {"expected": "CHECKPOINT", "next": "make evaluate CHECKPOINT=latest"}),
        (["memfit", "--config", "x", "--gpu", "A", "--vram", "1GiB"], {"found": "--vram", "expected": "--gpu"}),
        (["recipe", "foo"], {"where": "ACTION", "found": "foo", "expected": "ls, show"}),
        (["memfti"], {"expected": "did you mean memfit?", "next": "make"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_wrong_arguments_are_told_in_the_parts_of_an_error(arguments, parts, capsys: pytest.CaptureFixture):
    assert main(arguments) == 2
    text = capsys.readouterr().err
    for name, value in {"next": report.PROGRAM[0], **parts}.items():
        assert re.search(rf"^ +{name} +{re.escape(value)}", text, flags=re.M), text


def test_what_is_named_next_for_wrong_arguments_runs_as_it_stands():
    words = ["make", "--no-print-directory", "-o", "setup", "serve-start", "MODEL=x", "ARGS=--prt 1"]
    text = subprocess.run(words, cwd=paths.REPOSITORY, capture_output=True, text=True).stderr
    command = re.search(r"^ +next +(.+)$", text, flags=re.M)[1]
    done = subprocess.run(["bash", "-c", command], cwd=paths.REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0 and f"usage: {' '.join(report.PROGRAM)} serve-start" in done.stdout, done.stderr


def test_values_of_a_recipe_may_stand_on_both_sides_of_an_option(capsys: pytest.CaptureFixture):
    recipe = str(paths.REPOSITORY / "recipes" / "demo" / "pretrain-stdlib.yaml")
    arguments = ["memfit", "--config", recipe, "data.seq_len=64", "--vram", "8GiB", "data.micro_batch=2"]
    assert main(arguments) == 0, capsys.readouterr().err


def test_the_same_command_with_more_is_in_the_words_that_were_typed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(report.RUNNING, '["check", "--config", "my recipe.yaml", "a.b=1"]')
    monkeypatch.delenv("MAKELEVEL", raising=False)
    assert report.again("c.d=2").endswith("-m training check --config 'my recipe.yaml' a.b=1 c.d=2")
    monkeypatch.setenv("MAKELEVEL", "1")
    monkeypatch.setenv("MAKEFLAGS", r" -- CONFIG=my\ recipe.yaml ARGS=a.b=1")
    assert report.again("c.d=2", "--e") == "make check CONFIG='my recipe.yaml' ARGS='a.b=1 c.d=2 --e'"
    monkeypatch.setenv("MAKEFLAGS", r" -- CONFIG=my.yaml ARGS=--name\ x\ a.b=1")
    assert report.again("--name", "y") == "make check CONFIG=my.yaml ARGS='a.b=1 --name y'"
    monkeypatch.setenv("MAKEFLAGS", r" -- CONFIG=my\ recipe.yaml ARGS=a.b=1")
    assert report.again("a.b=2") == "make check CONFIG='my recipe.yaml' ARGS=a.b=2", "a value is refused twice"
    monkeypatch.setenv("MAKEFLAGS", " -- CONFIG=my.yaml")
    assert report.again("c.d=2") == "make check CONFIG=my.yaml ARGS=c.d=2" and report.again() == (
        "make check CONFIG=my.yaml"
    )
