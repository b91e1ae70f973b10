"""`check` says what will become of a recipe's records before anything is written."""

import json
from pathlib import Path

import pytest

from tests.data.test_longest import RECIPE
from tests.data.test_supervised import talk
from tests.data.test_tokens import make_dataset, make_tokenizer, texts
from training.cli import main
from training.data import forecast, tokens
from training.data.supervision import Settings
from training.recipe.load import load


@pytest.fixture
def made(tmp_path: Path):
    tokenizer = make_tokenizer(make_dataset(tmp_path, [{"text": text} for text in texts() if text.strip()]))
    rows = [talk(f"question {i}", f"answer {i}") | {"split": "train", "group": f"g{i}"} for i in range(30)]
    rows += [talk(f"z9 {i} " * 150, "a long one") | {"split": "train"} for i in range(3)]
    rows += [talk("v", "v") | {"split": "validation"}]
    return make_dataset(tmp_path, rows, near=0, train_ratio=0.9, val_ratio=0.1), tokenizer


def recipe(path: Path, data, tokenizer, overlong: str) -> Path:
    given = {"tokenizer": tokenizer.folder, "dataset": data.reference, "seq_len": 200, "loss_on": "assistant"}
    path.write_text(RECIPE.format(overlong=overlong, **given))
    return path


@pytest.mark.parametrize("is_counted", [False, True])
@pytest.mark.parametrize(("overlong", "words"), [("drop", "3 left out, too long"), ("left", "3 records shortened")])
def test_records_over_the_limit_are_told_from_tokens_or_by_trying(tmp_path, made, is_counted, overlong, words, capsys):
    data, tokenizer = made
    path = recipe(tmp_path / "tune.yaml", data, tokenizer, overlong)
    if is_counted:
        tokens.tokenize(data, tokenizer, Settings("assistant", 200, overlong))
    main(["check", "--config", str(path), "--json"])
    checks = json.loads(capsys.readouterr().out)["checks"]
    train, validation = (one for one in checks if one["name"] == "records")
    assert train["state"] == "warn" and train["why"].startswith(f"train, of 33 records: {words}")
    assert "train.jsonl:" in train["why"]
    assert validation == {"name": "records", "state": "ok", "why": "validation, of 1 record: each is trained as it is"}
    assert (
        f"make data-verify DATASET={data.reference}" in next(one for one in checks if one["name"] == "dataset")["why"]
    )
    assert (data.folder / "tokens").exists() == is_counted


def test_a_record_that_would_stop_training_fails_the_check(tmp_path, made, capsys):
    data, tokenizer = made
    path = recipe(tmp_path / "tune.yaml", data, tokenizer, "refuse")
    assert main(["check", "--config", str(path), "--json"]) == 2
    checks = json.loads(capsys.readouterr().out)["checks"]
    failed = next(one for one in checks if one["name"] == "records")
    assert failed["state"] == "fail" and "a record cannot be trained on (too long)" in failed["why"]


def test_of_many_records_some_are_tried_and_the_words_say_how_many(tmp_path, made, monkeypatch):
    data, tokenizer = made
    monkeypatch.setattr(forecast, "_TRIED", 10)
    resolved = load(recipe(tmp_path / "tune.yaml", data, tokenizer, "drop"), [])
    train = next(forecast.of_recipe(resolved.recipe, data, tokenizer))
    assert train.num_seen == 9 and str(train).startswith("train, of 9 looked at, of 33 records: ")


def test_a_name_of_several_data_sets_is_warned_of_with_the_one_that_it_is_now(tmp_path, made, capsys):
    data, tokenizer = made
    rows = [talk(f"another {i}", f"one {i}") | {"group": f"g{i}"} for i in range(30)]
    newest = make_dataset(tmp_path, rows, near=0, train_ratio=0.8, val_ratio=0.2)
    path = recipe(tmp_path / "tune.yaml", newest, tokenizer, "drop")
    for named, state in ((newest.name, "warn"), (newest.reference, "ok"), (data.reference, "ok")):
        main(["check", "--config", str(path), f"data.dataset={named}", "--json"])
        told = next(one for one in json.loads(capsys.readouterr().out)["checks"] if one["name"] == "dataset")
        assert told["state"] == state and ("the newest of" in told["why"]) is (state == "warn"), told
