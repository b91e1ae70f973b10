"""What may be exported: checkpoints by name, bases by name, adapters of ours with their base, each byte verified."""

from pathlib import Path

import pytest

from tests.export.tiny_adapter import write_adapter
from tests.export.tiny_checkpoint import BASE, edit_json
from training.core import files
from training.core.errors import IntegrityError, UserError
from training.export import chain
from training.export.checkpoint import open_checkpoint


@pytest.fixture
def adapter(ours: Path, base: Path) -> Path:
    """`ours` as a checkpoint of lora would be: an adapter in the place of the weights, and the base by its hash."""
    manifest = files.read_json(ours / "manifest.json")
    for name in ("model.safetensors", "config.json"):
        (ours / name).unlink()
    write_adapter(ours, base)
    (ours / "manifest.json").unlink()
    record = {"name": BASE, "revision": "1", "weights_sha256": files.sha256_file(base / "model.safetensors")}
    keys = ("run", "step", "dataset", "tokenizer", "recipe_sha256")
    body = {key: manifest[key] for key in keys} | {"method": "lora", "base": record}
    digest = files.sha256_file(ours / "adapter_model.safetensors")
    files.write_manifest(ours, "checkpoint", body | {"weights_sha256": digest})
    return ours


def _second_step(ours: Path) -> Path:
    """A newer checkpoint beside the best one."""
    newer = ours.with_name("step_000020")
    newer.mkdir()
    for path in ours.iterdir():
        (newer / path.name).write_bytes(path.read_bytes())
    edit_json(newer / "manifest.json", step=20)
    files.write_json(ours.parent / "latest.json", {"folder": newer.name, "step": 20})
    return newer


@pytest.mark.parametrize(("suffix", "step"), [("", 12), ("/best", 12), ("/latest", 20)])
def test_a_runs_checkpoint_by_name(ours: Path, suffix: str, step: int):
    _second_step(ours)
    run = ours.parents[1]
    for reference in (run.name, str(run), "latest"):
        assert open_checkpoint(f"{reference}{suffix}").origin["step"] == step


def test_a_base_by_its_name_is_verified(base: Path):
    checkpoint = open_checkpoint(BASE)
    assert checkpoint.folder == base and checkpoint.origin["base"]["name"] == BASE and checkpoint.adapter is None
    with open(base / "model.safetensors", "r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x01")
    with pytest.raises(IntegrityError, match="bytes have changed"):
        open_checkpoint(BASE)


def test_a_base_that_is_not_fetched_names_its_command(base: Path):
    (base / "manifest.json").unlink()
    with pytest.raises(UserError) as refusal:
        open_checkpoint(BASE)
    assert refusal.value.next_command == f"make base-fetch BASE={BASE}"


def test_an_adapter_of_ours_finds_its_base_and_the_chain_names_it(adapter: Path, base: Path):
    checkpoint = open_checkpoint(adapter.parents[1].name)
    assert checkpoint.adapter.counts["factors"] == 8 and checkpoint.folder == base.absolute()
    assert checkpoint.input_hashes()["base"] == checkpoint.origin["base"]["weights_sha256"]
    states = {link.name: link.state for link in chain.walk(str(adapter))}
    assert states["weights"] == states["base"] == "ok"
    (base / "manifest.json").unlink()
    assert {link.name: link.state for link in chain.walk(str(adapter))}["base"] == "absent"


def test_another_base_under_the_name_is_refused(adapter: Path):
    manifest = files.read_json(adapter / "manifest.json")
    edit_json(adapter / "manifest.json", base=manifest["base"] | {"weights_sha256": "0" * 64})
    with pytest.raises(IntegrityError, match="not the one that the adapter was trained on"):
        open_checkpoint(str(adapter))


def test_a_changed_byte_of_an_adapter_is_found(adapter: Path):
    with open(adapter / "adapter_model.safetensors", "r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x01")
    with pytest.raises(IntegrityError, match="bytes have changed"):
        open_checkpoint(str(adapter))


def test_without_a_bos_eos_stands_for_it(make_folder):
    """Else llama.cpp takes id 11 for one."""
    folder = make_folder(bos_token_id=None)
    document = files.read_json(folder / "tokenizer.json") | {"post_processor": None}
    files.write_json(folder / "tokenizer.json", document)
    edit_json(folder / "tokenizer_config.json", bos_token=None, add_bos_token=None)
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint.add_bos is False and checkpoint.bos_id == checkpoint.special_id("eos") == 1
