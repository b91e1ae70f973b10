"""`environment.json`: complete, without secrets, there before the engine is, and never a reason to fail."""

import os
from pathlib import Path

import pytest

from training.core import files, version
from training.engine import environment, launch, supervisor
from training.runs.folder import RunFolder


def test_it_holds_what_changes_training_and_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """R5."""
    for name in ("HF_TOKEN", "TRAINYARD_API_KEY", "CUDA_SECRET", "NCCL_password"):
        monkeypatch.setenv(name, "hush-hush")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    environment.write(tmp_path)
    text, record = (tmp_path / "environment.json").read_text(), files.read_json(tmp_path / "environment.json")
    assert "hush-hush" not in text and record["settings"]["NCCL_DEBUG"] == "INFO"
    assert record["cores"] == len(os.sched_getaffinity(0)) and record["memory"]["total_bytes"] > 1 << 28
    assert record["packages"] == version.packages() and record["tool"] == version.tool()
    assert {"gpus", "disk", "platform", "processor", "command", "container", "python"} <= record.keys()
    environment.add(tmp_path, "cpu, as asked", 3)
    added = files.read_json(tmp_path / "environment.json")
    assert added == record | {"device": "cpu, as asked", "threads": 3, "torch": added["torch"]}
    assert added["torch"]["interop_threads"] >= 1


def test_it_is_there_when_the_engine_cannot_even_start(monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> None:
        raise ImportError("a library is broken")

    run = RunFolder.create("t", {"name": "t", "method": "pretrain", "status": "waiting"})
    monkeypatch.setattr(supervisor, "train", fail)
    with pytest.raises(ImportError):
        launch._in_turn(run)
    assert files.read_json(run.path / "environment.json")["schema"] == 1 and run.status() == "failed"


def test_what_cannot_be_known_or_written_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def broken() -> None:
        raise RuntimeError("the driver hangs")

    monkeypatch.setitem(environment._PARTS, "gpus", broken)
    environment.write(tmp_path)
    assert "the driver hangs" in files.read_json(tmp_path / "environment.json")["gpus"]
    environment.write(tmp_path / "environment.json" / "no" / "folder")
    environment.add(tmp_path / "nowhere", "cpu", 1)
