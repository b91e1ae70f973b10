"""Negative controls: another model than the trained one is never exported, whatever the source and the format.

Each spoils the conversion alone, as a converter that has gone wrong would. What the header of the file says is not
looked at here, so that the served model itself has to tell.
"""

import functools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.conftest import BASE
from tests.export.tiny_adapter import write_adapter
from training.core import files, paths
from training.core.errors import RunError
from training.export import adapter_gguf, export, gguf_file, limits, probes, proof
from training.export.checkpoint import Checkpoint, open_checkpoint
from training.llamacpp import convert

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("llama_cpp")]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
EXPORTS = {
    "merged": lambda checkpoint: export.export(checkpoint, ["F32"], name="tiny"),
    "beside": lambda checkpoint: adapter_gguf.export(checkpoint, "F32", name="tiny"),
    "base": lambda checkpoint: export.export(checkpoint, ["F32"], name="tiny"),
}


def _copied(folder: Path, target: Path, change: Callable[[str, object], object] = lambda name, tensor: tensor) -> Path:
    """A copy of a folder, its tensors changed."""
    target.mkdir()
    for path in folder.iterdir():
        if path.is_file() and path.suffix != ".safetensors":
            (target / path.name).write_bytes(path.read_bytes())
    if (folder / "model.safetensors").is_file():
        tensors = {name: change(name, tensor) for name, tensor in load_file(folder / "model.safetensors").items()}
        save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


def _unpermuted(folder: Path, target: Path) -> Path:
    """Query and key rows in the order that the converter's permutation turns back."""
    config = files.read_json(folder / "config.json")
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}

    def change(name: str, tensor):
        num = heads.get(name.split(".")[-2])
        if not num:
            return tensor
        rows, width = tensor.shape
        return tensor.view(num, rows // num // 2, 2, width).swapaxes(1, 2).reshape(rows, width).contiguous()

    return _copied(folder, target, change)


def _zeroed(folder: Path, target: Path, number: int | None = None) -> Path:
    """A layer, the last by default."""
    number = files.read_json(folder / "config.json")["num_hidden_layers"] - 1 if number is None else number
    layer = f"layers.{number}."
    return _copied(folder, target, lambda name, tensor: tensor * 0 if layer in name else tensor)


def _two_swapped_rows(folder: Path, target: Path) -> Path:
    """Two rows of one matrix in the place of each other."""

    def change(name: str, tensor):
        if "layers.16.self_attn.o_proj" not in name:
            return tensor
        order = list(range(len(tensor)))
        order[133], order[557] = 557, 133
        return tensor[order]

    return _copied(folder, target, change)


def _one_more_newline(folder: Path, target: Path) -> Path:
    other = _copied(folder, target)
    path = other / "chat_template.jinja"
    path.write_text(path.read_text().replace("{% endfor %}", "\n{% endfor %}"))
    return other


CONTROLS = {
    "pre-tokenizer": ("the pre-tokenizer's name", lambda *_: None),
    "template": ("the chat template", _one_more_newline),
    "rows": ("query and key rows in another order", _unpermuted),
    "layer": ("the weights of a layer", _zeroed),
    "middle layer": ("", lambda folder, target: _zeroed(folder, target, 16)),
    "two rows": ("", _two_swapped_rows),
}
WHOLE = ("pre-tokenizer", "template", "rows", "layer")


def _spoil(control: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the converter see, or write, something else than the checkpoint."""
    start, change = convert.Conversion.start, CONTROLS[control][1]

    def spoiled(folder: Path, outputs: dict[str, Path], **settings):
        if control == "pre-tokenizer":
            settings["pre_tokenizer"] = "gpt-2"
        elif control == "template":
            settings["tokenizer"] = change(settings["tokenizer"], tmp_path / "spoiled")
        else:
            folder = change(folder, tmp_path / "spoiled")
        return start(folder, outputs, **settings)

    monkeypatch.setattr(convert.Conversion, "start", spoiled)
    monkeypatch.setattr(export, "_inspect", lambda gguf, *_: gguf_file.inspect(gguf))


def _refused(form: str, checkpoint: Checkpoint, control: str) -> None:
    with pytest.raises(RunError) as failure:
        EXPORTS[form](checkpoint)
    assert f"likely cause: {CONTROLS[control][0]}" in failure.value.found and "token" in failure.value.where
    assert [path.name for path in paths.roots().trained.rglob("*") if path.name != ".tiny.lock"] == []


@pytest.fixture
def adapter(make_folder, tmp_path: Path) -> Checkpoint:
    """On a base with a chat template."""
    base = make_folder("base")
    (base / "chat_template.jinja").write_text(TEMPLATE)
    return open_checkpoint(str(write_adapter(tmp_path / "adapter", base)), base=str(base))


@pytest.mark.parametrize("control", WHOLE)
@pytest.mark.parametrize("form", ["merged", "beside"])
def test_an_adapter_on_a_spoiled_base_is_not_exported(
    adapter: Checkpoint, form: str, control: str, tmp_path, monkeypatch
):
    _spoil(control, tmp_path, monkeypatch)
    _refused(form, adapter, control)


def test_a_fault_of_an_adapter_that_f16_has_room_for_is_told_by_f32(adapter: Checkpoint, tmp_path, monkeypatch):
    """Two thousandths of a factor too much is less than F16 may round."""
    start, factors = convert.Conversion.start_adapter, load_file(adapter.adapter.folder / "adapter_model.safetensors")
    name = next(one for one in factors if one.endswith("down_proj.lora_B.weight"))
    spoiled = _copied(adapter.adapter.folder, tmp_path / "spoiled")
    save_file(factors | {name: 1.002 * factors[name]}, spoiled / "adapter_model.safetensors", {"format": "pt"})
    seen = functools.partial(start, spoiled)
    monkeypatch.setattr(convert.Conversion, "start_adapter", lambda _, *rest, **settings: seen(*rest, **settings))
    with pytest.raises(RunError) as failure:
        adapter_gguf.export(adapter, "F16", name="tiny")
    assert failure.value.what == "the served F32 model is not the one that was trained"
    assert [path.name for path in paths.roots().trained.rglob("*") if path.name != ".tiny.lock"] == []


def test_an_adapter_on_its_own_base_is(adapter: Checkpoint, monkeypatch):
    monkeypatch.setattr(export, "_inspect", lambda gguf, *_: gguf_file.inspect(gguf))
    assert [EXPORTS[form](adapter) for form in ("merged", "beside")]


@pytest.fixture
def base(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> Checkpoint:
    """SmolLM2-135M-Instruct, proved on a quarter of the prompts."""
    monkeypatch.setattr(probes, "NUM_PROMPTS", 8)
    return open_checkpoint(BASE)


def test_the_135m_base_is_exported_and_no_spoiled_one_is(base: Checkpoint, tmp_path: Path, monkeypatch):
    """PyTorch runs once for all of them."""
    prepared = proof.Proof.prepare(base)
    monkeypatch.setattr(proof.Proof, "prepare", classmethod(lambda cls, checkpoint: prepared))
    for control in WHOLE:
        with monkeypatch.context() as patch:
            (tmp_path / control).mkdir()
            _spoil(control, tmp_path / control, patch)
            _refused("base", base, control)
    [output] = EXPORTS["base"](base)
    assert output.manifest["parity"]["positions"] >= 64 and output.manifest["parity"]["max_nats"] <= 0.05


@pytest.mark.usefixtures("quantiser")
@pytest.mark.parametrize(("quant", "control"), [("Q5_K_M", "middle layer"), ("Q8_0", "two rows")])
def test_what_a_types_own_limits_let_pass_is_told_by_f32(base: Checkpoint, tmp_path, monkeypatch, quant, control):
    _spoil(control, tmp_path, monkeypatch)
    with pytest.raises(RunError) as failure:
        export.export(base, [quant], name="tiny")
    assert failure.value.what == "the served F32 model is not the one that was trained"
    assert [path.name for path in paths.roots().trained.rglob("*") if path.name != ".tiny.lock"] == []
    shutil.rmtree(tmp_path / "spoiled")
    monkeypatch.setattr(proof.Proof, "compare", _without_the_type_that_loses_nothing(proof.Proof.compare))
    assert export.export(base, [quant], name="tiny")


def _without_the_type_that_loses_nothing(compare: Callable) -> Callable:
    """A comparison that F32 passes whatever it is."""

    def lenient(self, gguf: Path, quant: str, *args, **settings):
        with pytest.MonkeyPatch.context() as patch:
            if quant == "F32":
                patch.setattr(limits, "exceeded", lambda figures, bounds: [])
            return compare(self, gguf, quant, *args, **settings)

    return lenient
