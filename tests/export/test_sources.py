"""What may be exported: checkpoints by name, bases by name, adapters of ours with their base, each byte verified."""

from pathlib import Path

import pytest

from tests.export.tiny_adapter import write_adapter
from tests.export.tiny_checkpoint import BASE, edit_json
from training.core import files
from training.core.errors import IntegrityError, UserError
from training.export import chain, export
from training.export.checkpoint import open_checkpoint


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


def test_an_adapter_of_ours_finds_its_base_and_the_chain_names_it(tuned_adapter: Path, base: Path):
    checkpoint = open_checkpoint(tuned_adapter.parents[1].name)
    assert checkpoint.adapter.counts["factors"] == 8 and checkpoint.folder == base.absolute()
    assert checkpoint.input_hashes()["base"] == checkpoint.origin["base"]["weights_sha256"]
    states = {link.name: link.state for link in chain.walk(str(tuned_adapter))}
    assert states["weights"] == states["base"] == "ok"
    (base / "manifest.json").unlink()
    assert {link.name: link.state for link in chain.walk(str(tuned_adapter))}["base"] == "absent"


def test_another_base_under_the_name_is_refused(tuned_adapter: Path):
    manifest = files.read_json(tuned_adapter / "manifest.json")
    edit_json(tuned_adapter / "manifest.json", base=manifest["base"] | {"weights_sha256": "0" * 64})
    with pytest.raises(IntegrityError, match="not the one that the adapter was trained on"):
        open_checkpoint(str(tuned_adapter))


def test_a_changed_byte_of_an_adapter_is_found(tuned_adapter: Path):
    with open(tuned_adapter / "adapter_model.safetensors", "r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x01")
    with pytest.raises(IntegrityError, match="bytes have changed"):
        open_checkpoint(str(tuned_adapter))


def test_without_a_bos_eos_stands_for_it(make_folder):
    """Else llama.cpp takes id 11 for one."""
    folder = make_folder(bos_token_id=None)
    document = files.read_json(folder / "tokenizer.json") | {"post_processor": None}
    files.write_json(folder / "tokenizer.json", document)
    edit_json(folder / "tokenizer_config.json", bos_token=None, add_bos_token=None)
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint.add_bos is False and checkpoint.bos_id == checkpoint.special_id("eos") == 1


def test_the_default_name_is_the_recipes_of_what_is_exported(tuned_adapter: Path, base: Path, make_folder):
    """Not the base's, which lies beside many adapters; a folder without a recipe gives its own name."""
    assert export.default_name(open_checkpoint(str(tuned_adapter))) == "tiny"
    assert export.default_name(open_checkpoint(BASE)) == BASE
    assert export.default_name(open_checkpoint(str(make_folder("plain")))) == "plain"
    foreign = write_adapter(base.parent / "foreign", base, base_model_name_or_path=BASE)
    assert export.default_name(open_checkpoint(str(foreign))) == "foreign"
