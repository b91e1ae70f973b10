"""What is refused before a conversion: each trial is a way to a GGUF that does not load, or is another model."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.export.tiny_checkpoint import ENTRIES, HIDDEN, edit_json, random_weights, train_tokenizer
from training.core.errors import IntegrityError, Problems, UserError
from training.export import checks
from training.export.checkpoint import Checkpoint, open_checkpoint

KNOWN = frozenset({"LlamaForCausalLM"})


def _open(folder: Path, **kwargs) -> Checkpoint:
    return open_checkpoint(str(folder), **kwargs)


def test_a_good_checkpoint_passes(plain: Checkpoint):
    checks.check(plain, KNOWN)
    checks.check_weights(plain)
    assert plain.add_bos is True and plain.special_id("bos") == 0 and plain.special_id("eos") == 1
    assert plain.num_parameters == sum(array.size for array in random_weights().values())


def test_entries_without_rows_are_named(make_folder, tmp_path: Path):
    """B47: 515 entries, 512 rows."""
    folder = make_folder()
    document = json.loads((folder / "tokenizer.json").read_text())
    for number in range(ENTRIES, 515):
        token = {"id": number, "content": f"<extra_{number}>", "special": True, "single_word": False, "lstrip": False}
        document["added_tokens"].append(token | {"rstrip": False, "normalized": False})
    (folder / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(UserError) as refusal:
        checks.check(_open(folder), KNOWN)
    assert refusal.value.what.startswith("3 entries")
    assert all(f"<extra_{number}>" in refusal.value.found for number in (512, 513, 514))


def test_a_vocabulary_size_that_is_not_the_embeddings_is_refused(make_folder):
    with pytest.raises(UserError, match="not the embedding's"):
        checks.check(_open(make_folder(vocab_size=600)), KNOWN)


@pytest.mark.parametrize("context", [1, 2])
def test_a_context_without_room_for_a_proof_is_named(make_folder, context: int):
    with pytest.raises(UserError, match="too short") as refusal:
        checks.check(_open(make_folder(max_position_embeddings=context)), KNOWN)
    assert (refusal.value.found, refusal.value.where) == (str(context), "config.json: max_position_embeddings")


def test_an_untied_model_needs_its_head(make_folder):
    """B50: the runtime would take the embedding for the output, Hugging Face a random head."""
    folder = make_folder(weights=random_weights(tied=True), tied=False)
    with pytest.raises(UserError, match="without a head"):
        checks.check(_open(folder), KNOWN)


def test_a_tied_flag_over_two_different_tensors_is_refused(make_folder):
    """B48."""
    weights = random_weights()
    with pytest.raises(UserError, match="the two tensors differ"):
        checks.check(_open(make_folder("two", weights=weights, tied=True)), KNOWN)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].copy()
    checks.check(_open(make_folder("same", weights=weights, tied=True)), KNOWN)


def test_a_head_of_another_height_is_refused(make_folder):
    weights = random_weights() | {"lm_head.weight": np.zeros((503, HIDDEN), np.float32)}
    with pytest.raises(UserError, match="differ in rows"):
        checks.check(_open(make_folder(weights=weights)), KNOWN)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_weight_that_is_no_number_is_named(make_folder, value: float):
    weights = random_weights()
    weights["model.layers.1.mlp.down_proj.weight"][3, 5] = value
    with pytest.raises(IntegrityError) as refusal:
        checks.check_weights(_open(make_folder(weights=weights)))
    assert "model.layers.1.mlp.down_proj.weight" in refusal.value.where and refusal.value.found.startswith("1 of")


def test_a_missing_end_token_is_refused(make_folder):
    """Without one llama.cpp takes id 11, and the model stops at a letter."""
    folder = make_folder(eos_token_id=None)
    edit_json(folder / "tokenizer_config.json", eos_token=None)
    with pytest.raises(UserError, match="no EOS"):
        checks.check(_open(folder), KNOWN)


def test_an_add_bos_flag_other_than_the_tokenizers_doing_is_refused(make_folder):
    """B31."""
    folder = make_folder()
    edit_json(folder / "tokenizer_config.json", add_bos_token=False)
    with pytest.raises(UserError, match="add-BOS"):
        checks.check(_open(folder), KNOWN)


TEMPLATES = [{"name": "default", "template": "{{ messages }}"}, {"name": "tool_use", "template": "{{ tools }}"}]


def test_of_several_templates_the_default_is_taken(make_folder):
    """Older folders hold a list, and a file beside it since."""
    folder = make_folder()
    edit_json(folder / "tokenizer_config.json", chat_template=TEMPLATES)
    checks.check(_open(folder), KNOWN)
    assert _open(folder).chat_template == "{{ messages }}"
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    checks.check(_open(folder), KNOWN)
    (folder / "chat_template.jinja").write_text("{{ others }}")
    with pytest.raises(UserError, match="two different chat templates"):
        checks.check(_open(folder), KNOWN)


@pytest.mark.parametrize(
    "inside", [[], TEMPLATES[1:], ["{{ messages }}"], [{"name": "default"}], {"default": "{{ messages }}"}, 7,
               TEMPLATES + TEMPLATES],
)  # fmt: skip
def test_templates_of_which_none_is_meant_are_refused(make_folder, inside: object):
    folder = make_folder()
    edit_json(folder / "tokenizer_config.json", chat_template=inside)
    with pytest.raises(UserError, match="which chat template is meant"):
        checks.check(_open(folder), KNOWN)


def test_two_different_templates_are_refused(make_folder):
    """B55."""
    folder = make_folder()
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert _open(folder).chat_template == "{{ messages }}"
    checks.check(_open(folder), KNOWN)
    edit_json(folder / "tokenizer_config.json", chat_template="{{ messages }}\n")
    with pytest.raises(UserError, match="two different chat templates"):
        checks.check(_open(folder), KNOWN)


def test_everything_wrong_is_told_at_once(make_folder):
    folder = make_folder(architectures=["UnheardOfForCausalLM"], vocab_size=600)
    with pytest.raises(Problems) as refusal:
        checks.check(_open(folder), KNOWN)
    assert len(refusal.value.problems) == 2 and "UnheardOfForCausalLM" in str(refusal.value)


def test_a_name_that_llama_cpp_reads_as_a_family_is_refused(plain: Checkpoint):
    """The server looks for `phi-3` in the display name, and then for tokens that are not there."""
    checks.check_name(plain, "philosopher-3")
    with pytest.raises(UserError, match="Phi 3's tokenizer"):
        checks.check_name(plain, "my-Phi-3-tuned")


# ---- opening


def test_a_folder_that_is_no_checkpoint_is_refused(make_folder):
    folder = make_folder()
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="no weights"):
        _open(folder)


def test_a_lying_header_is_refused(make_folder):
    folder = make_folder()
    with open(folder / "model.safetensors", "r+b") as file:
        file.write((1 << 40).to_bytes(8, "little"))
    with pytest.raises(IntegrityError, match="not a safetensors file"):
        checks.check(_open(folder), KNOWN)


def test_weights_alone_need_a_tokenizer(make_folder, tmp_path: Path, tokenizer_files: Path):
    folder = make_folder()
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UserError) as refusal:
        _open(folder)
    assert "--tokenizer" in refusal.value.expected
    assert _open(folder, tokenizer=str(tokenizer_files)).add_bos is True


def test_a_split_rule_that_llama_cpp_does_not_have_is_refused(make_folder):
    """B46: no known name is ever put on an unknown rule."""
    folder = make_folder()
    document = json.loads((folder / "tokenizer.json").read_text())
    document["pre_tokenizer"] = {"type": "Whitespace"}
    (folder / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(IntegrityError, match="none that llama"):
        _open(folder)


def test_a_tokenizer_of_another_run_is_refused(ours: Path, tmp_path: Path):
    train_tokenizer(tmp_path / "other", "gpt-2")
    with pytest.raises(IntegrityError, match="not the tokenizer"):
        _open(ours, tokenizer=str(tmp_path / "other"))


def test_a_changed_byte_of_our_checkpoint_is_found(ours: Path):
    with open(ours / "model.safetensors", "r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x01")
    with pytest.raises(IntegrityError, match="changed"):
        _open(ours)


def test_a_manifest_that_names_another_rule_is_refused(ours: Path):
    """B46: the label gpt-2 on a Llama-3 split."""
    manifest = json.loads((ours / "manifest.json").read_text())
    edit_json(ours / "manifest.json", tokenizer=manifest["tokenizer"] | {"pre_tokenizer": "gpt-2"})
    with pytest.raises(IntegrityError, match="pre-tokenizer is not the tokenizer's own"):
        _open(ours)
