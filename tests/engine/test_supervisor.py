"""The supervisor over engines that hang, die and obey; none of them imports torch."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from training.core import locks, memory_kills, paths, queue
from training.core.errors import IntegrityError, MachineError, RunError, Terminated
from training.engine import launch, supervisor
from training.engine.pulse import Beat, Pulse
from training.recipe import bases
from training.runs.events import read_events
from training.runs.folder import RunFolder

REAL_TRAIN = supervisor.train
QUICK = supervisor.Limits(loading=20.0, step=0.6, times_longest=3.0)
FAKE = """\
import os, signal, sys, time
from pathlib import Path
from training.engine import child
from training.engine.pulse import Pulse
from training.runs.folder import RunFolder

def train(run, pulse):
    run.update(status="running")
    with open(run.path / "engines", "a") as file:
        print(os.getpid(), file=file)
    attempt = len((run.path / "engines").read_text().split())
{body}

from training.engine import launch
launch.train = train
sys.exit(child.main(*sys.argv[1:]))
"""


@pytest.fixture
def run() -> RunFolder:
    return RunFolder.create("t", {"name": "t", "method": "pretrain", "status": "waiting"})


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_POLL_SECONDS", 0.1)
    monkeypatch.setattr(supervisor, "train", lambda run, held: REAL_TRAIN(run, held, QUICK))


def engine(monkeypatch: pytest.MonkeyPatch, folder: Path, body: str) -> None:
    """Let the supervisor start an engine whose training is this."""
    script = folder / "engine.py"
    script.write_text(FAKE.format(body=textwrap.indent(textwrap.dedent(body), "    ")))
    monkeypatch.setattr(supervisor, "ENGINE", (sys.executable, str(script)))
    monkeypatch.setenv("PYTHONPATH", str(paths.REPOSITORY))


def engines(run: RunFolder) -> list[int]:
    return [int(pid) for pid in (run.path / "engines").read_text().split()]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_the_summary_comes_back_and_no_empty_file_of_stacks_stays(run, tmp_path, monkeypatch):
    engine(monkeypatch, tmp_path, "return {'steps': 3}")
    assert launch._in_turn(run) == {"steps": 3}
    assert (
        not (run.path / "stacks.log").exists() and run.worker() is None and locks.holder(locks.machine_lock()) is None
    )


def test_what_helps_an_engine_that_goes_on_is_a_new_run_of_its_recipe(run, tmp_path, monkeypatch):
    """`resume` takes no value of a recipe."""
    body = """
    from training.core.errors import MachineError
    from training.core.report import again
    raise MachineError("no bfloat16", next_command=again("memory.weights=fp32"))
    """
    engine(monkeypatch, tmp_path, body)
    monkeypatch.setenv("MAKELEVEL", "1")
    monkeypatch.setenv("MAKEFLAGS", " -- RUN=latest")
    for words, command in (
        ('["resume", "latest"]', f"-m training train --config {run.path}/recipe.yaml memory.weights=fp32"),
        ('["train", "--config", "x.yaml"]', "make train RUN=latest ARGS=memory.weights=fp32"),
    ):
        monkeypatch.setenv("TRAINYARD_COMMAND", words)
        with pytest.raises(MachineError) as caught:
            launch._in_turn(run)
        assert caught.value.next_command.endswith(command)


def test_an_error_of_the_engine_is_raised_as_it_was(run, tmp_path, monkeypatch):
    body = """
    from training.core.errors import IntegrityError
    raise IntegrityError("bytes differ", where="a/b", found="1", expected="2", next_command="make runs")
    """
    engine(monkeypatch, tmp_path, body)
    with pytest.raises(IntegrityError) as caught:
        launch._in_turn(run)
    error = caught.value
    assert (error.what, error.where, error.found, error.expected, error.next_command, error.exit_code) == (
        "bytes differ", "a/b", "1", "2", "make runs", 5,
    )  # fmt: skip
    assert run.status() == "failed" and "bytes differ" in run.record()["error"]


def test_silence_writes_all_stacks_and_starts_again_at_most_twice(run, tmp_path, monkeypatch):
    """D8: three engines in all, each one's stacks in the run's folder, each restart an event."""
    body = """
    pulse.beat("step", 7)
    def the_line_that_hangs():
        time.sleep(60)
    the_line_that_hangs()
    """
    engine(monkeypatch, tmp_path, body)
    with pytest.raises(RunError, match="the engine hangs") as caught:
        launch._in_turn(run)
    assert "step, step 7" in caught.value.found and caught.value.next_command == f"make resume RUN={run.id}"
    assert (run.path / "stacks.log").read_text().count("the_line_that_hangs") == 3
    assert [(one["number"], one["step"], one["stage"]) for one in read_events(run.path, "restart")] == [
        (1, 7, "step"), (2, 7, "step"),
    ]  # fmt: skip
    assert len(engines(run)) == 3 and not any(map(is_alive, engines(run))) and run.status() == "failed"


def test_an_engine_that_hangs_once_is_gone_on_with(run, tmp_path, monkeypatch):
    body = """
    pulse.beat("step", 1)
    if attempt == 1:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(60)
    return {"steps": 9}
    """
    engine(monkeypatch, tmp_path, body)
    assert launch._in_turn(run) == {"steps": 9} and len(engines(run)) == 2


def test_a_long_stage_that_moves_is_left_alone(run, tmp_path, monkeypatch):
    body = """
    for step in range(12):
        pulse.beat("step", step)
        time.sleep(0.15)
    return {"steps": 12}
    """
    engine(monkeypatch, tmp_path, body)
    assert launch._in_turn(run) == {"steps": 12} and len(engines(run)) == 1


def test_what_was_slow_before_may_be_slow_again():
    """D7: the stage's floor, else a multiple of the longest wait that was seen."""
    limits = supervisor.Limits()
    assert limits.of(Beat(0.0, 1.0, "step", 5)) == 900.0 and limits.of(Beat(0.0, 200.0, "step", 5)) == 2000.0
    assert {limits.of(Beat(0.0, 0.0, stage, 0)) for stage in ("loading", "first step", "validation", "saving")} == {
        1800
    }


def test_the_longest_wait_of_a_stage_is_remembered():
    pulse = Pulse.create()
    for stage, wait in (("step", 0), ("step", 0.05), ("validation", 0), ("step", 0), ("step", 0.01)):
        time.sleep(wait)
        pulse.beat(stage, 4)
    beat = Pulse(os.dup(pulse.descriptor)).last()
    assert beat.stage == "step" and beat.step == 4 and beat.longest_seconds >= 0.05


def test_an_engine_killed_from_outside_is_told_with_what_is_known_of_memory(run, tmp_path, monkeypatch):
    engine(monkeypatch, tmp_path, "pulse.beat('step', 3); os.kill(os.getpid(), signal.SIGKILL)")
    counts = iter([4, 5])
    monkeypatch.setattr(memory_kills, "count", lambda: next(counts))
    with pytest.raises(RunError, match="ended by SIGKILL") as caught:
        launch._in_turn(run)
    assert "ended a process for want of memory" in caught.value.found and "held" in caught.value.found
    assert caught.value.where == "step, step 3" and run.status() == "failed"


def test_a_crash_of_native_code_leaves_its_stack(run, tmp_path, monkeypatch):
    engine(monkeypatch, tmp_path, "import ctypes; ctypes.string_at(0)")
    with pytest.raises(RunError, match="ended by SIGSEGV") as caught:
        launch._in_turn(run)
    assert caught.value.where.endswith("stacks.log") and "Segmentation fault" in (run.path / "stacks.log").read_text()


def test_an_exit_without_a_word_is_told_with_its_status(run, tmp_path, monkeypatch):
    engine(monkeypatch, tmp_path, "os._exit(7)")
    with pytest.raises(RunError, match="without a word") as caught:
        launch._in_turn(run)
    assert "exit status 7" in caught.value.found


WORK = """
import sys
sys.path.insert(0, {repository!r})
from training.engine import launch, supervisor
from training.runs.folder import RunFolder
from training.core import signals
signals.raise_terminated()
supervisor.ENGINE = (sys.executable, {script!r})
try:
    print(launch._in_turn(RunFolder(__import__("pathlib").Path({run!r}))))
except KeyboardInterrupt as interrupt:
    print(type(interrupt).__name__, getattr(interrupt, "signal_name", ""), interrupt)
"""
OBEDIENT = """
heard = []
def hear(number, frame):
    heard.append(signal.Signals(number).name)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, hear)
(run.path / "ready").touch()
while not heard:
    pulse.beat("step", 5)
    time.sleep(0.02)
time.sleep(0.5)
(run.path / "heard").write_text(" ".join(heard))
run.update(status="paused")
raise child.signals.interruption(heard[0], "saved")
"""


def supervised(run: RunFolder, folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> subprocess.Popen:
    """A supervisor in a process of its own, in a group of its own as a shell's job is; returns when its engine is."""
    engine(monkeypatch, folder, body)
    code = WORK.format(script=str(folder / "engine.py"), run=str(run.path), repository=str(paths.REPOSITORY))
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0
    )
    deadline = time.monotonic() + 60
    while not (run.path / "ready").exists():
        assert time.monotonic() < deadline and child.poll() is None
        time.sleep(0.02)
    return child


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_reaches_the_engine_once_and_is_told_by_its_name(name, run, tmp_path, monkeypatch):
    """Also where a terminal sends it to the whole group: the engine has one of its own."""
    child = supervised(run, tmp_path, monkeypatch, OBEDIENT)
    os.killpg(child.pid, getattr(signal, name))
    kind = "KeyboardInterrupt " if name == "SIGINT" else f"Terminated {name}"
    assert child.communicate(timeout=60)[0].strip() == f"{kind} saved" and run.status() == "paused"
    assert (run.path / "heard").read_text() == name


DEAF = """
signals = {signal.SIGINT, signal.SIGTERM}
signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # as in a long call of torch's
from training.engine.requests import Requests
requests = Requests(run.path)
with requests.listening():
    (run.path / "ready").touch()
    while not (run.path / "computed").exists():
        time.sleep(0.02)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    while not requests.pending():
        time.sleep(0.02)
run.update(status="paused")
raise child.signals.interruption(requests.signal, "saved")
"""


@pytest.mark.parametrize(("num_signals", "what"), [(1, "saved"), (2, "")])
def test_what_a_signal_does_is_said_before_the_engine_hears_it(num_signals, what, run, tmp_path, monkeypatch):
    """And a second one stops it, also where both wait to be heard."""
    child = supervised(run, tmp_path, monkeypatch, DEAF)
    for words in ("stops after this step, saved", "again: the run stops without saving")[:num_signals]:
        child.send_signal(signal.SIGINT)
        assert words in child.stderr.readline()
    (run.path / "computed").touch()
    ending = f"KeyboardInterrupt  {what or f'next: make resume RUN={run.id}'}"
    assert child.communicate(timeout=60)[0].strip() == ending and run.status() == "paused"


def test_an_engine_that_hears_nothing_is_killed_by_the_third_signal(run, tmp_path, monkeypatch):
    body = """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    (run.path / "ready").touch()
    while True:
        pulse.beat("step", 5)
        time.sleep(0.02)
    """
    child = supervised(run, tmp_path, monkeypatch, body)
    num_sent = 0
    while child.poll() is None:  # two that come at once on a busy machine are one
        assert num_sent < 60
        child.send_signal(signal.SIGTERM)
        num_sent += 1
        time.sleep(0.5)
    assert num_sent >= 3 and not is_alive(*engines(run))
    assert child.communicate()[0].startswith("Terminated SIGTERM") and run.status() == "paused"


def test_an_engine_ends_with_its_supervisor_and_the_run_is_lost(run, tmp_path, monkeypatch):
    """B78: kill -9 of the supervisor; the machine and the run are free again as soon as the engine is gone."""
    child = supervised(run, tmp_path, monkeypatch, OBEDIENT)
    (pid,) = engines(run)
    assert run.status() == "running" and locks.holder(locks.machine_lock()) is not None
    child.kill()
    child.wait()
    deadline = time.monotonic() + 30
    while is_alive(pid) or run.worker():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert run.status() == "lost" and locks.holder(locks.machine_lock()) is None


# ---- several processes


@pytest.fixture
def pair(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run that two processes train; the one that is left over is not waited for long."""
    run.update(parallel={"kind": "ddp", "ranks": 2})
    monkeypatch.setattr(supervisor, "_FAREWELL_SECONDS", 0.5)
    return run


def test_two_processes_are_told_who_they_are_and_the_first_ones_summary_counts(pair, tmp_path, monkeypatch):
    body = """
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TRAINYARD_MEETING")
    found = {name: os.environ[name] for name in names}
    return found if os.environ["RANK"] == "0" else {}
    """
    engine(monkeypatch, tmp_path, body)
    found = launch._in_turn(pair)
    assert found.pop("TRAINYARD_MEETING").startswith("file:///") and len(engines(pair)) == 2
    assert found == {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}


def test_a_process_that_dies_ends_the_others_and_is_the_one_that_is_told(pair, tmp_path, monkeypatch):
    """The first one hangs in what it does together with the one that is gone."""
    body = """
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        pulse.beat("step", 3)
        time.sleep(0.05)
    """
    engine(monkeypatch, tmp_path, body)
    with pytest.raises(RunError, match="ended by SIGKILL") as caught:
        launch._in_turn(pair)
    assert caught.value.where == "step, step 3" and "process 1 of 2" in caught.value.found
    assert not any(map(is_alive, engines(pair))) and pair.status() == "failed"


def test_an_error_of_one_process_is_told_and_not_what_it_did_to_the_other(pair, tmp_path, monkeypatch):
    body = """
    if os.environ["RANK"] == "1":
        from training.core.errors import MachineError
        raise MachineError("no room here")
    from training.engine import parallel
    raise RuntimeError("[/x/gloo/transport/tcp/pair.cc:1] Connection closed by peer")
    """
    engine(monkeypatch, tmp_path, body)
    with pytest.raises(MachineError, match="no room here"):
        launch._in_turn(pair)


def test_silence_of_two_processes_writes_the_stacks_of_both_and_starts_both_again(pair, tmp_path, monkeypatch):
    body = """
    def the_line_that_hangs():
        time.sleep(60)
    if attempt <= 2:
        while len((run.path / "engines").read_text().split()) < 2:
            time.sleep(0.02)
        pulse.beat("step", 7)
        the_line_that_hangs()
    return {"steps": 9}
    """
    engine(monkeypatch, tmp_path, body)
    assert launch._in_turn(pair) == {"steps": 9} and len(engines(pair)) == 4
    assert (pair.path / "stacks.log").read_text().count("the_line_that_hangs") == 2


def test_a_signal_goes_to_the_first_process_alone(pair, tmp_path, monkeypatch):
    body = """
    if os.environ["RANK"] == "1":
        while not (run.path / "heard").exists():
            time.sleep(0.02)
        return {}
    """
    child = supervised(pair, tmp_path, monkeypatch, textwrap.dedent(body) + OBEDIENT)
    child.send_signal(signal.SIGTERM)
    assert child.communicate(timeout=60)[0].strip() == "Terminated SIGTERM saved" and pair.status() == "paused"


def test_a_signal_while_waiting_leaves_the_run_paused(run, monkeypatch):
    def interrupted(*_, **__):
        raise Terminated(signal_name="SIGHUP")

    monkeypatch.setattr(queue, "_wait_to_be_first", interrupted)
    with pytest.raises(Terminated):
        launch._in_turn(run)
    assert run.status() == "paused" and queue.waiting() == [] and run.worker() is None


def test_the_counter_of_kills_is_read_of_either_kind_of_control_group(tmp_path):
    first, second = tmp_path / "v2", tmp_path / "v1"
    (first / "a").mkdir(parents=True)
    (first / "a" / "memory.events").write_text("low 0\noom 3\noom_kill 2\n")
    member = tmp_path / "cgroup"
    member.write_text("0::/a\n")
    assert memory_kills.count(first, member) == 2
    (second / "memory" / "b").mkdir(parents=True)
    (second / "memory" / "b" / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 9\n")
    member.write_text("4:memory:/b\n0::/\n")
    assert memory_kills.count(second, member) == 9
    assert json.dumps(memory_kills.count())  # of this very machine: a number or null


LIGHT = """
import sys
from pathlib import Path
from training.engine import launch, supervisor
from training.recipe import bases
from training.recipe.load import load
supervisor.train = lambda run, held: {}
bases.FILE = Path(sys.argv[1])
for recipe in sys.argv[2:]:
    launch.start(load(Path(recipe)))
print([name for name in ("torch", "transformers") if name in sys.modules])
"""


def test_all_that_comes_before_the_engine_needs_no_torch(recipe: Path):
    """The recipe, memory, data, tokens and the queue; so an engine costs its own imports and no others."""
    assert imported_by_launching(recipe) == "[]"


def imported_by_launching(*recipes: Path) -> str:
    """What a process that starts these recipes, one after another, has imported of what is heavy."""
    command = [sys.executable, "-c", LIGHT, str(bases.FILE), *map(str, recipes)]
    done = subprocess.run(command, cwd=paths.REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
