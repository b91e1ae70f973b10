"""Other trainers on the very same rows give the very same losses, so that their times compare."""

import json
from pathlib import Path

import pytest

from tests.engine.test_run import losses, train
from tests.objectives.tiny import make_world
from training.engine import peers


def seen(name: str, recipe: Path, capsys: pytest.CaptureFixture) -> dict:
    capsys.readouterr()
    peers.main(name, str(recipe))
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


def of_the_bench(recipe: Path) -> Path:
    """The recipe without what the others do not do: no warm-up, no validation, no dropout."""
    path = recipe.with_name(f"peer-{recipe.name}")
    path.write_text(
        f"extends: {recipe.name}\nschedule: {{kind: constant, warmup: 0 steps}}\nstop: {{max_steps: 6}}\n"
        "evaluate: {every_steps: null}\n"
    )
    return path


def test_hugging_faces_trainer_sees_the_same_rows(recipe: Path, capsys: pytest.CaptureFixture):
    """It does not keep the texts of a row apart, and leaves out a row's last label: so only nearly."""
    path = of_the_bench(recipe)
    _, run = train(path)
    theirs = seen("trainer", path, capsys)
    assert theirs["losses"] == pytest.approx(list(losses(run).values()), abs=0.05)
    assert len(theirs["ends"]) == 6 and theirs["peak_bytes"] > 0


def test_trls_trainer_has_the_native_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, with_trl
):
    """T10: an untrained adapter changes nothing, so the first losses are one; the factors are drawn otherwise."""
    path = of_the_bench(make_world(tmp_path, monkeypatch) / "lora.yaml")
    path.write_text(path.read_text() + "lora: {dropout: 0}\n")
    _, run = train(path)
    own, theirs = list(losses(run).values()), seen("sft", path, capsys)["losses"]
    assert theirs[0] == pytest.approx(own[0], abs=1e-4)
    assert theirs == pytest.approx(own, abs=0.2)
