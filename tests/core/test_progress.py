"""Progress: a bar where a person looks, plain lines where a file is written."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios

from training.core.paths import REPOSITORY

CODE = (
    "import time; from training.core.progress import Progress\n"
    "with Progress('train', 4, 'step', line_every_seconds=0) as progress:\n"
    "    for i in range(4): time.sleep(0.15); progress.advance(1, f'loss {i}')\n"
    "    progress.write('done')"
)


def test_a_file_gets_one_plain_line_for_each_step():
    done = subprocess.run([sys.executable, "-c", CODE], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.stderr.splitlines() == [
        "train: 1 of 4 (25 %) step  loss 0",
        "train: 2 of 4 (50 %) step  loss 1",
        "train: 3 of 4 (75 %) step  loss 2",
        "train: 4 of 4 (100 %) step  loss 3",
        "done",
    ]


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
