"""The server as a process: readiness, early death, ports, and that none is ever left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.llamacpp import tiny_gguf
from training.core import process
from training.core.errors import MachineError, RunError
from training.core.paths import REPOSITORY
from training.llamacpp.client import Client
from training.llamacpp.server import ServerProcess, find, free_port, port_holder

STUB = Path(__file__).with_name("stub_server.py")


def stub(tmp_path: Path, mode: str, refuse_seconds: float, loading_seconds: float = 0.0) -> ServerProcess:
    port = free_port()
    words = [STUB, port, mode, refuse_seconds, loading_seconds, tmp_path / "asked"]
    return ServerProcess._spawn([sys.executable, *map(str, words)], port, tmp_path / "log", detached=False)


def test_b62_refused_and_503_mean_wait_and_no_prompt_is_sent_before(tmp_path: Path):
    with stub(tmp_path, "ready", 0.4, 0.6) as server:
        waited = server.wait_healthy(10)
    assert 0.9 < waited < 3
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked[-1] == "GET /health 200" and "GET /health 503" in asked
    assert {line.split()[1] for line in asked} == {"/health"}


def test_b62_an_exit_is_a_failure_at_once_with_the_last_lines(tmp_path: Path):
    started = time.monotonic()
    with stub(tmp_path, "dies", 0.5) as server, pytest.raises(RunError, match="ended with status 3") as caught:
        server.wait_healthy(60)
    assert time.monotonic() - started < 3
    assert "out of memory while loading" in str(caught.value)


def test_b62_never_healthy_fails_at_the_deadline(tmp_path: Path):
    seen = []
    with stub(tmp_path, "never", 0) as server, pytest.raises(RunError, match="not healthy within"):
        server.wait_healthy(1, on_wait=lambda seconds, state: seen.append(state))
    assert "loading" in seen
    assert not server.is_running()


def test_a_foreign_server_on_the_port_is_not_taken_for_ours(tmp_path: Path):
    with stub(tmp_path, "ready", 0) as other:
        other.wait_healthy(10)
        words = [sys.executable, "-c", "import time; time.sleep(30)"]
        ours = ServerProcess._spawn(words, other.port, tmp_path / "log2", detached=False)
        with ours, pytest.raises(RunError, match="not healthy within"):
            ours.wait_healthy(0.3)


def test_a_port_in_use_is_told_with_its_holder(tmp_path: Path):
    with stub(tmp_path, "ready", 0) as other:
        other.wait_healthy(10)
        with pytest.raises(MachineError, match=f"port {other.port} is in use") as caught:
            ServerProcess.start(tmp_path / "m.gguf", port=other.port, log=tmp_path / "log2", ctx_size=64)
        assert f"process {other.identity['pid']}" in str(caught.value) and "stub_server.py" in str(caught.value)
        assert caught.value.exit_code == 3
    assert port_holder(other.port) is None


def test_a_model_that_cannot_be_loaded_is_told_with_the_reason(tmp_path: Path):
    whole = tiny_gguf.write(tmp_path / "whole.gguf", seed=1)
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    started = time.monotonic()
    server = ServerProcess.start(cut, log=tmp_path / "log", ctx_size=64, threads=1)
    with server, pytest.raises(RunError, match="ended with status 1") as caught:
        server.wait_healthy(60)
    assert time.monotonic() - started < 3
    assert "not within the file bounds" in str(caught.value) and f"cannot serve {cut}" in str(caught.value)


def test_the_last_lines_are_those_of_this_start(tmp_path: Path):
    (tmp_path / "log").write_text("an old line\n")
    with stub(tmp_path, "dies", 0) as server, pytest.raises(RunError) as caught:
        server.wait_healthy(10)
    assert "an old line" not in str(caught.value)


STARTER = """
import sys, time
from pathlib import Path
from training.llamacpp.server import ServerProcess
server = ServerProcess.start(Path(sys.argv[1]), log=Path(sys.argv[2]), ctx_size=64, threads=1,
                             detached=sys.argv[3] == "detached", token=sys.argv[4])
server.wait_healthy(30)
print(server.identity["pid"], server.port, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("kind", ["private", "detached"])
def test_a_private_server_dies_with_its_parent_and_a_detached_one_does_not(tmp_path: Path, kind: str):
    model, token = tiny_gguf.write(tmp_path / "m.gguf", seed=1), f"token-{os.getpid()}-{kind}"
    parent = subprocess.Popen(
        [sys.executable, "-c", STARTER, str(model), str(tmp_path / "log"), kind, token],
        stdout=subprocess.PIPE, text=True, cwd=REPOSITORY,
    )  # fmt: skip
    pid, port = map(int, parent.stdout.readline().split())
    who = process.identity(pid)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    if kind == "private":
        deadline = time.monotonic() + 5
        while process.is_running(who) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not process.is_running(who)
        return
    assert Client(f"http://127.0.0.1:{port}").health() == "ok"
    assert find(token) == [who] and psutil.Process(pid).terminal() is None
    server = ServerProcess(who, port, tmp_path / "log")
    server.stop()
    assert not server.is_running() and find(token) == []
    assert "server: stopped" in (tmp_path / "log").read_text()  # it ended cleanly on SIGTERM


def test_a_process_that_hears_no_sigterm_is_killed(tmp_path: Path):
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
    )
    server = ServerProcess._spawn([sys.executable, "-c", code], free_port(), tmp_path / "log", detached=False)
    while "deaf" not in (tmp_path / "log").read_text():
        time.sleep(0.02)
    server.stop(timeout_seconds=0.3)
    assert not server.is_running()
    server.stop()  # a second time does nothing
