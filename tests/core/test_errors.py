"""What exceptions of Python and its libraries mean here, and that a fault of this program stays one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from training.core.errors import translated
from training.core.paths import REPOSITORY


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (OSError(36, "File name too long", "x" * 5000), 2),
        (FileNotFoundError(2, "No such file or directory", "a"), 2),
        (PermissionError(1, "Operation not permitted", "a"), 3),
        (OSError(30, "Read-only file system", "a"), 3),
        (OSError(27, "File too large"), 3),
        (ModuleNotFoundError("No module named 'psutil'", name="psutil"), 3),
        (MemoryError(), 4),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"), 4),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_a_known_kind_has_its_exit_code(error: Exception, exit_code: int):
    known = translated(error)
    assert known is not None and known.exit_code == exit_code and len(str(known)) < 600


@pytest.mark.parametrize("error", [TypeError("x"), KeyError("x"), ZeroDivisionError()], ids=repr)
def test_a_fault_of_this_program_is_no_known_kind(error: Exception):
    assert translated(error) is None


@pytest.mark.parametrize(
    "arguments", [["runs"], ["nosuch"], ["memfit"], ["verify", "x" * 5000]], ids=lambda a: a[0][:8]
)
def test_json_is_one_document_on_stdout_whatever_happens(arguments: list[str]):
    run = [sys.executable, "-m", "training", *arguments, "--json"]
    done = subprocess.run(run, cwd=REPOSITORY, capture_output=True, text=True)
    document = json.loads(done.stdout)
    assert document["report"]["exit_code"] == done.returncode and document["schema"] == 1
    assert ("error" in document) == (done.returncode != 0)


def test_with_stderr_closed_nothing_reaches_stdout_but_the_document(tmp_path: Path):
    command = f"{sys.executable} -m training runs --json 2>&-"
    done = subprocess.run(["bash", "-c", command], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0 and json.loads(done.stdout)["runs"] == []


def test_a_reader_that_has_gone_is_no_error():
    command = f"{sys.executable} -m training --help | head -1"
    done = subprocess.run(["bash", "-c", command], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "" and done.stdout.startswith("example:")
