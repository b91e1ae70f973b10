"""Commands in processes of their own that start at once: forked from one that has imported all and run nothing."""

import json
import os
import subprocess
import sys

from training.core import paths

_SERVER = """
import json, os, signal, sys, tempfile, traceback
import torch, transformers, training.engine.launch, training.engine.trainer, training.objectives.base
import training.engine.follower, torch.distributed.fsdp, torch.distributed.tensor
from training.cli import main
from training.engine import launch, supervisor
from training.engine.pulse import Pulse

def train(run, _locks):  # the command is its own engine, the first of its processes
    ranks = (run.record().get("parallel") or {"ranks": 1})["ranks"]
    if ranks == 1:
        return launch.train(run, Pulse.create())
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks), GLOO_SOCKET_IFNAME="lo")
        os.environ["TRAINYARD_MEETING"] = f"file://{folder}/meeting"
        followers = [pid for rank in range(1, ranks) if (pid := follow(run, rank))]
        os.environ.update(RANK="0", LOCAL_RANK="0")
        try:
            return launch.train(run, Pulse.create())
        except Exception:  # the others wait for this process, which lives on to tell what it was
            for pid in followers:
                os.kill(pid, signal.SIGKILL)
            raise
        finally:
            for pid in followers:
                os.waitpid(pid, 0)

def follow(run, rank):
    if pid := os.fork():
        return pid
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    try:
        launch.train(run, Pulse.create())
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)

supervisor.train = train
print("ready", flush=True)
for line in sys.stdin:
    roots, before, arguments = json.loads(line)
    pid = os.fork()
    if pid == 0:
        os.environ.update(roots)
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDWR), 0)
        exec(before)
        os._exit(main(arguments))
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


class Nursery:
    """Forks one command at a time; a context manager."""

    def __enter__(self) -> "Nursery":
        self._server = subprocess.Popen(
            [sys.executable, "-c", _SERVER], cwd=paths.REPOSITORY, env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        assert self._server.stdout.readline() == "ready\n"
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stdin.close()
        self._server.wait(60)

    def start(self, *arguments: str, before: str = "") -> int:
        """Start a command in the test's roots, and a piece of code before it; returns its process id. `code()` must be
        asked before the next one."""
        roots = {name: os.environ[name] for name in ("DATA_ROOT", "TRAINYARD_CACHE", "RUNTIME")}
        self._server.stdin.write(json.dumps((roots, before, arguments)) + "\n")
        self._server.stdin.flush()
        return int(self._server.stdout.readline())

    def code(self) -> int:
        """Wait for the command; returns its exit code, or the negative number of the signal that killed it."""
        return int(self._server.stdout.readline())

    def run(self, *arguments: str, before: str = "") -> int:
        """Start a command and wait for it; returns its exit code."""
        self.start(*arguments, before=before)
        return self.code()
