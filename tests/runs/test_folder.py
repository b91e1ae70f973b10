"""The run folder without a trainer: names, status words, pointers and events."""

import os
from pathlib import Path

import pytest

from training.cli import main
from training.core import files
from training.core.errors import UserError
from training.runs.events import EventLog, read_events
from training.runs.folder import RunFolder, all_runs


def checkpoint(run: RunFolder, step: int) -> Path:
    folder = run.step_folder(step)
    with files.atomic_folder(folder) as partial:
        (partial / "model.safetensors").write_text(f"weights of {step}")
        files.write_manifest(partial, "checkpoint", {"step": step})
    return folder


@pytest.fixture
def run() -> RunFolder:
    return RunFolder.create("t", {"name": "t", "method": "pretrain"})


def test_a_new_run_is_queued_and_found_by_id_folder_and_latest(run: RunFolder):
    assert run.status() == "queued"
    for reference in (run.id, run.path, "latest"):
        assert RunFolder.open(reference).path == run.path
    with pytest.raises(UserError, match="no such run"):
        RunFolder.open("nothing")


def test_a_running_run_whose_process_is_gone_is_lost_and_stays_so(run: RunFolder):
    """B78: by the lock that it held, so that a process id which is another's by now says nothing."""
    with run.work():
        run.update(status="running")
        assert run.status() == "running" and run.worker()["pid"] == os.getpid()
        with pytest.raises(UserError, match="still running"), run.work():
            pass
    assert run.status() == "lost" and run.record()["status"] == "lost"


def test_best_is_none_when_its_folder_is_gone(run: RunFolder):
    folder = checkpoint(run, 4)
    run.point("best", 4)
    assert run.pointed("best") == folder
    (folder / "model.safetensors").write_text("other bytes, 12")
    assert run.pointed("best") is None


def test_a_line_that_a_crash_cut_short_is_passed_over(run: RunFolder):
    log = EventLog(run.path)
    log.write("step", 1, **{"train/loss_nats": 2.0})
    log.close()
    with open(run.path / "events.jsonl", "a") as file:
        file.write('{"time": 1, "event": "st')
    log = EventLog(run.path)
    log.write("step", 2, **{"train/loss_nats": 1.0})
    log.close()
    assert [event["step"] for event in read_events(run.path, "step")] == [1, 2]


def test_a_value_that_is_no_json_number_is_refused(run: RunFolder):
    log = EventLog(run.path)
    with pytest.raises(ValueError):
        log.write("step", 1, loss=float("nan"))


def test_runs_are_listed_newest_first_and_shown(run: RunFolder, capsys: pytest.CaptureFixture):
    other = RunFolder(run.path.with_name("99991231-000000-later-0000"))
    other.path.mkdir()
    files.write_json(other.path / "run.json", run.record() | {"id": other.id, "status": "paused"})
    assert [found.id for found in all_runs()] == [other.id, run.id]
    assert main(["runs"]) == 0 and main(["runs", "latest"]) == 0
    assert f"make resume RUN={other.id}" in capsys.readouterr().err


def test_of_runs_begun_in_one_second_the_last_is_the_newest():
    begun = [RunFolder.create(name, {"name": name}) for name in ("b", "a", "c", "a", "b")]
    assert [run.id for run in all_runs()] == [run.id for run in reversed(begun)]
    assert RunFolder.open("latest").id == begun[-1].id
