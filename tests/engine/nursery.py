"""Commands in processes of their own that start at once: forked from one that has imported all and run nothing."""

import json
import os
import subprocess
import sys

from training.core import paths

_SERVER = """
import json, os, sys
import torch, transformers, training.engine.launch, training.engine.trainer, training.objectives.base
from training.cli import main
from training.engine import launch, supervisor
from training.engine.pulse import Pulse
supervisor.train = lambda run, _locks: launch.train(run, Pulse.create())  # the command is its own engine
print("ready", flush=True)
for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDWR), 0)
        os._exit(main(json.loads(line)))
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

    def start(self, *arguments: str) -> int:
        """Start a command; returns its process id. `code()` must be asked before the next one."""
        self._server.stdin.write(json.dumps(arguments) + "\n")
        self._server.stdin.flush()
        return int(self._server.stdout.readline())

    def code(self) -> int:
        """Wait for the command; returns its exit code, or the negative number of the signal that killed it."""
        return int(self._server.stdout.readline())
