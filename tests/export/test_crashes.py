"""Whatever ends a real export, kill -9 or a full disk: no file under a final name, and the next run tidies up.

An adapter on a tiny base goes through every stage: merge, conversion, quantiser, a server for each file, publication.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.export.tiny_adapter import write_adapter
from training.core import files, paths
from training.export import manifest

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quantiser")]
STAGES = {
    "merge": "merged", "conversion": "convert.log", "quantiser": "Q6_K.log", "first server": "server-F32.log",
    "second server": "server-Q6_K.log",
}  # fmt: skip
"""By what stands in the workspace as soon as a stage has begun."""


@pytest.fixture
def command(make_folder, tmp_path: Path) -> list[str]:
    base = make_folder("base")
    adapter = write_adapter(tmp_path / "adapter", base)
    options = ["--base", str(base), "--name", "tiny", "--quant", "F32,Q6_K"]
    return [sys.executable, "-m", "training", "export-gguf", str(adapter), *options]


def _start(command: list[str]) -> subprocess.Popen:
    return subprocess.Popen(command, cwd=paths.REPOSITORY, stderr=subprocess.PIPE, text=True, start_new_session=True)


def _traces(folder: Path, name: str) -> list[Path]:
    return list(folder.glob(f".*.partial/{name}"))


def _running_in(folder: Path) -> list[psutil.Process]:
    """Whatever still runs in a folder, or names a file of it."""
    found = []
    for process in psutil.process_iter():
        try:
            if str(folder) in " ".join([process.cwd(), *process.cmdline()]):
                found.append(process)
        except psutil.Error:
            continue
    return found


def test_kill_9_at_any_moment_leaves_nothing_that_looks_whole(command: list[str], own_roots: Path, tmp_path: Path):
    """And no litter and no process behind; what the next run makes is what it would have made."""
    folder, generator = own_roots / "models/trained/tiny", random.Random(7)
    for stage, trace in STAGES.items():
        running, deadline = _start(command), time.monotonic() + 600
        while not _traces(folder, trace) and time.monotonic() < deadline and running.poll() is None:
            time.sleep(0.002)
        time.sleep(generator.uniform(0, 0.3))
        os.kill(running.pid, signal.SIGKILL)
        assert running.wait(60) == -signal.SIGKILL, f"{stage}: {running.stderr.read()}"
        assert [path.name for path in folder.glob("[!.]*")] == [], stage
        psutil.wait_procs(_running_in(folder), timeout=5)
        assert _running_in(folder) == [], stage
    again = _start(command)
    assert again.wait(900) == 0, again.stderr.read()
    assert list(folder.glob(".*")) == []
    made = {quant: manifest.verify(folder / f"tiny-{quant}.gguf")["sha256"] for quant in ("F32", "Q6_K")}
    unbroken = subprocess.run(command, cwd=paths.REPOSITORY, env=os.environ | {"DATA_ROOT": str(tmp_path / "other")})
    assert unbroken.returncode == 0
    for quant, digest in made.items():
        assert files.sha256_file(tmp_path / f"other/models/trained/tiny/tiny-{quant}.gguf") == digest


FULL = """
import json, os, subprocess, sys, time
from pathlib import Path
room, trace, *command = sys.argv[1:]
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128m", "none", room], check=True)
os.environ["DATA_ROOT"] = f"{room}/data"
folder, filler = Path(room, "data/models/trained/tiny"), Path(room, "filler")
running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
while not list(folder.glob(f".*.partial/{trace}")) and running.poll() is None:
    time.sleep(0.002)
with open(filler, "wb", buffering=0) as file:
    for size in (1 << 22, 1 << 16, 1 << 12):
        try:
            while file.write(bytes(size)) == size:
                pass
        except OSError:
            pass
told = running.communicate()[1]
left = [path.name for path in folder.glob("*")]
filler.unlink()
again = subprocess.run(command, capture_output=True, text=True)
made = sorted(path.name for path in folder.glob("*.gguf"))
print(json.dumps([running.returncode, told, left, again.returncode, again.stderr, made]))
"""


@pytest.mark.parametrize("stage", ["merge", "conversion", "quantiser", "second server"])
def test_a_disk_that_fills_up_is_told_and_leaves_nothing(command: list[str], stage: str, tmp_path: Path):
    """A small disk of the test's own, filled as soon as a stage has begun; with room again the same command works."""
    room = tmp_path / "room"
    room.mkdir()
    alone = ["unshare", "-rm"]
    if subprocess.run([*alone, "mount", "-t", "tmpfs", "none", str(room)], capture_output=True).returncode:
        pytest.skip("a disk that fills up: this machine lets nobody mount one of his own")
    script = [*alone, sys.executable, "-c", FULL, str(room), STAGES[stage], *command]
    done = subprocess.run(script, cwd=paths.REPOSITORY, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr
    code, told, left, code_again, told_again, made = json.loads(done.stdout)
    assert code == 3 and "the disk is full" in told, told
    assert left == []
    assert code_again == 0 and made == ["tiny-F32.gguf", "tiny-Q6_K.gguf"], told_again
