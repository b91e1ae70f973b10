"""Adapters merged and unmerged: held against PEFT itself, and against the definition of each tensor's part."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_torch
from safetensors.torch import save_file as save_torch

from tests.export.tiny_adapter import ALPHA, DAMAGED, RANK, damage, logits_by_peft, logits_of_folder, write_adapter
from tests.export.tiny_checkpoint import ENTRIES, HIDDEN, edit_json, random_weights, write_model
from training.cli import main
from training.core import files, paths
from training.core.errors import IntegrityError, UserError
from training.export import adapter_gguf, checks, merge, reference, weights
from training.export.adapter import MergedTensor, Pair
from training.export.checkpoint import Checkpoint, open_checkpoint
from training.export.probes import Prompt

IDS = [0, 17, 300, 45, 45, 211, 9, 400]
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
RANKS = {"down_proj": 9}
HEAD_FACTORS = {
    f"base_model.model.lm_head.lora_{factor}.weight": np.random.default_rng(3).normal(0, 0.2, shape).astype(np.float32)
    for factor, shape in (("A", (RANK, HIDDEN)), ("B", (ENTRIES, RANK)))
}  # fmt: skip
ROWS = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"


@pytest.fixture
def make_adapter(make_folder, tmp_path: Path):
    """An opened adapter of a tiny base: `make_adapter(tied=True, extra={...}, **settings)`.

    `tied="twice"`: the one matrix of a tied base lies in its file as the head too.
    """

    def make(*, tied: bool | str = False, name: str = "one", **settings) -> Checkpoint:
        weights = random_weights(tied=bool(tied))
        if tied == "twice":
            weights[HEAD] = weights[EMBEDDING].copy()
        base = make_folder(f"base-{name}", tied=bool(tied), weights=weights)
        folder = write_adapter(tmp_path / f"adapter-{name}", base, **settings)
        return open_checkpoint(str(folder), base=str(base))

    return make


def _copies(*names: str, seed: int = 11) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    return {f"base_model.model.{name}": draw.normal(0, 0.3, (ENTRIES, HIDDEN)).astype(np.float32) for name in names}


def _merged(checkpoint: Checkpoint, tmp_path: Path, *, cast: bool = False) -> Path:
    merge.write(checkpoint, tmp_path / "merged", cast=cast)
    return tmp_path / "merged"


def _reference(checkpoint: Checkpoint) -> torch.Tensor:
    lengths = list(range(1, len(IDS) + 1))
    return torch.from_numpy(reference.logprobs(checkpoint, [Prompt(IDS, lengths), Prompt(IDS[:3], [2])])[: len(IDS)])


def test_merged_weights_are_the_base_and_the_product(make_adapter, tmp_path: Path):
    checkpoint = make_adapter()
    merged = load_file(_merged(checkpoint, tmp_path) / "model.safetensors")
    base, factors = random_weights(), load_file(checkpoint.adapter.folder / "adapter_model.safetensors")
    changed = {name for name in base if "q_proj" in name or "down_proj" in name}
    assert merged.keys() == base.keys() and checkpoint.adapter.counts["factors"] == len(factors) == 2 * len(changed)
    for name, value in base.items():
        if name in changed:
            module = f"base_model.model.{name.removesuffix('.weight')}"
            product = factors[f"{module}.lora_B.weight"] @ factors[f"{module}.lora_A.weight"]
            np.testing.assert_allclose(merged[name], value + ALPHA / RANK * product, rtol=1e-5, atol=1e-6)
        else:
            np.testing.assert_array_equal(merged[name], value)


@pytest.mark.parametrize(
    "case",
    ["factors", "rslora", "ranks", "rslora ranks", "head factors", "copies", "head alone", "embedding alone", "rows"],
)
@pytest.mark.parametrize("tied", [False, True, "twice"], ids=["untied", "tied", "tied, in the file twice"])
def test_merged_and_unmerged_are_what_peft_computes(make_adapter, tmp_path: Path, case: str, tied: bool | str):
    """B48: two parts of a tied pair that were trained apart are two tensors, and the flag says so."""
    settings = {
        "factors": {}, "rslora": {"use_rslora": True}, "ranks": {"rank_pattern": RANKS},
        "rslora ranks": {"rank_pattern": RANKS, "use_rslora": True},
        "head factors": {"targets": ("q_proj", "lm_head"), "extra": HEAD_FACTORS},
        "copies": {"extra": _copies(EMBEDDING, HEAD), "modules_to_save": ["embed_tokens", "lm_head"]},
        "head alone": {"extra": _copies(HEAD), "modules_to_save": ["lm_head"]},
        "embedding alone": {"extra": _copies(EMBEDDING), "modules_to_save": ["embed_tokens"]},
        "rows": {"extra": {ROWS: _copies("x")["base_model.model.x"][:3]},
                 "trainable_token_indices": {"embed_tokens": [45, 9, 400]}},
    }[case]  # fmt: skip
    checkpoint = make_adapter(tied=tied, **settings)
    folder = _merged(checkpoint, tmp_path)
    expected = logits_by_peft(checkpoint.folder, checkpoint.adapter.folder, IDS)
    assert (logits_of_folder(folder, IDS) - expected).abs().max() < 1e-3
    assert (_reference(checkpoint) - torch.log_softmax(expected.double(), -1).float()).abs().max() < 1e-3
    stays_tied = bool(tied) and case in ("factors", "rslora", "ranks", "rslora ranks", "rows")
    config, tensors = files.read_json(folder / "config.json"), load_file(folder / "model.safetensors")
    assert config["tie_word_embeddings"] is stays_tied and (HEAD in tensors) is not stays_tied


@pytest.mark.parametrize("tied", [True, "twice"])
def test_rows_beyond_the_base_make_it_grow(make_adapter, tmp_path: Path, tied: bool | str):
    new = np.arange(2 * HIDDEN, dtype=np.float32).reshape(2, HIDDEN)
    checkpoint = make_adapter(
        tied=tied, extra={ROWS: new}, trainable_token_indices={"embed_tokens": [ENTRIES, ENTRIES + 1]}
    )
    folder = _merged(checkpoint, tmp_path)
    embedding = load_file(folder / "model.safetensors")[EMBEDDING]
    np.testing.assert_array_equal(embedding[ENTRIES:], new)
    np.testing.assert_array_equal(embedding[:ENTRIES], random_weights(tied=True)[EMBEDDING])
    assert files.read_json(folder / "config.json")["vocab_size"] == ENTRIES + 2
    expected = logits_of_folder(folder, [ENTRIES, ENTRIES + 1])
    assert expected.shape[1] == ENTRIES + 2
    found = reference.logprobs(checkpoint, [Prompt([ENTRIES, ENTRIES + 1], [1, 2])])
    assert (torch.from_numpy(found) - torch.log_softmax(expected.double(), -1).float()).abs().max() < 1e-3


@pytest.mark.parametrize("what", ["merged", "exported"])
def test_a_tied_head_that_differs_in_the_file_is_refused(make_folder, tmp_path: Path, what: str):
    """transformers would take it for untied; which of the two was trained cannot be told."""
    base = make_folder("base", tied=True, weights=random_weights(tied=False))
    checkpoint = open_checkpoint(str(write_adapter(tmp_path / "adapter", base)), base=str(base))
    with pytest.raises(UserError, match="the two tensors differ"):
        if what == "merged":
            merge.standalone(checkpoint, "tiny")
        else:
            checks.check(checkpoint, frozenset({"LlamaForCausalLM"}))


def test_a_merge_into_high_precision_keeps_what_nf4_would_lose(tmp_path: Path):
    """B51: the change is the adapter's to 1e-3; on the block in NF4 it is nothing at all."""
    from bitsandbytes import functional

    block = np.array([[1.0, 0.2461123, -0.3949175, 0.0]], np.float32)
    delta = np.array([[0.0, 0.02, 0.02, 0.03]], np.float32)
    save_file({"m.weight": block, "a": delta, "b": np.ones((1, 1), np.float32)}, tmp_path / "x.safetensors")
    found = {one.name: one for one in weights.open_file(tmp_path / "x.safetensors").tensors}
    merged = MergedTensor("m.weight", found["m.weight"])
    merged.add_pair(Pair(found["a"], found["b"], 1.0))
    np.testing.assert_allclose(merged.read().numpy() - block, delta, atol=1e-3)

    def rounded(values: np.ndarray) -> np.ndarray:
        wide = torch.zeros(1, 64)
        wide[0, :4] = torch.from_numpy(values[0])
        packed, state = functional.quantize_4bit(wide, quant_type="nf4")
        return functional.dequantize_4bit(packed, state)[0, :4].numpy()

    np.testing.assert_array_equal(rounded(rounded(block)[None] + delta), rounded(block))


def test_a_block_at_a_time_gives_the_same(make_adapter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    checkpoint = make_adapter(extra=_copies(HEAD), modules_to_save=["lm_head"])
    whole = merge.write(checkpoint, tmp_path / "whole", cast=False)
    monkeypatch.setattr(weights, "BLOCK_BYTES", 3 * HIDDEN * 4 + 1)
    assert merge.write(checkpoint, tmp_path / "blocks", cast=False) == whole
    assert files.sha256_file(tmp_path / "blocks/model.safetensors") == whole


def test_a_base_of_16_bits_is_rounded_once(make_folder, tmp_path: Path):
    base = make_folder("base")
    halves = {name: torch.from_numpy(value).bfloat16() for name, value in random_weights().items()}
    save_torch(halves, base / "model.safetensors", {"format": "pt"})
    folder = tmp_path / "adapter"
    write_model(tmp_path / "shapes", weights=random_weights())
    write_adapter(folder, tmp_path / "shapes")
    checkpoint = open_checkpoint(str(folder), base=str(base))
    wide, cast = (
        load_torch(_merged(checkpoint, tmp_path / kind, cast=kind == "cast") / "model.safetensors")
        for kind in ("wide", "cast")
    )
    name = "model.layers.0.self_attn.q_proj.weight"
    assert wide[name].dtype == torch.float32 and cast[name].dtype == torch.bfloat16
    assert torch.equal(cast[name], wide[name].bfloat16()) and torch.equal(cast[EMBEDDING], halves[EMBEDDING])


@pytest.mark.parametrize(
    ("settings", "alpha"),
    [
        ({}, ALPHA), ({"rank_pattern": RANKS}, ALPHA), ({"use_rslora": True}, ALPHA * RANK**0.5),
        ({"rank_pattern": RANKS | {"q_proj": 9}, "use_rslora": True}, ALPHA * 3),
    ],
    ids=["plain", "ranks", "rslora", "one rank that is not r"],
)  # fmt: skip
def test_a_server_is_told_the_alpha_of_the_scale(make_adapter, settings: dict, alpha: float):
    """It knows alpha over rank alone."""
    adapter = make_adapter(**settings).adapter
    assert adapter.alpha == pytest.approx(alpha, rel=1e-8)
    assert all(adapter.alpha / pair.a.shape[0] == pytest.approx(pair.scale) for pair in adapter.pairs.values())


# ---- what is refused


def test_scales_that_no_single_alpha_gives_are_not_served_beside_a_base(make_adapter):
    checkpoint = make_adapter(rank_pattern=RANKS, use_rslora=True)
    with pytest.raises(UserError, match="cannot be served as an adapter") as refusal:
        adapter_gguf.check(checkpoint)
    assert "several ranks" in refusal.value.found and "--format gguf" in refusal.value.next_command


def test_factors_of_a_tied_head_are_not_served_beside_a_base(make_adapter):
    checkpoint = make_adapter(tied=True, targets=("q_proj", "lm_head"), extra=HEAD_FACTORS)
    with pytest.raises(UserError, match="cannot be served as an adapter") as refusal:
        adapter_gguf.check(checkpoint)
    assert "tied" in refusal.value.found


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"extra": {"base_model.model.x.lora_magnitude_vector": np.ones(2, np.float32)}}, "no meaning here"),
        ({"extra": {"base_model.model.model.layers.0.nope.lora_A.weight": np.ones((2, 2), np.float32)}}, "no meaning"),
        ({"extra": {"base_model.model.nowhere.weight": np.ones(2, np.float32)}}, "no place in the base"),
        ({"extra": {f"base_model.model.{HEAD}": np.ones((ENTRIES, 3), np.float32)}}, "does not fit"),
        ({"extra": {ROWS: np.ones((2, HIDDEN), np.float32)}}, "without their ids"),
        ({"extra": {ROWS: np.ones((2, HIDDEN), np.float32)},
          "trainable_token_indices": {"embed_tokens": [1, ENTRIES + 4]}}, "does not fit"),
    ],
    ids=["unknown", "half a pair", "no place", "another shape", "no ids", "a hole in the rows"],
)  # fmt: skip
def test_every_tensor_of_an_adapter_is_used_or_it_is_refused(make_adapter, settings: dict, text: str):
    with pytest.raises(IntegrityError, match=text):
        make_adapter(**settings).shapes  # noqa: B018


@pytest.mark.parametrize("change", [{"use_dora": True}, {"peft_type": "IA3"}, {"bias": "all"}])
def test_an_adapter_of_another_kind_is_refused(make_adapter, change: dict):
    with pytest.raises(UserError, match="another kind"):
        make_adapter(**change)


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_adapter_is_one_error(make_folder, tmp_path: Path, capsys, case: str):
    base = make_folder("base")
    folder = write_adapter(tmp_path / "adapter", base)
    damage(folder, case)
    assert main(["export-gguf", str(folder), "--base", str(base), "--dry-run"]) == 5
    told = capsys.readouterr().err
    assert "Traceback" not in told and "adapter_" in told and "found" in told


def test_a_copy_of_another_length_is_refused(make_adapter):
    copy = {"base_model.model.model.norm.weight": np.ones(HIDDEN + 1, np.float32)}
    with pytest.raises(IntegrityError, match="does not fit"):
        make_adapter(extra=copy).shapes  # noqa: B018


def test_an_adapter_whose_base_is_not_known_is_refused(make_adapter):
    folder = make_adapter().adapter.folder
    with pytest.raises(UserError, match="not known") as refusal:
        open_checkpoint(str(folder))
    assert "--base" in refusal.value.expected


def test_factors_of_another_width_are_refused(make_adapter, make_folder, tmp_path: Path):
    checkpoint = make_adapter()
    other = make_folder("other")
    edit_json(other / "config.json", hidden_size=HIDDEN)
    wide = {name: np.pad(value, ((0, 0), (0, 8))) if "q_proj" in name else value
            for name, value in random_weights().items()}  # fmt: skip
    save_file(wide, other / "model.safetensors")
    with pytest.raises(IntegrityError, match="does not fit"):
        open_checkpoint(str(checkpoint.adapter.folder), base=str(other)).shapes  # noqa: B018


def test_a_whole_model_has_nothing_to_merge(plain: Checkpoint):
    with pytest.raises(UserError, match="nothing to merge"):
        merge.standalone(plain, "tiny")


@pytest.mark.parametrize("form", ["merged", "adapter"])
def test_a_dry_run_refuses_what_the_run_would(plain: Checkpoint, form: str):
    assert main(["export-gguf", str(plain.folder), "--format", form, "--dry-run"]) == 2


@pytest.mark.parametrize("options", [["adapter", "--sign", "key"], ["merged", "--quant", "F16"]])
def test_an_option_that_would_do_nothing_is_refused(plain: Checkpoint, capsys, options: list[str]):
    assert main(["export-gguf", str(plain.folder), "--format", *options]) == 2
    assert options[1] in capsys.readouterr().err and not paths.roots().trained.exists()


def test_a_weight_that_is_no_number_is_not_merged(make_adapter):
    copies = _copies(HEAD)
    copies[f"base_model.model.{HEAD}"][3, 5] = np.nan
    with pytest.raises(IntegrityError, match="no number"):
        merge.standalone(make_adapter(extra=copies, modules_to_save=["lm_head"]), "tiny")


# ---- a folder of its own


def test_a_standalone_folder_is_a_source_of_its_own(make_adapter):
    checkpoint = make_adapter()
    made = merge.standalone(checkpoint, "tiny")
    again = open_checkpoint(str(made.folder))
    assert again.adapter is None and again.origin["weights_sha256"] == made.manifest["weights_sha256"]
    assert made.manifest["merged_from"]["weights_sha256"] == checkpoint.origin["weights_sha256"]
    difference = logits_of_folder(made.folder, IDS) - logits_by_peft(checkpoint.folder, checkpoint.adapter.folder, IDS)
    assert difference.abs().max() < 1e-2
    assert merge.standalone(checkpoint, "tiny").reused


def test_another_model_under_the_name_is_kept_unless_forced(make_adapter):
    first = merge.standalone(make_adapter(), "tiny")
    other = make_adapter(name="two", lora_alpha=16)
    with pytest.raises(UserError, match="another model has this name"):
        merge.standalone(other, "tiny")
    assert files.verify_manifest(first.folder, "checkpoint")["weights_sha256"] == first.manifest["weights_sha256"]
    assert merge.standalone(other, "tiny", force=True).manifest != first.manifest
