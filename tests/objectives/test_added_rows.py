"""A tokenizer with more tokens than its base: old rows bit for bit, new ones that are trained."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.objectives.test_tuning_runs import train
from training.core import files, paths
from training.recipe import bases
from training.tokenizer import artifact

NEW = ["<|call|>", "<|result|>"]


def extend(name: str = "more", shift: int = 0) -> artifact.Tokenizer:
    """Write the base's tokenizer with two control tokens more (a wrong one by `shift`)."""
    own = artifact.load(bases.find("tiny").folder)
    folder = paths.roots().tokenizers / name / "0123456789ab"
    folder.mkdir(parents=True)
    own.copy_to(folder)
    (folder / artifact.MANIFEST_IN_CHECKPOINT).unlink()
    content = files.read_json(folder / artifact.TOKENIZER)
    entry = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for place, text in enumerate(NEW):
        content["added_tokens"].append({"id": own.vocab_size + place, "content": text, "special": True, **entry})
    if shift:
        words = content["model"]["vocab"]
        first, second = list(words)[-2:]
        words[first], words[second] = words[second], words[first]
    files.write_json(folder / artifact.TOKENIZER, content)
    specials = own.specials | {text: own.vocab_size + place for place, text in enumerate(NEW)}
    body = {
        **own.manifest, "name": name, "hash": files.sha256_file(folder / artifact.TOKENIZER), "specials": specials,
        "vocab_size": own.vocab_size + 2,
    }  # fmt: skip
    files.write_manifest(folder, "tokenizer", body)
    return artifact.load(folder)


def test_old_rows_stay_bit_for_bit_and_new_ones_begin_as_their_mean(world: Path):
    """The checkpoint of step 0 is the base and two rows more, the head's with them since it is tied."""
    extend()
    code, run = train(world / "full.yaml", "tokenizer.path=more", "checkpoint.initial=true", "stop.max_steps=4")
    assert code == 0
    base = load_file(bases.find("tiny").folder / "model.safetensors")
    first, last = (load_file(run.step_folder(step) / "model.safetensors") for step in (0, 4))
    name = "model.embed_tokens.weight"
    assert torch.equal(first[name][:384], base[name]) and first[name].shape == (386, 32)
    assert torch.allclose(first[name][384:], base[name].mean(0).expand(2, -1), atol=1e-6)
    assert all(torch.equal(first[other], base[other]) for other in base if other != name)
    assert not torch.equal(last[name][384:], first[name][384:])  # a softmax pushes on every row
    assert files.read_json(run.step_folder(4) / "config.json")["vocab_size"] == 386


def test_a_tokenizer_with_other_ids_is_refused(world: Path, capsys: pytest.CaptureFixture):
    extend(shift=1)
    assert train(world / "full.yaml", "tokenizer.path=more")[0] == 2
    assert "nor the base's with more tokens" in capsys.readouterr().err


def test_an_adapter_that_would_not_train_new_rows_is_refused(world: Path, capsys: pytest.CaptureFixture):
    extend()
    assert train(world / "lora.yaml", "tokenizer.path=more")[0] == 2
    assert "method=full" in capsys.readouterr().err
