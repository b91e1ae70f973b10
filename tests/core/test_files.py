"""Files: the old one or the new one, never a part."""

import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import small_disk
from training.core import files
from training.core.errors import IntegrityError, MachineError, UserError


def test_sha256_of_known_bytes(tmp_path: Path):
    path = tmp_path / "a"
    path.write_bytes(b"abc")
    assert files.sha256_file(path) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_progress_counts_every_byte(tmp_path: Path):
    path = tmp_path / "a"
    path.write_bytes(bytes(5 << 20))
    seen: list[int] = []
    files.sha256_file(path, seen.append)
    assert sum(seen) == 5 << 20 and len(seen) == 2


def test_canonical_json_does_not_depend_on_order():
    assert files.sha256_json({"a": 1, "b": [1.5, "é"]}) == files.sha256_json({"b": [1.5, "é"], "a": 1})
    with pytest.raises(ValueError):
        files.canonical_json(float("nan"))


@pytest.mark.parametrize("text", ['{"a": 1, "a": 2}', '{"a": NaN}', "{", ""])
def test_reading_json_is_strict(tmp_path: Path, text: str):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(IntegrityError):
        files.read_json(path)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path):
    path = tmp_path / "a.txt"
    files.write_text(path, "old")
    with pytest.raises(RuntimeError), files.atomic_path(path) as temporary:
        temporary.write_text("new, half")
        raise RuntimeError
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_a_folder_appears_whole(tmp_path: Path):
    target = tmp_path / "set"
    with files.atomic_folder(target) as partial:
        (partial / "a").write_text("x")
        assert not target.exists()
        files.write_manifest(partial, "thing", {"name": "n"})
    assert files.verify_manifest(target, "thing")["name"] == "n"
    assert os.listdir(tmp_path) == ["set"]


def test_an_incomplete_folder_in_the_way_is_replaced_and_a_complete_one_is_kept(tmp_path: Path):
    target = tmp_path / "set"
    target.mkdir()
    (target / "rest").write_text("of a crash")
    for content in ("first", "second"):
        with files.atomic_folder(target) as partial:
            (partial / "a").write_text(content)
            files.write_manifest(partial, "thing", {})
    assert sorted(os.listdir(target)) == ["a", "manifest.json"]
    assert (target / "a").read_text() == "first"


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (lambda folder: (folder / "a").write_text("y"), "bytes have changed"),
        (lambda folder: (folder / "a").write_text("xx"), "another size"),
        (lambda folder: (folder / "a").unlink(), "missing"),
        (lambda folder: (folder / files.MANIFEST).unlink(), "not a complete thing"),
        (lambda folder: (folder / files.MANIFEST).write_text(""), "damaged"),
    ],
)
def test_damage_is_named(tmp_path: Path, damage, word: str):
    (tmp_path / "a").write_text("x")
    files.write_manifest(tmp_path, "thing", {})
    damage(tmp_path)
    with pytest.raises(IntegrityError, match=word):
        files.verify_manifest(tmp_path, "thing")


def test_a_manifest_of_another_kind_is_refused(tmp_path: Path):
    files.write_manifest(tmp_path, "thing", {})
    with pytest.raises(IntegrityError, match="another kind"):
        files.read_manifest(tmp_path, "other")


def test_too_little_space_is_said_before_anything_is_written(tmp_path: Path):
    with pytest.raises(MachineError, match="not enough disk space"):
        files.require_space(tmp_path, 1 << 60, "a test")


def test_a_full_disk_keeps_the_old_file(tmp_path: Path):
    """On a real file system of 1 MiB: the write fails, the old file stays, no leftover remains."""
    with small_disk(tmp_path / "small", "1m") as mount:
        files.write_bytes(mount / "a", b"old")
        with pytest.raises(MachineError, match="disk is full"):
            files.write_bytes(mount / "a", bytes(2 << 20))
        assert (mount / "a").read_bytes() == b"old"
        assert os.listdir(mount) == ["a"]


@pytest.mark.parametrize("exchange", [True, False], ids=["in one step", "where names cannot be exchanged"])
def test_a_folder_takes_anothers_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool):
    if not exchange:
        monkeypatch.setattr(files, "_exchange", lambda one, other: False)
    target = tmp_path / "set"
    for number in range(3):
        new = tmp_path / "work" / "new"
        new.mkdir(parents=True)
        (new / "a").write_text(str(number))
        files.replace_folder(new, target)
        assert (target / "a").read_text() == str(number)
        old = [path.read_text() for path in (tmp_path / "work").rglob("a")]
        assert old == ([] if number == 0 else [str(number - 1)])
        shutil.rmtree(tmp_path / "work")


def test_a_program_that_failed_on_a_full_disk_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    files.refuse_full_disk(tmp_path)
    monkeypatch.setattr(files, "free_bytes", lambda path: 4096)
    with pytest.raises(MachineError, match="disk is full"):
        files.refuse_full_disk(tmp_path)


def test_a_killed_writer_leaves_the_old_file_and_the_next_one_cleans_up(tmp_path: Path):
    target = tmp_path / "set"
    code = (
        "import sys, time; from pathlib import Path; from training.core import files\n"
        "with files.atomic_folder(Path(sys.argv[1])) as partial:\n"
        "    (partial / 'a').write_text('x'); print('ready', flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(target)], stdout=subprocess.PIPE)
    assert child.stdout.readline() == b"ready\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert not target.exists() and len(os.listdir(tmp_path)) == 1
    time.sleep(0.05)
    with files.atomic_folder(target) as partial:
        files.write_manifest(partial, "thing", {})
    assert os.listdir(tmp_path) == ["set"]


def test_a_device_or_a_pipe_is_neither_replaced_nor_read(tmp_path: Path):
    """A rename would put a plain file in a device's place, and a pipe would be read for ever."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(UserError, match="no file") as refused:
        files.write_text(pipe, "x")
    assert refused.value.found == "a device or a pipe" and stat.S_ISFIFO(pipe.stat().st_mode)
    with pytest.raises(IntegrityError, match="damaged"):
        files.read_json(pipe)
    with pytest.raises(UserError) as refused:
        files.write_text(tmp_path, "x")
    assert refused.value.found == "a folder" and list(tmp_path.iterdir()) == [pipe]
