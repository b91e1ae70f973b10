"""Whole exports by the real converter and a real server, and the ways in which each of them must fail."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from tiny_checkpoint import (
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
from training.core.errors import IntegrityError, RunError
from training.export import export, gguf_file, manifest
from training.export.checkpoint import Checkpoint, open_checkpoint
from training.export.proof import Proof
from training.llamacpp import convert
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
        assert found["parity"]["positions"] >= 100 and found["parity"]["ids"]["lines"] == 200
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
        export._inspect(path, plain)


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


def test_a_weight_that_is_no_number_ends_the_export(make_folder):
    weights = random_weights()
    weights["model.norm.weight"][0] = np.nan
    with pytest.raises(IntegrityError, match="no number"):
        _export(make_folder(weights=weights), "F32")
    assert [path.name for path in paths.roots().trained.rglob("*")] == [".tiny.lock"]
