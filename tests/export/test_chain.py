"""The chain walked back: each link whole, each link broken in turn, and what is simply not there."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.export.tiny_checkpoint import BASE, edit_json
from training.cli import main
from training.core import files
from training.core.errors import IntegrityError, UserError
from training.export import chain, delta, export, manifest, merge, plan
from training.export.checkpoint import open_checkpoint
from training.export.gguf_file import GgufFile
from training.recipe import bases
from training.tokenizer import artifact, huggingface

NAMES = ["manifest", "GGUF", "weights", "recipe", "run", "dataset", "tokenizer"]


@pytest.fixture
def gguf(ours: Path, own_roots: Path) -> Path:
    """A file and its manifest that name the chain of `ours`; the chain does not read what is inside the file."""
    path = own_roots / "models/trained/tiny/tiny-F16.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"GGUF" + bytes(1000))
    origin = files.read_json(ours / "manifest.json")
    keys = ("run", "step", "weights_sha256", "recipe_sha256", "dataset", "tokenizer")
    body = {"schema": 1, "kind": "gguf", "file": path.name, **files.file_record(path)}
    files.write_json(manifest.path_of(path), body | {key: origin[key] for key in keys})
    return path


def _states(start: object) -> dict[str, str]:
    return {link.name: link.state for link in chain.walk(str(start))}


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_whole_chain_is_ok_from_every_start(gguf: Path, ours: Path, own_roots: Path):
    assert _states(gguf) == dict.fromkeys(NAMES, "ok")
    assert _states("/app/models/trained/tiny/tiny-F16.gguf") == dict.fromkeys(NAMES, "ok")
    for start in (ours, ours.parents[1], ours.parents[1].name):
        assert _states(start) == dict.fromkeys(NAMES[2:], "ok")
    [dataset] = (own_roots / "training/datasets/tiny").iterdir()
    [tokenizer] = (own_roots / "training/tokenizers/tiny").iterdir()
    assert _states(dataset) == {"dataset": "ok"} and _states(tokenizer) == {"tokenizer": "ok"}
    assert _states(f"tiny@{dataset.name}") == {"dataset": "ok"}


@pytest.mark.parametrize(
    ("name", "pattern", "also"),
    [
        ("GGUF", "models/trained/tiny/tiny-F16.gguf", set()),
        ("weights", "training/runs/*/checkpoints/*/model.safetensors", set()),
        ("dataset", "training/datasets/tiny/*/validation.jsonl", set()),
        ("tokenizer", "training/tokenizers/tiny/*/tokenizer.json", set()),
        ("recipe", "training/runs/*/checkpoints/*/recipe.json", {"weights"}),
    ],
)
def test_one_changed_byte_breaks_its_own_link(gguf: Path, own_roots: Path, name: str, pattern: str, also: set[str]):
    [path] = own_roots.glob(pattern)
    if name == "recipe":
        edit_json(path, method="full")
    else:
        _flip(path)
    assert _states(gguf) == dict.fromkeys(NAMES, "ok") | dict.fromkeys({name} | also, "broken")


@pytest.mark.parametrize("key", ["recipe_sha256", "dataset", "tokenizer"])
def test_a_run_that_claims_something_else_is_broken(gguf: Path, ours: Path, key: str):
    other = "0" * 64 if key == "recipe_sha256" else {"name": "other", "hash": "0" * 64}
    edit_json(ours.parents[1] / "run.json", **{key: other})
    assert _states(gguf)["run"] == "broken"


def test_a_run_whose_recipe_has_changed_is_broken(gguf: Path, ours: Path):
    (ours.parents[1] / "recipe.yaml").write_text("name: tiny\nmethod: nothing of ours\n")
    assert _states(gguf)["run"] == "broken"


def test_a_checkpoint_of_another_training_is_broken(gguf: Path, ours: Path):
    edit_json(ours / "manifest.json", weights_sha256="0" * 64)
    assert _states(gguf)["weights"] == "broken"


@pytest.mark.parametrize(
    ("name", "folder"),
    [("weights", "training/runs/*/checkpoints/*/"), ("run", "training/runs/*/"), ("dataset", "training/datasets/*/"),
     ("tokenizer", "training/tokenizers/*/")],
)  # fmt: skip
def test_what_is_not_on_this_machine_is_absent_and_not_broken(gguf: Path, own_roots: Path, name: str, folder: str):
    [path] = own_roots.glob(folder)
    shutil.rmtree(path)
    states = _states(gguf)
    assert states[name] == "absent" and "broken" not in states.values()


def test_without_a_manifest_the_walk_ends_there(gguf: Path):
    manifest.path_of(gguf).unlink()
    assert _states(gguf) == {"manifest": "broken"}


def test_a_damaged_best_checkpoint_is_not_passed_over(ours: Path):
    _flip(ours / "model.safetensors")
    assert _states(ours.parents[1].name)["weights"] == "broken"


def test_the_command_names_the_first_broken_link(gguf: Path, own_roots: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["verify", str(gguf), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["first_broken"] is None
    _flip(next(own_roots.glob("training/datasets/tiny/*/train.jsonl")))
    _flip(gguf)
    assert main(["verify", str(gguf), "--json"]) == 5
    captured = capsys.readouterr()
    assert json.loads(captured.out)["first_broken"] == "GGUF"
    assert "FAIL: the first broken link is GGUF (exit 5)" in captured.err
    assert main(["verify", "tiny"]) == 5, "the data set, by its own name"
    reference = f"tiny@{next(own_roots.glob('training/datasets/tiny/*')).name}"
    assert re.search(f"next +make data-verify DATASET={reference}\n", capsys.readouterr().err)


def test_a_path_outside_the_models_or_a_missing_one_is_the_users_error(gguf: Path, tmp_path: Path):
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(UserError, match="outside its root"):
        _states(tmp_path / "x.gguf")
    for missing in ("/app/models/nothing.gguf", "nothing.gguf", tmp_path / "nothing.gguf"):
        with pytest.raises(UserError, match="no such model file") as caught:
            _states(missing)
        assert "/app/models/trained/tiny/tiny-F16.gguf" in caught.value.found


@pytest.mark.parametrize(
    ("name", "near"),
    [("tiny-F16", "/app/models/trained/tiny/tiny-F16.gguf"), ("tinny", "tiny"), ("tiny@ffffffffffff", "tiny"),
     ("20261129-000000-tiny-0002", "20261129-000000-tiny-0001"), ("zzzz", "a tokenizer")],
)  # fmt: skip
def test_a_name_of_nothing_says_what_can_be_verified(gguf: Path, ours: Path, name: str, near: str):
    with pytest.raises(UserError, match="nothing of that name to verify") as caught:
        _states(name)
    assert caught.value.found == name and near in caught.value.expected and "a base" in caught.value.expected


def test_a_file_that_its_folder_names_too_is_proposed_once(own_roots: Path):
    file = own_roots / "models/trained/units/units-F16.gguf"
    file.parent.mkdir(parents=True)
    file.touch()
    with pytest.raises(UserError, match="nothing of that name to verify") as caught:
        _states("units-F1")
    assert caught.value.expected.count("/app/models/trained/units/units-F16.gguf") == 1


# ---- a model on a base


@pytest.fixture
def tuned(gguf: Path, ours: Path, base: Path, own_roots: Path) -> Path:
    """The chain of `ours`, but trained on the base and with the tokenizer that lies in the base's folder alone."""
    [tokenizers] = own_roots.glob("training/tokenizers")
    shutil.rmtree(tokenizers)
    described = huggingface.describe(base) | {"name": BASE}
    files.write_json(base / artifact.MANIFEST_IN_CHECKPOINT, described)
    kept = files.read_json(base / "manifest.json")
    body = {key: kept[key] for key in ("name", "revision", "weights_sha256", "pinned")}
    own = {"name": BASE, "hash": described["hash"]}
    files.write_manifest(base, "base", body | {"tokenizer": own})
    claims = {"base": {key: body[key] for key in ("name", "revision", "weights_sha256")}, "tokenizer": own}
    for path in (ours / "manifest.json", ours.parents[1] / "run.json", manifest.path_of(gguf)):
        edit_json(path, **claims)
    return base


def test_a_model_on_a_base_is_whole_with_the_bases_own_tokenizer(gguf: Path, tuned: Path):
    assert list(_states(gguf).items()) == [
        (name, "ok") for name in ("manifest", "GGUF", "weights", "base", "recipe", "run", "dataset", "tokenizer")
    ]
    assert main(["verify", str(gguf)]) == 0
    assert _states(BASE) == _states(tuned) == {"base": "ok", "tokenizer": "ok"}


def test_a_base_that_is_exported_itself_has_no_run_to_miss(gguf: Path, tuned: Path):
    edit_json(manifest.path_of(gguf), run=None, step=None, recipe_sha256=None, dataset=None,
              weights_sha256=files.read_json(tuned / "manifest.json")["weights_sha256"])  # fmt: skip
    assert _states(gguf) == dict.fromkeys(("manifest", "GGUF", "base", "tokenizer"), "ok")


def test_a_base_is_held_against_the_pins(gguf: Path, tuned: Path, monkeypatch: pytest.MonkeyPatch):
    """By the manifest's word of what it was made of, and by the files themselves, whatever a manifest says of them."""
    known = bases.load()
    pins = {"model.safetensors": "0" * 64}
    monkeypatch.setattr(bases, "load", lambda path=None: {BASE: replace(known[BASE], files=pins)})
    assert _states(gguf)["base"] == "broken"
    monkeypatch.setattr(bases, "load", lambda path=None: known)
    assert _states(gguf)["base"] == "ok"
    pinned = files.read_json(tuned / "manifest.json")
    _flip(tuned / "model.safetensors")
    assert _states(gguf)["base"] == "broken"
    body = {key: value for key, value in pinned.items() if key not in ("schema", "kind", "files")}
    files.write_manifest(tuned, "base", body)  # the manifest follows the files; the pin does not
    assert _states(gguf)["base"] == "broken"


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "tokenizer_manifest.json"])
def test_a_changed_byte_of_a_bases_tokenizer_is_found(gguf: Path, tuned: Path, name: str):
    _flip(tuned / name)
    states = _states(gguf)
    assert states["tokenizer"] == states["base"] == "broken"


def test_another_tokenizer_than_the_bases_is_absent_and_a_base_that_is_gone_too(gguf: Path, tuned: Path):
    shutil.rmtree(tuned)
    states = _states(gguf)
    assert (states["base"], states["tokenizer"]) == ("absent", "absent") and "broken" not in states.values()


# ---- folders made here


@pytest.fixture
def made(tuned_adapter: Path) -> dict[str, Path]:
    """The run's adapter as a merged folder, and as a delta that went out and came in."""
    described = files.read_json(tuned_adapter / "manifest.json")
    edit_json(tuned_adapter.parents[1] / "run.json", base=described["base"], method="lora")
    checkpoint = open_checkpoint(str(tuned_adapter))
    merged = merge.standalone(checkpoint, "merged").folder
    return {"merged": merged, "delta": delta.load(delta.export(checkpoint, "out")[0], "in")[0]}


def _gguf_of(folder: Path, own_roots: Path) -> Path:
    """A file with the manifest that an export of the folder writes; its tensors are not looked at."""
    gguf = own_roots / "models/trained/x/x-F16.gguf"
    gguf.parent.mkdir(parents=True)
    gguf.write_bytes(b"GGUF" + bytes(100))
    checkpoint, record = open_checkpoint(str(folder)), files.file_record(gguf)
    facts = GgufFile(
        **record, tensor_sha256="0", tensor_types={}, architecture="llama", vocab_size=512, context_length=256,
        parameters=1, pre_tokenizer="llama-bpe", add_bos=True, bos_id=0, eos_id=1, chat_template=None,
        tensor_names=frozenset(), values={}, rope_factors={},
    )  # fmt: skip
    target = export._Target("F16", gguf, "0", plan.make(checkpoint, "F16", "llama"))
    files.write_json(manifest.path_of(gguf), export._manifest(checkpoint, target, "x", facts, {}))
    return gguf


LINKS = {
    "merged": ["merged weights", "weights", "base", "recipe", "run", "dataset", "tokenizer"],
    "delta": ["weights", "base", "recipe", "run", "dataset", "tokenizer"],
}


@pytest.mark.parametrize("kind", LINKS)
def test_a_folder_made_here_and_its_gguf_are_walked_to_the_run(made, own_roots: Path, kind: str):
    assert _states(made[kind]) == dict.fromkeys(LINKS[kind], "ok")
    assert main(["verify", str(made[kind])]) == 0
    gguf = _gguf_of(made[kind], own_roots)
    assert list(_states(gguf).items()) == [(name, "ok") for name in ("manifest", "GGUF", *LINKS[kind])]


@pytest.mark.parametrize("kind", LINKS)
def test_a_changed_byte_of_a_folder_made_here_is_found(made, own_roots: Path, kind: str):
    gguf = _gguf_of(made[kind], own_roots)
    [run] = own_roots.glob("training/runs/*")
    _flip(next(made[kind].glob("*.safetensors")))
    assert _states(made[kind])[LINKS[kind][0]] == "broken"
    shutil.rmtree(run)  # of a delta the run's own checkpoint was looked at
    states = _states(gguf)
    assert states[LINKS[kind][0]] == "broken" and states["run"] == states["recipe"] == "absent"


@pytest.mark.parametrize("kind", LINKS)
def test_a_folder_made_elsewhere_is_whole_without_its_run(made, own_roots: Path, kind: str):
    [run] = own_roots.glob("training/runs/*")
    shutil.rmtree(run)
    states = _states(made[kind])
    assert states == dict.fromkeys(LINKS[kind], "ok") | dict.fromkeys(("recipe", "run"), "absent")
    if kind == "merged":
        shutil.rmtree(made["delta"])
        assert _states(made[kind])["weights"] == "absent"


# ---- the manifest itself


def test_the_manifest_is_of_this_very_file(gguf: Path):
    assert manifest.verify(gguf)["file"] == gguf.name
    other = gguf.with_name("other-F16.gguf")
    shutil.copy(gguf, other)
    shutil.copy(manifest.path_of(gguf), manifest.path_of(other))
    with pytest.raises(IntegrityError, match="another file's"):
        manifest.read(other)


def test_a_changed_byte_of_the_file_is_found(gguf: Path):
    _flip(gguf)
    with pytest.raises(IntegrityError, match="bytes have changed") as failure:
        manifest.verify(gguf)
    assert failure.value.next_command.startswith("make export-gguf")
