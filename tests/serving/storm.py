"""Swaps that are cut off by signals at random moments, in a process of their own."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable

from tests.serving.room import Room
from training.core import paths
from training.serving import control

KINDS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
DRIVER = """
import sys
from pathlib import Path
from training.core import log
from training.serving.evaluate import Request, evaluate
log.configure()
service, model, port, smoke, reports = sys.argv[1:]
request = Request(model, service=service, port=int(port), smoke=Path(smoke), budget_seconds=20.0)
print("go", flush=True)
try:
    evaluation = evaluate(request, Path(reports))
except KeyboardInterrupt:  # SIGTERM too; the command line ends alike
    sys.exit(130)
sys.exit(evaluation.document["exit_code"])
"""


def begin(room: Room) -> subprocess.Popen:
    words = [room.name, room.model("new"), room.port, room.smoke, room.reports]
    child = subprocess.Popen(
        [sys.executable, "-c", DRIVER, *map(str, words)], cwd=paths.REPOSITORY, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ,
    )  # fmt: skip
    assert child.stdout.readline() == "go\n"
    return child


def rounds(room: Room, *, seed: int, count: int, longest_seconds: float, num_servers: Callable[[], int]) -> None:
    """`count` swaps, each cut off within `longest_seconds`; after SIGKILL the restore is finished by either command."""
    chance = random.Random(seed)
    room.start()
    for number in range(count):
        child = begin(room)
        time.sleep(chance.uniform(0.0, longest_seconds))
        child.send_signal(KINDS[number % 3])
        if chance.random() < 0.4:
            time.sleep(chance.uniform(0.0, 0.2))
            child.send_signal(chance.choice(KINDS))
        errors = child.communicate(timeout=120)[1]
        killed = child.returncode == -signal.SIGKILL
        assert killed or child.returncode in (0, 130, -signal.SIGINT, -signal.SIGTERM), errors
        if killed and number % 2:
            assert room.evaluate().error is None
        elif killed:
            control.restore(room.name)
        assert room.serves() == "old-F16" and num_servers() == 1, errors
        assert room.service().journal() is None
