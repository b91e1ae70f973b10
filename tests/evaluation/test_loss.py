"""Evaluating a checkpoint: every token of the split, kept by identity."""

import json
from pathlib import Path

import pytest

from tests.engine.conftest import make_recipe
from training.cli import main
from training.data import tokens
from training.runs.folder import all_runs


@pytest.mark.slow
def test_a_checkpoint_is_measured_on_every_token_and_only_once(tmp_path: Path, capsys: pytest.CaptureFixture):
    recipe = make_recipe(tmp_path)
    assert main(["train", "--config", str(recipe)]) == 0
    run = all_runs()[0]
    capsys.readouterr()
    arguments = ["evaluate", str(run.step_folder(0)), run.id, "--split", "test", "--json"]
    assert main(arguments) == 0
    before, after = json.loads(capsys.readouterr().out)["records"]
    shards = next((tmp_path / "data").rglob("tokens/*/manifest.json")).parent
    split = tokens.open_split(shards, "test")
    assert before["score"]["num_bytes"] == int(split.text_bytes.sum())
    assert before["score"]["num_tokens"] == split.num_tokens - split.num_documents
    assert after["score"]["bits_per_byte"] < before["score"]["bits_per_byte"]
    assert not after["reused"] and main(arguments) == 0
    again = json.loads(capsys.readouterr().out)["records"]
    assert all(record["reused"] for record in again) and again[1]["score"] == after["score"]
