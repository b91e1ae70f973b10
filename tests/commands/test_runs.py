"""`runs`: the list, one run with its curve, several beside each other, a picture, and following."""

import json
import threading
import time
from pathlib import Path

import pytest

from training.cli import main
from training.core import files
from training.runs.events import EventLog
from training.runs.folder import RunFolder


def make_run(name: str, status: str, num_steps: int, planned: int = 10) -> RunFolder:
    run = RunFolder.create(name, {"name": name, "method": "lora", "status": status, "estimate_bytes": 3 << 20})
    log = EventLog(run.path)
    log.write("start", 0, total_steps=planned)
    for step in range(1, num_steps + 1):
        values = {"train/loss_nats": 4.0 / step, "speed/tokens_per_second": 200.0, "memory/peak_bytes": 2 << 20}
        log.write("step", step, **values)
        if step % 2 == 0:
            log.write("validation", step, best=step < 6, **{"eval/loss_nats": 5.0 / min(step, 6)})
    log.close()
    return run


@pytest.fixture
def call(capsys: pytest.CaptureFixture):
    def run(*arguments: str) -> tuple[int, dict, str]:
        capsys.readouterr()
        code = main(["runs", *arguments, "--json"])
        printed = capsys.readouterr()
        return code, json.loads(printed.out), printed.err

    return run


def test_the_list_says_of_each_run_what_it_came_to(call):
    make_run("first", "completed", 8)
    lost = make_run("second", "running", 4)
    code, document, text = call()
    assert code == 0 and [row["name"] for row in document["runs"]] == ["second", "first"]
    row = document["runs"][0]
    assert (row["status"], row["steps"], row["planned_steps"], row["last_loss_nats"]) == ("lost", 4, 10, 1.0)
    assert (row["best_loss_nats"], row["best_step"], row["tokens_per_second"]) == (1.25, 4, 200.0)
    line = next(line for line in text.splitlines() if line.startswith(lost.id))
    assert line.split()[1:8] == ["lost", "lora", "4/10", "1.0000", "1.2500", "200", line.split()[7]]
    assert line.endswith("▁") and document["report"]["rows"]["lost"] == lost.id


def test_a_damaged_run_is_listed_and_hides_no_other(call):
    make_run("good", "completed", 2)
    for content in ("", "[1]", '{"id": 1}', '{"status": 5}'):
        bad = make_run("bad", "completed", 2)
        (bad.path / "run.json").write_text(content)
    code, document, _ = call()
    assert code == 0 and [row["status"] for row in document["runs"]] == ["damaged"] * 4 + ["completed"]
    assert call(document["runs"][0]["id"])[0] == 5


def test_one_run_is_shown_with_its_curve_and_what_it_needs_next(call):
    run = make_run("a", "paused", 8)
    code, document, text = call(run.id)
    assert code == 0 and "• training  × validation" in text and "step 0: begins, 10 steps planned" in text
    rows = document["report"]["rows"]
    assert rows["status"] == "paused, step 8 of 10, loss 0.5000, best 1.2500 at step 4"
    assert rows["memory"] == "peak 2.00 MiB, estimate 3.00 MiB (+50.0%)" and rows["speed"] == "200 tokens/s"
    assert rows["checkpoints"] == "none" and rows["next"] == f"make resume RUN={run.id}"
    assert document["course"] == [[step, 4.0 / step] for step in range(1, 9)]
    assert document["validation_course"] == [[2, 2.5], [4, 1.25], [6, 5 / 6], [8, 5 / 6]]


def test_a_run_without_a_step_is_shown_too(call):
    run = RunFolder.create("a", {"name": "a", "method": "lora", "status": "failed", "error": "no GPU\n  found  none"})
    code, document, _ = call(run.id)
    assert code == 0 and document["report"]["rows"]["error"].startswith("no GPU") and document["course"] == []


def test_runs_stand_beside_each_other_and_in_a_picture(call, tmp_path: Path):
    one, other = make_run("one", "completed", 8), make_run("other", "completed", 4)
    picture = tmp_path / "loss.png"
    code, document, text = call(one.id, "--with", other.id, "--plot", str(picture))
    assert code == 0 and picture.read_bytes().startswith(b"\x89PNG")
    assert f"{one.id} training" in text and f"{other.id} validation" in text
    beside = document["report"]["rows"]["with"]
    assert beside == f"{other.id}: completed, step 4 of 10, loss 1.0000, best 1.2500 at step 4"
    again = tmp_path / "again.png"
    call(one.id, "--with", other.id, "--plot", str(again))
    assert again.read_bytes() == picture.read_bytes()


@pytest.mark.parametrize("arguments", [["--plot", "x.png"], ["--follow"], ["latest", "--plot", "x.pdf"], ["nothing"]])
def test_what_cannot_be_shown_is_refused(call, arguments: list[str]):
    make_run("a", "completed", 2)
    assert call(*arguments)[0] == 2


def test_following_tells_what_happens_until_nobody_works_on_the_run(capsys: pytest.CaptureFixture):
    run = make_run("a", "running", 2)

    def work() -> None:
        with run.work():
            held.set()
            log = EventLog(run.path)
            log.write("plan", 3, total_steps=4)
            time.sleep(1.0)
            log.write("end", 4, reason="steps")
            log.close()
            run.update(status="completed")
        files.write_json(run.path / "summary.json", {"schema": 1})

    held = threading.Event()
    worker = threading.Thread(target=work)
    worker.start()
    held.wait(30)
    assert main(["runs", run.id, "--follow"]) == 0
    worker.join(30)
    text = capsys.readouterr().err
    assert "step 4: ends, by stop.max_steps" in text and text.index("step 4: ends") < text.index(f"{run.id}: completed")
