"""Errors, units, paths, locks, processes and the report block."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from training.core import locks, paths, process, units
from training.core.errors import MachineError, Problems, UserError
from training.core.report import RUNNING, Report, command_line


def test_an_error_has_its_parts_on_lines_of_their_own():
    error = UserError("no such key", where="a.yaml:3", found="lerning", expected="learning", next_command="make recipe")
    assert str(error).splitlines() == [
        "no such key", "  where    a.yaml:3", "  found    lerning", "  expected learning", "  next     make recipe",
    ]  # fmt: skip
    assert error.to_json()["exit_code"] == 2


def test_problems_are_told_at_once():
    problems = Problems("recipe refused", [UserError("one"), UserError("two")])
    assert "recipe refused (2)" in str(problems) and "- one" in str(problems) and "- two" in str(problems)
    assert [problem["what"] for problem in problems.to_json()["problems"]] == ["one", "two"]


@pytest.mark.parametrize(
    ("text", "count"), [("10GiB", 10 << 30), ("10 GB", 10**10), ("4096B", 4096), ("1.5 KiB", 1536), ("2MB", 2_000_000)]
)
def test_sizes_are_read(text: str, count: int):
    assert units.parse_bytes(text) == count


@pytest.mark.parametrize("text", ["ten", "10 gb", "", "1.2.3 GB"])
def test_what_is_no_size_is_refused(text: str):
    with pytest.raises(UserError, match="not a size"):
        units.parse_bytes(text)


@pytest.mark.parametrize("text", ["12", "4096", "1.5"])
def test_a_size_without_a_unit_is_refused(text: str):
    with pytest.raises(UserError, match="a size without a unit") as caught:
        units.parse_bytes(text, "--vram")
    assert caught.value.where == "--vram" and caught.value.expected.endswith(f"such as {text}GiB")


def test_quantities_are_written_for_people():
    assert units.format_bytes(1536) == "1.50 KiB" and units.format_bytes(12) == "12 B"
    assert units.format_number(1, "cluster") == "1 cluster" and units.format_number(2000, "token") == "2,000 tokens"
    assert units.format_seconds(75) == "1 min 15 s" and units.format_seconds(3725) == "1 h 02 min"


def test_both_spellings_name_one_model(own_roots: Path):
    model = own_roots / "models" / "a.gguf"
    model.parent.mkdir(parents=True)
    model.write_bytes(b"x")
    assert paths.model_path("/app/models/a.gguf") == paths.model_path(str(model)) == model.resolve()
    assert str(paths.container_path(model)) == "/app/models/a.gguf"


@pytest.mark.parametrize("text", ["/app/models/../../secret", "/etc/passwd", "link.gguf"])
def test_a_model_outside_its_root_is_refused(own_roots: Path, text: str):
    (own_roots / "models").mkdir(parents=True)
    (own_roots / "models" / "link.gguf").symlink_to("/etc/passwd")
    reference = str(own_roots / "models" / text) if text == "link.gguf" else text
    with pytest.raises(UserError, match="outside its root"):
        paths.model_path(reference)


def test_a_held_lock_names_its_holder_and_is_free_when_the_holder_is_killed(tmp_path: Path):
    lock = tmp_path / "a.lock"
    code = (
        "import sys, time; from pathlib import Path; from training.core import locks\n"
        "with locks.hold(Path(sys.argv[1]), 'training x'):\n"
        "    print('held', flush=True); time.sleep(60)"
    )
    environment = os.environ | {RUNNING: '["train", "--config", "x.yaml"]', "MAKELEVEL": ""}
    child = subprocess.Popen([sys.executable, "-c", code, str(lock)], stdout=subprocess.PIPE, env=environment)
    assert child.stdout.readline() == b"held\n"
    assert locks.holder(lock)["pid"] == child.pid
    who = rf"training x \(process {child.pid}, \S+ -m training train --config x.yaml, for \d"
    with pytest.raises(MachineError, match=who), locks.hold(lock, "me", wait_seconds=0):
        pass
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert locks.holder(lock) is None
    with locks.hold(lock, "me", wait_seconds=0):
        pass


def test_a_reused_process_id_is_another_process():
    me = process.identity()
    assert process.is_running(me)
    assert not process.is_running(me | {"started": me["started"] + "0"})
    assert not process.is_running(None)


def test_the_report_block_is_complete_and_has_no_home_in_it(tmp_path: Path, capsys: pytest.CaptureFixture):
    report = Report(["memfit", "--config", "a.yaml"])
    report.add("file", Path.home() / "x")
    report.fail("FAIL", 4)
    report.publish(tmp_path)
    text = capsys.readouterr().err
    assert text.startswith("--- trainyard report: paste this back ---\n") and text.endswith("--- end of report ---\n")
    assert "python -m training memfit --config a.yaml" in text and "FAIL (exit 4)" in text
    assert str(Path.home()) not in text and "~/x" in text
    kept = json.loads(next(tmp_path.glob("*-memfit-*.json")).read_text())
    assert kept["exit_code"] == 4 and kept["rows"]["file"] == "~/x"


def test_a_row_that_is_there_gets_a_line_more():
    report = Report(["check"])
    for told in ("train: warn", "validation: ok"):
        report.add("records", told)
    assert report.rows == {"records": "train: warn\nvalidation: ok"}


def test_the_report_names_the_make_command_with_its_variables(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MAKELEVEL", "1")
    monkeypatch.setenv("MAKEFLAGS", r"s -- ARGS=a.b=1\ --json CONFIG=x.yaml")
    assert command_line(["memfit", "--config", "x.yaml"]) == "make memfit ARGS='a.b=1 --json' CONFIG=x.yaml"


def test_an_unknown_command_is_answered_with_the_nearest():
    run = [sys.executable, "-m", "training", "memfti"]
    done = subprocess.run(run, capture_output=True, text=True, cwd=paths.REPOSITORY, env=os.environ)
    assert done.returncode == 2 and "did you mean memfit?" in done.stderr
