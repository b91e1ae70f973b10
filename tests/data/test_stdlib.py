"""The standard library as a source: what is in, what is out, and a hash that does not depend on the place."""

from pathlib import Path

import pytest

from tests.data.reading import read
from training.core.errors import MachineError, UserError
from training.data.stdlib import StandardLibrary


def library(folder: Path) -> Path:
    contents = {
        "abc.py": b"x = 1\n",
        "json/__init__.py": b"y = 2\n",
        "json/decoder.py": b"z = 3\n",
        "json/test/inner.py": b"inner tests stay\n",
        "json/__pycache__/decoder.pyc": b"\0",
        "empty/__init__.py": b"",
        "latin.py": b"caf\xe9\n",
        "test/test_abc.py": b"out\n",
        "site-packages/numpy/__init__.py": b"out\n",
        "dist-packages/x.py": b"out\n",
        "_sysconfigdata__linux_x86_64.py": b"out = '/home/someone'\n",
        "config-3.11-x86_64/python-config.py": b"out\n",
        "notes.txt": b"out\n",
    }
    for name, data in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def test_one_record_a_file_grouped_by_top_level_package(tmp_path: Path):
    source = StandardLibrary(library(tmp_path / "lib"))
    found = read(source)
    assert found.values == [
        {"id": "abc.py", "group": "abc", "text": "x = 1\n"},
        {"id": "json/__init__.py", "group": "json", "text": "y = 2\n"},
        {"id": "json/decoder.py", "group": "json", "text": "z = 3\n"},
        {"id": "json/test/inner.py", "group": "json", "text": "inner tests stay\n"},
    ]
    assert found.rejected == {"not_utf8": 1, "empty": 1}


def test_a_limit_that_the_key_does_not_name_leaves_nothing_out(tmp_path: Path):
    """B44: else one hash would stand for the files under 5 bytes and for all of them."""
    with pytest.raises(UserError, match="a record is too long") as caught:
        read(StandardLibrary(library(tmp_path / "lib")), max_record_bytes=5)
    assert "id 'abc.py'" in caught.value.where
    found = read(StandardLibrary(tmp_path / "lib"), max_record_bytes=5, on_error="drop")
    assert found.rejected == {"too_long": 4, "not_utf8": 1, "empty": 1}


def test_the_hash_is_the_contents_and_not_the_places(tmp_path: Path):
    here, there = StandardLibrary(library(tmp_path / "here")), StandardLibrary(library(tmp_path / "there"))
    assert here.fingerprint() == there.fingerprint()
    read(here)
    assert here.sha256 == here.fingerprint()
    (tmp_path / "there" / "abc.py").write_bytes(b"x = 2\n")
    assert there.fingerprint() != here.fingerprint()
    (tmp_path / "here" / "abc.py").rename(tmp_path / "here" / "abd.py")
    assert StandardLibrary(tmp_path / "here").fingerprint() != there.fingerprint()


def test_the_running_pythons_own_is_real_and_large():
    source = StandardLibrary()
    groups = {value["group"] for value in read(source, near=0).values}
    assert source.size_bytes > 8_000_000
    assert {"json", "asyncio", "argparse"} <= groups
    assert not groups & {"test", "site-packages", "__pycache__"}


def test_no_library_is_a_fault_of_the_machine(tmp_path: Path):
    with pytest.raises(MachineError, match="no standard library"):
        StandardLibrary(tmp_path)
