"""The machine's queue: order of coming, whoever dies leaves, and what is said to those who wait."""

import signal
import subprocess
import sys
import threading
import time

import pytest

from training.cli import main
from training.core import locks, paths, queue

WAITER = """
import sys
sys.path.insert(0, sys.argv[1])
from training.core import queue
with queue.turn(sys.argv[2], run=sys.argv[2]):
    print("turn", sys.argv[2], flush=True)
"""


def start(name: str) -> subprocess.Popen:
    command = [sys.executable, "-c", WAITER, str(paths.REPOSITORY), name]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def wait_for(count: int) -> list[dict]:
    deadline = time.monotonic() + 60
    while len(found := queue.waiting()) != count:
        assert time.monotonic() < deadline, found
        time.sleep(0.02)
    return found


def test_who_comes_first_is_first_and_the_dead_leave(capsys: pytest.CaptureFixture):
    with locks.hold(locks.machine_lock(), "training x"):
        waiters = []
        for name in ("a", "b", "c", "d"):
            waiters.append(start(name))
            wait_for(len(waiters))
        assert [one["run"] for one in queue.waiting()] == ["a", "b", "c", "d"]
        assert main(["runs"]) == 0
        assert f"waiting 2 of 4: b (process {waiters[1].pid})" in capsys.readouterr().err
        waiters[1].kill()
        waiters[1].wait()
        assert [one["what"] for one in wait_for(3)] == ["a", "c", "d"]
    ends = {}
    for name, child in zip("acd", (waiters[0], *waiters[2:]), strict=True):
        assert child.communicate(timeout=60)[0].strip() == f"turn {name}"
        ends[name] = child.returncode
    assert ends == dict.fromkeys("acd", 0) and queue.waiting() == [] and locks.holder(locks.machine_lock()) is None


def test_turns_come_in_the_order_of_numbers_whatever_the_scheduler_does():
    order: list[int] = []
    with locks.hold(locks.machine_lock(), "training x"):
        threads = []
        for number in range(5):
            threads.append(threading.Thread(target=lambda number=number: _take_turn(number, order)))
            threads[-1].start()
            wait_for(number + 1)
    for thread in threads:
        thread.join(60)
    assert order == [0, 1, 2, 3, 4]


def _take_turn(number: int, order: list[int]) -> None:
    with queue.turn(str(number)):
        order.append(number)


def test_a_hang_up_while_waiting_is_told_as_one():
    command = [sys.executable, "-m", "training", "train-calibrate", "--config", "recipes/demo/pretrain-stdlib.yaml"]
    with locks.hold(locks.machine_lock(), "training x"):
        child = subprocess.Popen(command, cwd=paths.REPOSITORY, stderr=subprocess.PIPE, text=True)
        wait_for(1)
        child.send_signal(signal.SIGHUP)
        text = child.communicate(timeout=60)[1]
    assert child.returncode == 130 and "stopped by SIGHUP" in text and queue.waiting() == []


def test_a_ticket_of_the_dead_is_cleared_and_its_number_may_be_used_again():
    folder = paths.roots().cache / "queue"
    folder.mkdir(parents=True)
    (folder / "000007.json").write_text('{"what": "gone"}')
    (folder / "readme.txt").write_text("no ticket")
    assert queue.waiting() == []
    with queue.turn("me"):
        assert not (folder / "000007.json").exists()
