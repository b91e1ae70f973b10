"""Progress: a bar where a person looks, plain lines where a file is written."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest

from training.core import progress
from training.core.paths import REPOSITORY

CODE = (
    "import time; from training.core.progress import Progress\n"
    "with Progress('train', 4, 'step', line_every_seconds=0) as progress:\n"
    "    for i in range(4): time.sleep(0.15); progress.advance(1, f'loss {i}')\n"
    "    progress.write('done')"
)


def test_a_file_gets_one_plain_line_for_each_step():
    done = subprocess.run([sys.executable, "-c", CODE], cwd=REPOSITORY, capture_output=True, text=True)
    shown = [re.fullmatch(r"(.*?)(?:  (\S+) s left)?", line).groups() for line in done.stderr.splitlines()]
    assert [line for line, _ in shown] == [
        "train: 1 of 4 (25 %) step  loss 0",
        "train: 2 of 4 (50 %) step  loss 1",
        "train: 3 of 4 (75 %) step  loss 2",
        "train: 4 of 4 (100 %) step  loss 3",
        "done",
    ]
    left = [float(seconds) for _, seconds in shown[:3]]
    assert left == sorted(left, reverse=True) and 0.4 <= left[0] < 3 and left[2] >= 0.1  # 0.15 s each
    assert shown[3][1] is shown[4][1] is None


def test_what_began_to_be_told_is_told_to_its_end(monkeypatch: pytest.MonkeyPatch, capsys):
    now = iter((0.0, 20.0, 20.0, 21.0, 22.0, 23.0, 24.0))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(now))
    with progress.Progress("exam", 3, "question") as told:
        for _ in range(3):
            told.advance(1)
    assert [line.split("  ")[0] for line in capsys.readouterr().err.splitlines()] == [
        "exam: 1 of 3 (33 %) question", "exam: 3 of 3 (100 %) question"
    ]  # fmt: skip


def test_the_time_left_is_of_the_speed_since_it_went_on(monkeypatch: pytest.MonkeyPatch):
    """What was done before took no time of this; without a known end there is nothing to tell."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    one = progress.Progress("train", 100, "step", done=90)
    assert "left" not in one.line()
    now[0] += 20
    one.advance(2)
    assert one.line().endswith("  1 min 20 s left")
    one.total = None
    assert "left" not in one.line()


def test_a_terminal_gets_a_bar_with_the_figures_of_the_moment():
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    child = subprocess.Popen([sys.executable, "-c", CODE], cwd=REPOSITORY, stderr=theirs)
    os.close(theirs)
    shown = b""
    try:
        while part := os.read(ours, 4096):
            shown += part
    except OSError:
        pass  # Linux says EIO when the other side has gone
    assert child.wait() == 0
    text = shown.decode()
    assert "100%" in text and "loss 3" in text and "\r" in text and "train: 4 of 4" not in text
