"""Adapters handed on as a zip: what goes in, and everything that must not come out."""

import hashlib
import json
import zipfile
from pathlib import Path

import pytest

from tests.export.tiny_adapter import DAMAGED, damage, logits_by_peft, write_adapter
from tests.export.tiny_checkpoint import BASE
from training.cli import main
from training.core import files, paths
from training.core.errors import IntegrityError, UserError
from training.evaluation import kept
from training.evaluation.conditions import Identity
from training.export import delta
from training.export.checkpoint import Checkpoint, open_checkpoint


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Checkpoint:
    folder = write_adapter(tmp_path / "someone/adapter", base, base_model_name_or_path=BASE, revision="/home/someone")
    return open_checkpoint(str(folder))


@pytest.fixture
def archive(adapter: Checkpoint) -> Path:
    return delta.export(adapter, "mine")[0]


def _rewritten(archive: Path, target: Path, **changes: object) -> Path:
    """A copy with entries replaced, added or (None) left out."""
    with zipfile.ZipFile(archive) as old, zipfile.ZipFile(target, "w") as new:
        entries = {info.filename: old.read(info) for info in old.infolist()} | changes
        for name, data in entries.items():
            if data is not None:
                new.writestr(name, data)
    return target


def _with_manifest(archive: Path, target: Path, **changes: object) -> Path:
    with zipfile.ZipFile(archive) as old:
        manifest = json.loads(old.read("manifest.json"))
    return _rewritten(archive, target, **{"manifest.json": json.dumps(manifest | changes)})


def test_the_same_adapter_gives_the_same_bytes_and_names_no_place(adapter: Checkpoint, archive: Path, tmp_path: Path):
    first = archive.read_bytes()
    assert delta.export(adapter, "mine")[0].read_bytes() == first
    with zipfile.ZipFile(archive) as opened:
        assert sorted(opened.namelist()) == sorted(delta.NAMES)
        texts = opened.read("adapter_config.json") + opened.read("manifest.json")
    assert str(tmp_path).encode() not in first and b"/home/someone" not in first and b"tiny-base" in texts


def test_what_goes_out_comes_in_as_a_source(adapter: Checkpoint, archive: Path):
    folder, manifest = delta.load(archive, "theirs")
    again = open_checkpoint(str(folder))
    assert again.adapter.counts == adapter.adapter.counts
    assert again.origin["weights_sha256"] == adapter.origin["weights_sha256"] and manifest["base"]["name"] == BASE
    assert again.shapes == adapter.shapes
    assert delta.load(archive, "theirs")[0] == folder  # once more changes nothing


def test_both_commands(adapter: Checkpoint, capsys: pytest.CaptureFixture[str]):
    assert main(["delta-export", str(adapter.adapter.folder), "--name", "mine", "--json"]) == 0
    path = paths.roots().trained / "mine/mine.delta.zip"
    assert main(["delta-import", str(path), "--name", "theirs", "--json"]) == 0
    assert "make export-gguf CHECKPOINT=" in capsys.readouterr().err
    assert main(["delta-import", "nothing.zip"]) == 2


def test_it_says_what_is_known_of_the_adapter(adapter: Checkpoint, capsys: pytest.CaptureFixture[str]):
    """Scores of base and adapter on the same paper under the same conditions, and what its exports are off it."""
    own, base = adapter.origin["weights_sha256"], adapter.origin["base"]["weights_sha256"]
    paper, conditions = {"kind": "exam", "name": "sums", "sha256": "5" * 64, "num_questions": 2}, {"precision": "F32"}
    for sha256, right, asked in ((base, 0, paper), (own, 2, paper), (own, 1, paper | {"sha256": "6" * 64})):
        kept.write(Identity({"sha256": sha256}, asked, conditions), {"score": {"right": right}}, kept.EXAM)
    kept.write(Identity({"sha256": base}, paper, {"precision": "BF16"}), {"score": {"right": 1}}, kept.EXAM)
    exported = {"kind": "gguf", "quant_type": "F32", "sha256": "7" * 64, "weights_sha256": own, "parity": {"top": 5}}
    files.write_json(paths.roots().trained / "mine/mine-F32.manifest.json", exported)
    files.write_json(paths.roots().trained / "other/other-F32.manifest.json", exported | {"weights_sha256": base})
    (paths.roots().trained / "other/broken.manifest.json").write_text("{")
    command = ["delta-export", str(adapter.adapter.folder), "--name", "mine", "--json"]
    assert main(command) == 0
    manifest = json.loads(capsys.readouterr().out)["manifest"]
    assert manifest["scores"] == [
        {"roles": ["exam"], "paper": paper, "before": {"right": 0}, "after": {"right": 2}}
    ]  # fmt: skip
    assert [(one["sha256"], one["parity"]) for one in manifest["parity"]] == [("7" * 64, {"top": 5})]


def test_what_is_known_by_now_takes_the_place_of_what_was(adapter: Checkpoint, archive: Path, tmp_path: Path, base):
    again, manifest = delta.export(adapter, "mine", scores=[{"roles": ["exam"]}])
    assert again == archive and manifest["scores"] and delta.load(archive, "theirs")[1] == manifest
    other = write_adapter(tmp_path / "other", base, targets=("k_proj",), base_model_name_or_path=BASE)
    with pytest.raises(UserError):
        delta.export(open_checkpoint(str(other)), "mine")


@pytest.mark.parametrize(
    "changes",
    [{"../escape.txt": b"x"}, {"/tmp/escape.txt": b"x"}, {"more.py": b"x"}, {"adapter_config.json": None}],
    ids=["parent", "absolute", "another name", "missing"],
)  # fmt: skip
def test_other_names_are_refused_and_nothing_is_written(archive: Path, tmp_path: Path, changes: dict):
    spoiled = _rewritten(archive, tmp_path / "x.zip", **changes)
    before = set(paths.roots().data.rglob("*"))
    with pytest.raises(IntegrityError, match="other files than it may"):
        delta.load(spoiled, "theirs")
    assert set(paths.roots().data.rglob("*")) == before and not list(tmp_path.parent.glob("escape*"))


def test_a_link_is_refused(archive: Path, tmp_path: Path):
    target = tmp_path / "x.zip"
    with zipfile.ZipFile(archive) as old, zipfile.ZipFile(target, "w") as new:
        for info in old.infolist():
            if info.filename == "adapter_config.json":
                info = zipfile.ZipInfo(info.filename)
                info.external_attr = 0o120777 << 16
            new.writestr(info, old.read(info.filename))
    with pytest.raises(IntegrityError, match="other files"):
        delta.load(target)


def test_a_bomb_is_refused_before_it_is_unpacked(archive: Path, tmp_path: Path):
    target = tmp_path / "x.zip"
    with zipfile.ZipFile(archive) as old, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as new:
        for info in old.infolist():
            bomb = info.filename == "adapter_model.safetensors"
            new.writestr(info.filename, bytes(64 << 20) if bomb else old.read(info))
    with pytest.raises(IntegrityError, match="larger than it may be"):
        delta.load(target)


def test_an_entry_that_is_larger_than_it_claims_is_refused(archive: Path, tmp_path: Path):
    data = bytearray(archive.read_bytes())
    with zipfile.ZipFile(archive) as old:
        size = old.getinfo("adapter_model.safetensors").file_size
    small = (size - 64).to_bytes(4, "little")
    place = data.rindex(size.to_bytes(4, "little"))
    data[place : place + 4] = small
    (tmp_path / "x.zip").write_bytes(data)
    with pytest.raises(IntegrityError):
        delta.load(tmp_path / "x.zip", "theirs")


def test_an_unknown_base_is_refused(archive: Path, tmp_path: Path):
    other = {"name": "unknown", "weights_sha256": "0" * 64}
    with pytest.raises(UserError, match="base is not known"):
        delta.load(_with_manifest(archive, tmp_path / "x.zip", base=other), "theirs")


def test_other_weights_of_the_base_are_refused(archive: Path, tmp_path: Path):
    other = {"name": BASE, "weights_sha256": "0" * 64}
    with pytest.raises(UserError, match="other weights of its base"):
        delta.load(_with_manifest(archive, tmp_path / "x.zip", base=other), "theirs")


def test_a_lying_header_of_a_tensor_is_refused(archive: Path, tmp_path: Path):
    with zipfile.ZipFile(archive) as old:
        data = bytearray(old.read("adapter_model.safetensors"))
        manifest = json.loads(old.read("manifest.json"))
    data[:8] = (1 << 40).to_bytes(8, "little")
    digest = hashlib.sha256(data).hexdigest()
    manifest["files"]["adapter_model.safetensors"] = {"sha256": digest, "bytes": len(data)}
    changes = {"adapter_model.safetensors": bytes(data), "manifest.json": json.dumps(manifest)}
    with pytest.raises(IntegrityError, match="not a safetensors file"):
        delta.load(_rewritten(archive, tmp_path / "x.zip", **changes), "theirs")
    assert not (paths.roots().trained / "theirs" / "theirs-delta").exists()


@pytest.mark.parametrize("data", [b"", b"PK", b"no zip at all", b"{}"])
def test_what_is_no_zip_is_refused(tmp_path: Path, data: bytes):
    (tmp_path / "x.zip").write_bytes(data)
    with pytest.raises(IntegrityError, match="not a delta's zip"):
        delta.load(tmp_path / "x.zip")


@pytest.mark.parametrize("manifest", [b"[]", b"{}", b'{"kind": "delta"}', b"not json", b"[" * 100000])
def test_a_damaged_manifest_is_refused(archive: Path, tmp_path: Path, manifest: bytes):
    with pytest.raises(IntegrityError, match="manifest"):
        delta.load(_rewritten(archive, tmp_path / "x.zip", **{"manifest.json": manifest}), "theirs")


@pytest.mark.parametrize(
    ("key", "value"),
    [("tokenizer", "x"), ("tokenizer", {"name": "x"}), ("tokenizer", None), ("dataset", "x"), ("dataset", {"name": 1}),
     ("run", "../run"), ("run", 7), ("step", "x"), ("step", True), ("name", None), ("name", "../x"), ("base", "x"),
     ("base", {"name": 1, "weights_sha256": 2}), ("method", None), ("recipe_sha256", 1)],
)  # fmt: skip
def test_a_claim_of_another_form_is_one_error(archive: Path, tmp_path: Path, key: str, value: object, capsys):
    spoiled = _with_manifest(archive, tmp_path / "x.zip", **{key: value})
    assert main(["delta-import", str(spoiled), "--name", "theirs"]) == 5
    told = capsys.readouterr().err
    assert "manifest is damaged" in told and f"manifest.json: {key}" in told
    assert not (paths.roots().trained / "theirs" / "theirs-delta").exists()


def _with_adapter(archive: Path, target: Path, **entries: bytes) -> Path:
    """A copy with another adapter under hashes that are right."""
    with zipfile.ZipFile(archive) as old:
        manifest = json.loads(old.read("manifest.json"))
    for name, data in entries.items():
        manifest["files"][name] = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    return _rewritten(archive, target, **entries, **{"manifest.json": json.dumps(manifest)})


@pytest.mark.parametrize("case", DAMAGED)
def test_a_crafted_adapter_is_one_error_and_nothing_is_imported(archive: Path, tmp_path: Path, case: str, capsys):
    folder = tmp_path / "crafted"
    folder.mkdir()
    with zipfile.ZipFile(archive) as old:
        old.extractall(folder)
    damage(folder, case)
    entries = {name: (folder / name).read_bytes() for name in ("adapter_config.json", "adapter_model.safetensors")}
    spoiled = _with_adapter(archive, tmp_path / "x.zip", **entries)
    assert main(["delta-import", str(spoiled), "--name", "theirs"]) == 5
    assert "Traceback" not in capsys.readouterr().err
    assert not (paths.roots().trained / "theirs" / "theirs-delta").exists()


def test_an_adapter_of_mixed_ranks_goes_round_and_peft_loads_it(base: Path, tmp_path: Path):
    ids = [0, 17, 300, 45]
    settings = {"rank_pattern": {"down_proj": 9}, "layers_to_transform": [0, 1], "layers_pattern": "layers"}
    folder = write_adapter(tmp_path / "mixed", base, base_model_name_or_path=BASE, **settings)
    there, _ = delta.load(delta.export(open_checkpoint(str(folder)), "mine")[0], "theirs")
    assert (logits_by_peft(base, there, ids) - logits_by_peft(base, folder, ids)).abs().max() == 0
    kept = json.loads((there / "adapter_config.json").read_text())
    assert {key: kept[key] for key in settings} == settings


def test_a_whole_model_is_no_delta(plain: Checkpoint):
    with pytest.raises(UserError, match="only an adapter"):
        delta.export(plain, "mine")
