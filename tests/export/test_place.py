"""One command at a time exports under a name, in whatever format, and what has the name is told in one way."""

import threading
from pathlib import Path

import pytest

from tests.export.tiny_adapter import write_adapter
from tests.export.tiny_checkpoint import BASE
from training.core import files, paths
from training.core.errors import UserError
from training.export import delta, merge, place
from training.export.checkpoint import Checkpoint, open_checkpoint


@pytest.fixture
def make_adapter(base: Path, tmp_path: Path):
    """An adapter of the pinned base: `make_adapter("one", lora_alpha=16)`."""

    def make(name: str = "one", **settings) -> Checkpoint:
        return open_checkpoint(str(write_adapter(tmp_path / name, base, base_model_name_or_path=BASE, **settings)))

    return make


WRITERS = {
    "merged": lambda checkpoint, archive: merge.standalone(checkpoint, "tiny").folder,
    "delta-export": lambda checkpoint, archive: delta.export(checkpoint, "tiny")[0],
    "delta-import": lambda checkpoint, archive: delta.load(archive, "tiny")[0],
}


@pytest.mark.parametrize("form", WRITERS)
def test_the_second_waits_for_the_first(make_adapter, form: str):
    checkpoint, made = make_adapter(), []
    archive = delta.export(checkpoint, "other")[0]
    second = threading.Thread(target=lambda: made.append(WRITERS[form](checkpoint, archive)))
    with place.hold("tiny"):
        second.start()
        second.join(0.7)
        assert second.is_alive() and not place.folder_of("tiny").exists()
    second.join(60)
    assert made and made[0].exists() and made[0].parent == place.folder_of("tiny")
    assert not list(place.folder_of("tiny").glob(".*"))


@pytest.mark.parametrize("form", WRITERS)
def test_what_has_the_name_stays_and_is_told_alike(make_adapter, form: str):
    first, other = make_adapter(), make_adapter("two", lora_alpha=16)
    archives = [delta.export(one, name)[0] for one, name in ((first, "first"), (other, "other"))]
    there = WRITERS[form](first, archives[0])
    before = {path: path.read_bytes() for path in (there, *there.rglob("*")) if path.is_file()}
    with pytest.raises(UserError, match="another model has this name") as refusal:
        WRITERS[form](other, archives[1])
    assert refusal.value.where == str(there) and "--name" in refusal.value.next_command
    assert ("--force" in refusal.value.expected) is (form != "delta-import")
    assert {path: path.read_bytes() for path in before} == before


def test_a_forced_merge_takes_the_old_ones_place_in_one_step(make_adapter, monkeypatch: pytest.MonkeyPatch):
    """There is no moment without a whole folder under the name: no name is taken away before the new one has it."""
    first = merge.standalone(make_adapter(), "tiny")
    monkeypatch.setattr(Path, "rename", lambda *_: pytest.fail("a rename of its own"))
    second = merge.standalone(make_adapter("two", lora_alpha=16), "tiny", force=True)
    assert second.folder == first.folder and second.manifest["weights_sha256"] != first.manifest["weights_sha256"]
    assert files.verify_manifest(second.folder, "checkpoint") == second.manifest
    assert [path.name for path in second.folder.parent.iterdir()] == [second.folder.name]


def test_a_path_is_no_name():
    with pytest.raises(UserError, match="not a name"), place.hold("../../escape"):
        pass
    assert not paths.roots().data.exists()
