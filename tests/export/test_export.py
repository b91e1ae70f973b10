"""Whole exports by the real converter and a real server, and the ways in which each of them must fail."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.export.tiny_adapter import logits_by_peft, write_adapter
from tests.export.tiny_checkpoint import (
    ENTRIES,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    edit_json,
    random_weights,
    train_tokenizer,
    write_model,
)
from training.cli import main
from training.core import files, paths
from training.core.errors import IntegrityError, RunError, UserError
from training.export import adapter_gguf, export, gguf_file, importance, limits, manifest, plan, proof
from training.export.checkpoint import Checkpoint, open_checkpoint
from training.export.proof import Proof
from training.llamacpp import convert, quantize
from training.llamacpp.client import Client
from training.llamacpp.server import ServerProcess
from training.tokenizer import ids

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("llama_cpp")]


def _export(folder: Path, *quants: str) -> list[export.Output]:
    return export.export(open_checkpoint(str(folder)), list(quants), name="tiny")


def _convert(folder: Path, workspace: Path, *quants: str, tokenizer: Path | None = None, **changes) -> dict[str, Path]:
    """Convert without any proof."""
    workspace.mkdir()
    outputs = {quant: workspace / f"{quant}.gguf" for quant in quants}
    settings = {"pre_tokenizer": "llama-bpe", "add_bos": True, "name": "tiny", **changes}
    with convert.Conversion.start(
        folder, outputs, tokenizer=tokenizer or folder, workspace=workspace, **settings
    ) as conversion:
        conversion.wait()
    return outputs


def _target(checkpoint: Checkpoint, quant: str, path: Path) -> export._Target:
    return export._Target(quant, path, "0" * 64, plan.make(checkpoint, quant, "llama"))


def test_a_chain_is_exported_proved_and_verified(ours: Path, capsys: pytest.CaptureFixture[str]):
    """B46, B50: every type of one checkpoint of ours, by the command, with what the manifests say."""
    assert main(["export-gguf", ours.parents[1].name, "--quant", "f32,f16,BF16,Q8_0", "--json"]) == 0
    captured = capsys.readouterr()
    assert "make serve-eval MODEL=/app/models/trained/tiny/tiny-Q8_0.gguf" in captured.err
    outputs = {output["manifest"]["quant_type"]: output for output in json.loads(captured.out)["outputs"]}
    assert outputs["F16"]["path"] == "$DATA_ROOT/models/trained/tiny/tiny-F16.gguf"
    origin = files.read_json(ours / "manifest.json")
    keys = ("run", "step", "weights_sha256", "recipe_sha256", "dataset", "tokenizer", "method")
    for quant, output in outputs.items():
        found = manifest.verify(paths.roots().trained / "tiny" / f"tiny-{quant}.gguf")
        assert found == output["manifest"]
        assert {key: found[key] for key in keys} == {key: origin[key] for key in keys}
        assert found["parameters"] == sum(array.size for array in random_weights().values())
        assert found["parity"]["positions"] >= 256 and found["parity"]["ids"]["lines"] == 200
        assert [len(prompt["top"]) for prompt in found["fingerprint"]["prompts"]] == [5] * 4
        assert str(paths.roots().data) not in json.dumps(found)
    parity = {quant: output["manifest"]["parity"] for quant, output in outputs.items()}
    assert all(parity[quant]["max_nats"] <= 0.05 for quant in ("F32", "F16"))
    assert all(parity[quant]["median_nats"] <= 0.005 for quant in ("F32", "F16"))
    assert parity["F16"]["kl_mean_nats"] < parity["Q8_0"]["kl_mean_nats"] <= parity["Q8_0"]["kl_p99_nats"]
    assert outputs["Q8_0"]["manifest"]["tensor_types"] == {"F32": 2 * LAYERS + 1, "Q8_0": 7 * LAYERS + 2}
    assert main(["verify", "/app/models/trained/tiny/tiny-Q8_0.gguf"]) == 0
    assert "(exit 0)" in (text := capsys.readouterr().err) and "broken" not in text and "absent" not in text


def test_the_same_inputs_give_the_same_bytes(make_folder, tmp_path: Path):
    """B61: another folder, with a README and generation settings beside the weights, with or without other types."""
    one = _convert(make_folder("one"), tmp_path / "first", "F16", "Q8_0")
    other = make_folder("other-name-v2")
    (other / "README.md").write_text("---\nlicense: mit\nmodel_name: x\n---\n")
    (other / "generation_config.json").write_text('{"repetition_penalty": 1.5, "temperature": 0.1}')
    edit_json(other / "config.json", _name_or_path="/somewhere/else")
    two = _convert(other, tmp_path / "second", "Q8_0")
    assert files.sha256_file(one["Q8_0"]) == files.sha256_file(two["Q8_0"])
    renamed = gguf_file.inspect(_convert(other, tmp_path / "third", "Q8_0", name="renamed")["Q8_0"])
    assert renamed.sha256 != files.sha256_file(two["Q8_0"])
    assert renamed.tensor_sha256 == gguf_file.inspect(two["Q8_0"]).tensor_sha256
    text = two["Q8_0"].read_bytes()
    assert not any(trace in text for trace in (b"somewhere", b"other-name", b"sampling", str(tmp_path).encode()))


def test_the_default_of_several_templates_is_served(make_folder):
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    folder, others = make_folder(), [{"name": "tool_use", "template": "{{ tools }}"}]
    edit_json(folder / "tokenizer_config.json", chat_template=[*others, {"name": "default", "template": template}])
    [output] = _export(folder, "F16")
    assert output.manifest["chat_template"] == template
    assert gguf.GGUFReader(output.gguf).get_field("tokenizer.chat_template").contents() == template


def test_padded_tied_and_with_a_template(make_folder):
    """B47: 503 entries, 512 rows; B50: no second matrix; B55: the template byte for byte."""
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}é\u2028\n"
    folder = make_folder(tied=True)
    train_tokenizer(folder, entries=503)
    (folder / "chat_template.jinja").write_text(template)
    [output] = _export(folder, "F16")
    reader = gguf.GGUFReader(output.gguf)
    tokens = reader.get_field("tokenizer.ggml.tokens").contents()
    assert len(tokens) == ENTRIES and sum(token.startswith("[PAD") for token in tokens) == 9
    assert reader.get_field("tokenizer.chat_template").contents() == template
    assert "output.weight" not in {tensor.name for tensor in reader.tensors}
    assert output.manifest["parameters"] == sum(array.size for array in random_weights(tied=True).values())


# ---- adapters


@pytest.fixture
def adapter(make_folder, tmp_path: Path) -> Checkpoint:
    base = make_folder("base")
    return open_checkpoint(str(write_adapter(tmp_path / "adapter", base)), base=str(base))


def test_an_adapter_is_served_merged_and_beside_its_base(adapter: Checkpoint, monkeypatch: pytest.MonkeyPatch):
    """D22: both files say what the unmerged adapter says in PyTorch; without it neither does."""
    [merged] = export.export(adapter, ["F32"], name="tiny")
    beside = adapter_gguf.export(adapter, "F32", name="tiny")
    assert merged.manifest["adapter_tensors"] == {"factors": 8, "trained rows": 0, "full copies": 0}
    for output in (merged, beside):
        assert manifest.verify(output.gguf)["parity"]["max_nats"] <= 0.005
    assert beside.manifest["parameters"] == sum(
        tensor.num_items for pair in adapter.adapter.pairs.values() for tensor in (pair.a, pair.b)
    )
    assert adapter_gguf.export(adapter, "F32", name="tiny").reused
    run = Proof.run
    monkeypatch.setattr(Proof, "run", lambda self, gguf, quant, work, lora=None: run(self, gguf, quant, work))
    with pytest.raises(RunError, match="not the one that was trained"):
        adapter_gguf.export(adapter, "F32", name="other")
    assert not list((paths.roots().trained / "other").glob("*"))


def test_what_a_server_cannot_load_beside_a_base_is_refused(plain: Checkpoint):
    with pytest.raises(UserError, match="cannot be served as an adapter") as refusal:
        adapter_gguf.export(plain, "F16", name="tiny")
    assert "--format gguf" in refusal.value.next_command


def test_the_gap_to_a_base_in_4_bits_is_told_apart(adapter: Checkpoint):
    object.__setattr__(adapter, "origin", adapter.origin | {"method": "qlora"})
    gap = Proof.prepare(adapter).gap
    assert gap["kl_mean_nats"] > 0 and gap["same_first_choice"] < 1


# ---- K-quants


def wide(make_folder, width: int = 256) -> Path:
    """A model whose rows the large blocks divide, of 8 layers, so that some of them get more bits."""
    torch.manual_seed(1)
    config = {
        "hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 8, "num_attention_heads": 4,
        "num_key_value_heads": 4,
    }  # fmt: skip
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=ENTRIES, tie_word_embeddings=True, **config)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 1.0 / parameter.shape[1] ** 0.5)
    weights = {name: value.numpy() for name, value in model.state_dict().items() if name != "lm_head.weight"}
    return make_folder(f"wide-{width}", weights=weights, tied=True, **config)


@pytest.mark.usefixtures("quantiser")
@pytest.mark.parametrize("width", [256, 288], ids=["rows that divide", "rows that do not"])
def test_k_quants_are_what_was_planned(make_folder, tmp_path: Path, width: int):
    """B59: type of each tensor and size within 1 %, before anything is written; the same bytes by any threads."""
    checkpoint = open_checkpoint(str(wide(make_folder, width)))
    whole = _convert(checkpoint.folder, tmp_path / "work", "F32")["F32"]
    for quant in quantize.K_QUANTS:
        planned = plan.make(checkpoint, quant, "llama")
        made = [tmp_path / "work" / f"{quant}-{threads}.gguf" for threads in (1, 2)]
        for threads, path in enumerate(made, 1):
            quantize.run(whole, path, quant, threads=threads)
        types = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(made[0]).tensors}
        assert types == planned.types and files.sha256_file(made[0]) == files.sha256_file(made[1])
        assert abs(made[0].stat().st_size - planned.num_bytes) <= 0.01 * planned.num_bytes
        assert bool(planned.fallbacks) is (width == 288)


@pytest.mark.usefixtures("quantiser")
def test_an_importance_matrix_is_counted_and_counts(make_folder, tmp_path: Path):
    folder = wide(make_folder)
    checkpoint = open_checkpoint(str(folder))
    whole = _convert(folder, tmp_path / "work", "F32")["F32"]
    record = importance.of_training_data(checkpoint, "llama", tmp_path / "work/importance.gguf")
    assert record["matrices"] == 7 * 8 and record["tokens"] > 100
    plainly, weighed = (tmp_path / "work" / f"{kind}.gguf" for kind in ("plainly", "weighed"))
    quantize.run(whole, plainly, "Q4_K_M", threads=1)
    quantize.run(whole, weighed, "Q4_K_M", threads=1, importance=tmp_path / "work/importance.gguf")
    assert gguf_file.inspect(plainly).tensor_sha256 != gguf_file.inspect(weighed).tensor_sha256
    assert str(tmp_path).encode() not in weighed.read_bytes()


@pytest.mark.usefixtures("quantiser")
def test_a_weighed_export_names_its_matrix_and_what_it_was_counted_on(make_folder):
    """Of two types from one pass only the K-quant is weighed."""
    checkpoint = open_checkpoint(str(wide(make_folder)))
    [plainly] = export.export(checkpoint, ["Q6_K"], name="plain")
    weighed, q8 = export.export(checkpoint, ["Q6_K", "Q8_0"], name="weighed", weighed=True)
    record = weighed.manifest["importance"]
    assert record["matrices"] == 7 * 8 and record["drawn_from"].startswith("built-in passages") and record["sha256"]
    assert plainly.manifest["importance"] is None is q8.manifest["importance"]
    assert weighed.manifest["tensor_sha256"] != plainly.manifest["tensor_sha256"]
    assert manifest.verify(weighed.gguf)["parity"]["whole"]["quant_type"] == "F32"
    [again] = export.export(checkpoint, ["Q6_K"], name="weighed", weighed=True)
    assert again.reused


@pytest.mark.usefixtures("quantiser")
def test_k_quants_of_16_bits_are_the_same_bytes_from_16_bits_and_from_f32(make_folder, tmp_path: Path):
    """So what else is asked for, and how large a model is, does not enter."""
    folder = wide(make_folder)
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    made = _convert(folder, tmp_path / "work", "F32", "BF16")
    digests = set()
    for quant, path in made.items():
        output = path.with_name(f"of-{quant}.gguf")
        quantize.run(path, output, "Q5_K_M", threads=1)
        digests.add(files.sha256_file(output))
    assert len(digests) == 1


def test_an_adapter_in_f16_is_held_to_f16(adapter: Checkpoint):
    output = adapter_gguf.export(adapter, "F16", name="tiny")
    parity = output.manifest["parity"]
    assert parity["limits"] == limits.of("F16") and parity["whole"]["limits"] == limits.of("F32")


# ---- adapters, against what PEFT computes and not against our own merge

COPY = np.random.default_rng(11).normal(0, 0.3, (2, ENTRIES, HIDDEN)).astype(np.float32)
MODULE = "base_model.model.model.embed_tokens"
ROWS = f"{MODULE}.token_adapter.trainable_tokens_delta"
ADAPTERS = {
    "full copies": ({f"{MODULE}.weight": COPY[0], "base_model.model.lm_head.weight": COPY[1]},
                    {"modules_to_save": ["embed_tokens", "lm_head"]}),
    "head alone": ({"base_model.model.lm_head.weight": COPY[1]}, {"modules_to_save": ["lm_head"]}),
    "rows": ({ROWS: COPY[0][:3]}, {"trainable_token_indices": {"embed_tokens": [45, 9, 400]}}),
    "added rows": ({ROWS: COPY[0][:2]}, {"trainable_token_indices": {"embed_tokens": [ENTRIES, ENTRIES + 1]}}),
}  # fmt: skip


@pytest.mark.parametrize("case", ADAPTERS)
@pytest.mark.parametrize("in_file", ["once", "twice"])
def test_a_served_adapter_on_a_tied_base_is_what_peft_computes(make_folder, tmp_path: Path, case: str, in_file: str):
    """Whether the tied matrix lies in the base's file once or, as some save it, as the head too."""
    weights = random_weights(tied=True)
    if in_file == "twice":
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].copy()
    base, (extra, settings) = make_folder("base", tied=True, weights=weights), ADAPTERS[case]
    adapter = write_adapter(tmp_path / "adapter", base, extra=extra, **settings)
    checkpoint = open_checkpoint(str(adapter), base=str(base))
    [output] = export.export(checkpoint, ["F32"], name="tiny")
    rows = ENTRIES + 2 * (case == "added rows")
    asked = [0, 17, 300, 45, 45, 9, rows - 1, 400]
    expected = torch.log_softmax(logits_by_peft(base, adapter, asked, rows).double(), -1)
    with ServerProcess.start(output.gguf, log=tmp_path / "log", ctx_size=64, threads=1, exact=True) as server:
        server.wait_healthy(60)
        for length in range(1, len(asked) + 1):
            served = dict(Client(server.url).top_logprobs(asked[:length], rows))
            gaps = [abs(served[int(one)] - float(expected[length - 1, one])) for one in expected[length - 1].topk(5)[1]]
            assert len(served) == rows and max(gaps) < 0.005, (length, gaps)


# ---- negative controls


def test_a_wrong_pre_tokenizers_name_fails_the_ids(plain: Checkpoint, tmp_path: Path):
    """B46: a Llama-3 split that is served as gpt-2's."""
    path = _convert(plain.folder, tmp_path / "work", "F32", pre_tokenizer="gpt-2")["F32"]
    with ServerProcess.start(path, log=tmp_path / "log", ctx_size=128, threads=1) as server:
        server.wait_healthy(60)
        with pytest.raises(RunError) as failure:
            ids.check(Client(server.url), plain.encoder, [], "gpt-2")
    assert "the pre-tokenizer's name 'gpt-2'" in failure.value.found
    with pytest.raises(IntegrityError, match="wrote something else"):
        export._inspect(path, plain, _target(plain, "F32", path))


def _unpermuted(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Query and key rows in the order that the converter's permutation turns back."""
    spoiled = dict(weights)
    for name, array in weights.items():
        heads = HEADS if "q_proj" in name else KV_HEADS if "k_proj" in name else None
        if heads:
            half = array.shape[0] // heads // 2
            spoiled[name] = array.reshape(heads, half, 2, HIDDEN).swapaxes(1, 2).reshape(array.shape)
    return spoiled


def _zeroed(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: array * (f"layers.{LAYERS - 1}." not in name) for name, array in weights.items()}


@pytest.mark.parametrize(
    ("spoil", "cause"),
    [(_unpermuted, "query and key rows"), (_zeroed, "the weights of a layer")],
    ids=["rows", "layer"],
)
def test_another_model_than_the_trained_one_fails(plain: Checkpoint, tmp_path: Path, spoil, cause: str):
    """B58, and one zeroed layer: both load and serve without a word, in F32 as in Q8_0."""
    spoiled = write_model(tmp_path / "spoiled", weights=spoil(random_weights()))
    prepared = Proof.prepare(plain)
    for quant, path in _convert(spoiled, tmp_path / "work", "F32", "Q8_0", tokenizer=plain.folder).items():
        with pytest.raises(RunError) as failure:
            prepared.run(path, quant, tmp_path)
        assert cause in failure.value.found and "token" in failure.value.where


def test_one_more_newline_in_the_template_fails(make_folder, tmp_path: Path):
    """B55: by the file's own words, and by what the server makes of a conversation."""
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    folder, other = make_folder("one"), make_folder("other")
    (folder / "chat_template.jinja").write_text(template)
    (other / "chat_template.jinja").write_text(template.replace("{% endfor %}", "\n{% endfor %}"))
    checkpoint = open_checkpoint(str(folder))
    path = _convert(other, tmp_path / "work", "F32")["F32"]
    with pytest.raises(IntegrityError, match="wrote something else"):
        export._inspect(path, checkpoint, _target(checkpoint, "F32", path))
    with ServerProcess.start(path, log=tmp_path / "log", ctx_size=256, threads=1) as server:
        server.wait_healthy(60)
        with pytest.raises(RunError, match="renders a conversation otherwise"):
            proof.check_conversations(Client(server.url), checkpoint)


def test_the_served_model_stops_at_both_ends(make_folder, tmp_path: Path):
    """B56: an end of turn that llama.cpp does not know by its text is written, and EOS stops as well."""
    folder = make_folder()
    document = (folder / "tokenizer.json").read_text().replace("<|im_end|>", "<|turn_done|>")
    (folder / "tokenizer.json").write_text(document)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}<|turn_done|>{% endfor %}")
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint.turn_end_id == 4
    for name, written in (("with", 4), ("without", None)):
        path = _convert(folder, tmp_path / name, "F32", turn_end_id=written)["F32"]
        with ServerProcess.start(path, log=tmp_path / "log", ctx_size=256, threads=1) as server:
            server.wait_healthy(60)
            if written is None:
                with pytest.raises(RunError, match="does not stop"):
                    proof.check_stops(Client(server.url), checkpoint)
            else:
                assert proof.check_stops(Client(server.url), checkpoint) == [1, 4]


@pytest.mark.parametrize("context", [3, 8])
def test_a_model_of_a_very_short_context_is_proved_inside_it(make_folder, context: int):
    """The server refuses a prompt that fills what the model was made for."""
    [output] = _export(make_folder(max_position_embeddings=context), "F32")
    assert output.manifest["context_length"] == context
    assert max(len(prompt["ids"]) for prompt in output.manifest["fingerprint"]["prompts"]) == context - 1


def test_a_weight_that_is_no_number_ends_the_export(make_folder):
    weights = random_weights()
    weights["model.norm.weight"][0] = np.nan
    with pytest.raises(IntegrityError, match="no number"):
        _export(make_folder(weights=weights), "F32")
    assert not list(paths.roots().trained.rglob("*"))
