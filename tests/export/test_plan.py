"""Types and sizes told from shapes alone."""

from pathlib import Path

import pytest

from training.core.errors import UserError
from training.export import export, plan
from training.export.checkpoint import Checkpoint
from training.llamacpp import convert, quantize
from training.llamacpp.source import LlamaCpp


@pytest.mark.parametrize(("width", "kind", "bits"), [(256, "Q4_K", 4.5), (288, "Q5_0", 5.5), (172, "F16", 16)])
def test_a_row_that_the_blocks_do_not_divide_falls_back(width: int, kind: str, bits: float):
    """B59."""
    found, fell = plan._type("blk.1.attn_q.weight", (64, width), "Q4_K_M", 8, False)
    assert found == kind and fell is (width != 256)
    assert plan.num_bytes((64, width), found) * 8 == 64 * width * bits


@pytest.mark.parametrize(("kind", "bits"), [("Q8_0", 8.5), ("Q6_K", 6.5625), ("Q5_K", 5.5), ("Q4_0", 4.5)])
def test_bits_a_weight(kind: str, bits: float):
    assert plan.num_bytes((4, 512), kind) * 8 == 4 * 512 * bits


def test_which_layers_get_more_bits():
    """As llama.cpp's use_more_bits: the first eighth, the last, and every third between."""
    assert [layer for layer in range(8) if plan._more_bits(layer, 8)] == [0, 3, 6, 7]
    assert [layer for layer in range(4) if plan._more_bits(layer, 4)] == [2, 3]
    kinds = [plan._type(f"blk.{layer}.attn_v.weight", (64, 256), "Q4_K_M", 8, False)[0] for layer in range(8)]
    assert kinds == ["Q6_K", "Q4_K", "Q4_K", "Q6_K", "Q4_K", "Q4_K", "Q6_K", "Q6_K"]


@pytest.mark.parametrize(("is_tied", "kind"), [(True, "Q6_K"), (False, "Q4_K")])
def test_an_embedding_that_is_the_head_too_gets_the_heads_type(is_tied: bool, kind: str):
    assert plan._type("token_embd.weight", (512, 256), "Q4_K_M", 8, is_tied)[0] == kind


def test_norms_and_vectors_stay():
    assert plan._type("blk.0.attn_norm.weight", (64,), "Q4_K_M", 8, True) == ("F32", False)
    assert plan._type("blk.0.attn_q.bias", (64,), "F16", 8, True) == ("F32", False)


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> LlamaCpp:
    """A converter that knows Llama, and a quantiser, neither of which is run."""
    monkeypatch.setattr(convert, "architectures", lambda folder: frozenset({"LlamaForCausalLM"}))
    monkeypatch.setattr(convert, "architecture_of", lambda folder, name: "llama")
    monkeypatch.setattr(quantize, "require_tool", lambda: None)
    return LlamaCpp(Path("/nowhere"), "0" * 64, is_pinned=True)


def test_a_fallback_is_refused_if_asked(plain: Checkpoint, chosen: LlamaCpp, monkeypatch: pytest.MonkeyPatch):
    make, planned = plan.make, []
    monkeypatch.setattr(plan, "make", lambda *args: planned.append(args[1]) or make(*args))
    settings = {"name": "tiny", "fallback": False, "llama_cpp": chosen}
    export.preview(plain, ["F16", "Q8_0"], **settings)
    assert planned == ["F16", "Q8_0"]  # once each
    with pytest.raises(UserError, match="does not fit") as refusal:
        export.preview(plain, ["Q8_0", "Q4_K_M"], **settings)
    assert "Q8_0" in refusal.value.next_command
    told = export.preview(plain, ["Q4_K_M"], **settings | {"fallback": True})
    assert "rows that the blocks do not divide" in next(iter(told.values()))


def test_an_architecture_whose_tensors_are_not_named_is_refused(plain: Checkpoint, chosen: LlamaCpp, monkeypatch):
    monkeypatch.setattr(convert, "architecture_of", lambda folder, name: None)
    with pytest.raises(UserError, match="of this architecture"):
        export.preview(plain, ["F16"], name="tiny", llama_cpp=chosen)


def test_layers_are_counted_in_the_weights(plain: Checkpoint):
    """GPT-2 has no num_hidden_layers in its configuration."""
    planned = plan.make(plain, "F16", "llama")
    assert plain.num_layers == plain.config.pop("num_hidden_layers") == 2
    assert plan.make(plain, "F16", "llama") == planned
