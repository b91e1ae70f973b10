"""One step of a round trip: a `python -m training` command as a child process, its `--json` document read back.

The command's own messages and report block go straight to stderr. A signal to this process is passed on, and the
child is waited for; if this process is killed the child is told to end, so that nothing is left running.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import time

from training.core import process
from training.core.errors import INTERRUPTED_EXIT_CODE, TrainyardError
from training.core.log import say
from training.core.report import PROGRAM


class StepFailed(TrainyardError):
    """A step ended with an error; the exit code is the step's own."""

    def __init__(self, arguments: list[str], exit_code: int, document: dict):
        error = document.get("error", {})
        super().__init__(
            f"the step {arguments[0]} failed",
            where=shlex.join([*PROGRAM, *arguments]),
            found=error.get("what") or f"exit code {exit_code}",
            next_command=error.get("next"),
        )
        self.exit_code = exit_code if exit_code > 0 else TrainyardError.exit_code  # killed from outside


def options(*pairs: tuple[str, object]) -> list[str]:
    """The options of a command that have a value: `("--exam", "e.jsonl"), ("--guard", None)` is `--exam e.jsonl`."""
    return [part for name, value in pairs if value is not None for part in (name, str(value))]


def run_step(title: str, arguments: list[str]) -> tuple[dict, float]:
    """Run one command with `--json`; returns its document and its seconds. Raises StepFailed or KeyboardInterrupt."""
    command = [sys.executable, "-m", "training", *arguments, "--json"]
    say(f"\n=== {title}\n    $ {shlex.join([*PROGRAM, *arguments])}")
    started = time.monotonic()
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKELEVEL", "MAKEFLAGS")}
    environment["RUNTIME"] = "local"  # what RUNTIME says is for a person's own runs and services
    # A process group of its own: a Ctrl-C at the terminal reaches the child once, through us.
    parent = os.getpid()
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, env=environment, process_group=0,
        preexec_fn=lambda: process.die_with(parent, signal.SIGTERM),
    )  # fmt: skip
    output, was_interrupted = _wait(child)
    # One that is told in its first moments dies of the signal itself, and one in its last may still end well.
    if was_interrupted or child.returncode == INTERRUPTED_EXIT_CODE:
        raise KeyboardInterrupt(f"in {arguments[0]}; run the same command again to go on")
    document = json.loads(output) if output.strip() else {}
    if child.returncode != 0:
        raise StepFailed(arguments, child.returncode, document)
    return document, time.monotonic() - started


def _wait(child: subprocess.Popen) -> tuple[bytes, bool]:
    """Wait for the child, passing each interrupt on to it; what it said, and whether there was one."""
    was_interrupted = False
    while True:
        try:
            return child.communicate()[0], was_interrupted
        except KeyboardInterrupt:
            was_interrupted = True
            child.send_signal(signal.SIGINT)
