"""A tokenizer with more tokens than its base: old rows bit for bit, new ones that are trained."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.engine.test_run import train
from tests.objectives.tiny import resume_in_the_middle
from training.core import files, paths
from training.recipe import bases
from training.runs.events import read_events
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


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_an_adapter_trains_the_new_rows_and_keeps_them(world: Path, method: str):
    """Beside the factors the checkpoint holds the rows alone; a resume and a second run go on with them."""
    extend()
    code, run = train(world / f"{method}.yaml", "tokenizer.path=more", "checkpoint.initial=true")
    assert code == 0
    first, last = (load_file(run.step_folder(step) / "adapter_model.safetensors") for step in (0, 8))
    (name,) = (name for name in first if "lora" not in name)
    assert name == "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
    base = load_file(bases.find("tiny").folder / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.allclose(first[name], base.mean(0).expand(2, -1), atol=1e-6) and first[name].shape == (2, 32)
    assert not torch.equal(first[name], last[name])
    settings = files.read_json(run.step_folder(8) / "adapter_config.json")
    assert settings["trainable_token_indices"] == {"embed_tokens": [384, 385]}
    resume_in_the_middle(run)
    best = list(read_events(run.path, "validation"))[-1]["eval/loss_nats"]
    _, second = train(world / f"{method}.yaml", "tokenizer.path=more", f"lora.from={run.id}", "stop.max_steps=1")
    assert next(read_events(second.path, "validation"))["eval/loss_nats"] == best
    assert train(world / f"{method}.yaml", f"lora.from={run.id}", "stop.max_steps=1")[0] == 5


@pytest.mark.parametrize("tied", [True, False])
def test_trained_rows_are_those_of_a_model_that_holds_them(tied: bool):
    """Logits and gradients against the same numbers in the model's own matrices; the frozen rest gets none."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from training.objectives import targets
    from training.objectives.trained_rows import TrainedRows

    def make() -> torch.nn.Module:
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        return LlamaForCausalLM(LlamaConfig(vocab_size=20, tie_word_embeddings=tied, **sizes))

    whole, other = make(), make()
    targets.frozen(other)
    rows = TrainedRows(other, 15, 3, torch.float32)
    assert len(rows.by_name) == (1 if tied else 2)
    ids = torch.tensor([[1, 15, 16, 4, 17, 19, 14]])
    logits = [model(ids).logits for model in (whole, other)]
    assert torch.allclose(*logits, atol=1e-6)
    for one in logits:
        one.square().sum().backward()
    wanted = [whole.model.embed_tokens.weight.grad] + ([] if tied else [whole.lm_head.weight.grad])
    for mine, theirs in zip(rows.by_name.values(), wanted, strict=True):
        assert torch.allclose(mine.grad, theirs[15:18], atol=1e-5)
    assert all(parameter.grad is None for parameter in other.parameters() if not parameter.requires_grad)
