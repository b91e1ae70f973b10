"""Whatever ends a command, a full disk, a kill or Ctrl-C: nothing half-made looks whole, and the next run tidies up."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from training.cli import main
from training.core import files, paths
from training.data import dataset

pytestmark = pytest.mark.slow
STAGES = {
    "data-prepare": ["data-prepare", "{input}", "--name", "{name}", "--workers", "2"],
    "data-peek": ["data-peek", "mine", "--tokenizer", "mine", "--records", "0"],
    "tokenizer-train": ["tokenizer-train", "--dataset", "mine", "--vocab-size", "700", "--name", "{name}"],
}


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    """Five megabytes of records, so that each stage takes a while and reading uses processes."""
    generator, path = random.Random(3), tmp_path / "in" / "mine.jsonl"
    path.parent.mkdir()
    with open(path, "w") as file:
        for number in range(4000):
            words = " ".join("".join(generator.choices("abcdefghij", k=5)) for _ in range(200))
            file.write(json.dumps({"text": f"{number} {words}", "group": str(number % 97)}) + "\n")
    return path


def arguments(stage: str, lines: Path, name: str = "mine") -> list[str]:
    made = [part.format(input=lines, name=name) for part in STAGES[stage]]
    return [sys.executable, "-m", "training", *made]


def start(stage: str, lines: Path, name: str = "mine") -> subprocess.Popen:
    return subprocess.Popen(
        arguments(stage, lines, name), cwd=paths.REPOSITORY, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def before(stage: str, lines: Path) -> None:
    """Make what a stage needs."""
    if stage != "data-prepare":
        assert main(["data-prepare", str(lines), "--name", "mine", "--near", "0"]) == 0
    if stage == "data-peek":
        assert main(["tokenizer-train", "--dataset", "mine", "--vocab-size", "300"]) == 0


def partials(root: Path) -> list[str]:
    return [str(path.relative_to(root)) for path in root.rglob("*.partial")]


@pytest.mark.parametrize("stage", STAGES)
def test_kill_9_at_any_moment_leaves_nothing_that_looks_whole(stage: str, lines: Path, own_roots: Path):
    """And no litter behind the next run; what it makes is what it would have made."""
    before(stage, lines)
    generator = random.Random(stage)
    for _ in range(3):
        running = start(stage, lines)
        time.sleep(generator.uniform(0.8, 4.0))
        os.killpg(running.pid, signal.SIGKILL)
        running.communicate(timeout=60)
        for manifest in own_roots.rglob("manifest.json"):
            held = json.loads(manifest.read_text())["files"]
            there = {path.name: path.stat().st_size for path in manifest.parent.iterdir() if path.is_file()}
            assert all(there[name] == one["bytes"] for name, one in held.items()) or ".partial" in str(manifest)
    again = start(stage, lines)
    assert again.wait(timeout=300) == 0, again.stderr.read()
    assert partials(own_roots) == []
    assert main(["data-verify", "mine"]) == 0


@pytest.mark.parametrize("stage", STAGES)
def test_ctrl_c_is_heard_at_once_and_leaves_nothing(stage: str, lines: Path, own_roots: Path):
    before(stage, lines)
    there = {str(path) for path in own_roots.rglob("*") if not path.name.endswith(".lock")}
    running, deadline = start(stage, lines), time.monotonic() + 120
    while not (started := partials(own_roots)) and stage != "tokenizer-train" and time.monotonic() < deadline:
        time.sleep(0.02)
    if stage == "tokenizer-train":  # it writes at its end alone
        while "predicted" not in running.stderr.readline():
            pass
        started = True
    os.killpg(running.pid, signal.SIGINT)
    interrupted = time.monotonic()
    error = running.communicate(timeout=60)[1]
    assert started and running.returncode == 130 and "INTERRUPTED" in error, error
    assert "Traceback" not in error and time.monotonic() - interrupted < 20
    left = {str(path) for path in own_roots.rglob("*") if not path.name.endswith(".lock")}
    assert {path for path in left - there if Path(path).is_file() or path.endswith(".partial")} == set()


@pytest.mark.parametrize("stage", STAGES)
def test_two_at_once_make_one_thing_and_two_names_do_not_meet(stage: str, lines: Path, own_roots: Path):
    before(stage, lines)
    names = ["mine", "mine"] if stage != "tokenizer-train" else ["mine", "other"]
    running = [start(stage, lines, name) for name in names]
    outputs = [one.communicate(timeout=300)[1] for one in running]
    assert [one.returncode for one in running] == [0, 0], outputs
    assert partials(own_roots) == []
    if stage == "data-prepare":
        assert sum("(unchanged, reused)" in output for output in outputs) == 1
        assert len(list(dataset.resolve("mine").parent.iterdir())) == 1
    if stage == "tokenizer-train":
        folders = [paths.roots().tokenizers / name for name in names]
        made = [next(folder.glob("*/tokenizer.json")).read_bytes() for folder in folders]
        assert made[0] == made[1]


def whole_files(folder: Path) -> dict[str, str]:
    return {path.name: files.sha256_file(path) for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize("names", [["one", "two"], ["mine", "mine"]], ids=["two names", "one name"])
def test_two_data_sets_at_once_in_one_root_are_those_that_each_alone_would_be(
    names: list[str], lines: Path, tmp_path: Path, own_roots: Path, monkeypatch: pytest.MonkeyPatch
):
    """Of one name one waits, since they share a folder; nobody takes what the other still writes for a leftover."""
    other = tmp_path / "in" / "other.jsonl"
    other.write_text(lines.read_text().replace("abc", "cba"))
    running = [start("data-prepare", path, name) for path, name in zip((lines, other), names, strict=True)]
    outputs = [one.communicate(timeout=300)[1] for one in running]
    assert [one.returncode for one in running] == [0, 0], outputs
    assert partials(own_roots) == [] and not any("reused" in output for output in outputs)
    together = sorted(own_roots.glob("training/datasets/*/*/"))
    assert len(together) == 2
    for folder in together:
        assert main(["data-verify", str(folder)]) == 0
    monkeypatch.setenv("DATA_ROOT", str(tmp_path / "alone"))
    for path, name in zip((lines, other), names, strict=True):
        assert main(["data-prepare", str(path), "--name", name]) == 0
    alone = sorted((tmp_path / "alone").glob("training/datasets/*/*/"))
    assert [whole_files(folder) for folder in together] == [whole_files(folder) for folder in alone]


FULL = """
set -e
mount -t tmpfs -o size=64m none {room}
export DATA_ROOT={room}/data TRAINYARD_CACHE={room}/cache
cp -r {data} {room}/data
dd if=/dev/zero of={room}/filler bs=1024 count=$(($(df -k --output=avail {room} | tail -1) - {free_kib})) status=none
set +e
cd {repository}
{command}
code=$?
find {room}/data -name '*.partial' -o -newer {room}/filler -type f -not -name '*.lock' | sed 's/^/LEFT /' >&2
exit $code
"""


@pytest.mark.parametrize(("stage", "free_kib"), [("data-prepare", 900), ("data-peek", 600), ("tokenizer-train", 12)])
def test_a_full_disk_is_told_and_leaves_nothing(stage: str, free_kib: int, tmp_path: Path, own_roots: Path):
    """A real small disk; the input is packed so well, and the text so poor, that no forecast refuses it first."""
    import gzip

    text = [json.dumps({"text": f"{n} " + "\u0e01\u4e00 " * 40 + f"{n}", "group": str(n % 97)}) for n in range(5000)]
    packed = tmp_path / "mine.jsonl.gz"
    packed.write_bytes(gzip.compress(("\n".join(text) + "\n").encode()))
    own_roots.mkdir(exist_ok=True)
    if stage != "data-prepare":
        assert main(["data-prepare", str(packed), "--name", "mine", "--near", "0"]) == 0
    if stage == "data-peek":
        make_poor_tokenizer(own_roots)
    room = tmp_path / "room"
    room.mkdir()
    command = " ".join([*arguments(stage, packed), *(["--near", "0"] if stage == "data-prepare" else [])])
    script = FULL.format(room=room, data=own_roots, free_kib=free_kib, repository=paths.REPOSITORY, command=command)
    if subprocess.run(["unshare", "-rm", "mount", "-t", "tmpfs", "none", str(room)], capture_output=True).returncode:
        pytest.skip("this machine lets nobody mount a disk of his own")
    done = subprocess.run(["unshare", "-rm", "sh", "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 3 and "LEFT" not in done.stderr, done.stderr
    assert "the disk is full" in done.stderr or "not enough disk space" in done.stderr, done.stderr


def make_poor_tokenizer(own_roots: Path) -> None:
    """One that has seen nothing of the text: each byte of it is a token."""
    other = own_roots / "other.jsonl"
    other.write_text("".join(json.dumps({"text": f"the other one {n}"}) + "\n" for n in range(100)))
    assert main(["data-prepare", str(other), "--name", "other"]) == 0
    assert main(["tokenizer-train", "--dataset", "other", "--vocab-size", "280", "--name", "mine"]) == 0
