"""How files get their final names: with a converter and a proof that are only pretended, so that each case is quick."""

import errno
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from tests.export.tiny_checkpoint import CONTEXT, ENTRIES, edit_json, random_weights
from training.cli import main
from training.commands import export_gguf
from training.core import files, paths
from training.core.errors import MachineError, RunError, UserError
from training.export import checkpoint as checkpoints
from training.export import export, manifest, place, proof
from training.llamacpp import convert, quantize, source

FIGURES = {
    "max_nats": 0.0, "median_nats": 0.0, "kl_mean_nats": 0.0, "kl_p99_nats": 0.0, "same_first_choice": 1.0,
    "limits": {}, "positions": 1, "drawn_from": "x", "stops": [1],
    "ids": {"nasty_strings": 1, "lines": 1, "conversations": 0},
}  # fmt: skip


class _Conversion:
    """Writes GGUF files whose bytes depend on the weights, the quant and the name, and whose facts are right."""

    def __init__(self, folder: Path, outputs: dict[str, Path], name: str):
        self.folder, self.outputs, self.name = folder, outputs, name

    def wait(self) -> None:
        weights = files.sha256_file(self.folder / "model.safetensors")
        for quant, path in self.outputs.items():
            writer = gguf.GGUFWriter(str(path), "llama")
            writer.add_name(self.name)
            writer.add_context_length(CONTEXT)
            writer.add_tokenizer_pre("llama-bpe")
            writer.add_token_list([str(number) for number in range(ENTRIES)])
            writer.add_add_bos_token(True)
            writer.add_bos_token_id(0)
            writer.add_eos_token_id(1)
            writer.add_tensor("output.weight", np.frombuffer(f"{quant}{weights}".encode().ljust(128), np.float32))
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()

    def __enter__(self) -> "_Conversion":
        return self

    def __exit__(self, *_: object) -> None:
        pass


class _Proof:
    """Passes everything; `fails` names a quant that does not."""

    fails: str | None = None
    runs: list[str] = []
    compared: list[str] = []

    @classmethod
    def prepare(cls, checkpoint: object) -> "_Proof":
        return cls()

    def run(self, path: Path, quant: str, workspace: Path) -> dict:
        type(self).runs.append(quant)
        figures, positions = self._judge(quant)
        return {"parity": figures, "fingerprint": {"server": "x"}, "positions": positions}

    def compare(self, path: Path, quant: str, workspace: Path) -> tuple[dict, list[dict]]:
        assert path.is_file()
        type(self).compared.append(quant)
        return self._judge(quant)

    def _judge(self, quant: str) -> tuple[dict, list[dict]]:
        if quant == self.fails:
            raise RunError("the served model is not the one that was trained")
        return dict(FIGURES), [{"tokens": 1, "max_nats": 0.0, "kl_nats": 0.0}]


@pytest.fixture(autouse=True)
def pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "choose", lambda: source.LlamaCpp(Path("/nowhere"), "0" * 64, is_pinned=True))
    monkeypatch.setattr(convert, "architectures", lambda folder: frozenset({"LlamaForCausalLM"}))
    monkeypatch.setattr(convert, "architecture_of", lambda folder, name: "llama")
    start = classmethod(lambda cls, folder, outputs, *, name, **_: _Conversion(folder, outputs, name))
    monkeypatch.setattr(convert.Conversion, "start", start)
    monkeypatch.setattr(proof, "Proof", _Proof)
    monkeypatch.setattr(_Proof, "fails", None)
    monkeypatch.setattr(_Proof, "runs", [])
    monkeypatch.setattr(_Proof, "compared", [])


def _export(folder: Path, *quants: str, **settings) -> list[export.Output]:
    return export.export(checkpoints.open_checkpoint(str(folder)), list(quants), **{"name": "tiny", **settings})


def _left() -> set[str]:
    return {path.name for path in paths.roots().trained.rglob("*")} - {".tiny.lock"}


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("asked", [["Q8_0"], ["Q8_0", "BF16"], ["Q8_0", "F32"]], ids="+".join)
def test_the_type_that_loses_nothing_is_proved_first_asked_for_or_not(make_folder, asked: list[str]):
    """Q8_0's own limits leave room for a wrong model."""
    outputs = _export(make_folder(), *asked)
    assert [output.manifest["quant_type"] for output in outputs] == asked
    others = [quant for quant in asked if quant != "F32"]
    if "F32" in asked:
        assert (_Proof.compared, _Proof.runs) == ([], ["F32", *others])
    else:
        assert (_Proof.compared, _Proof.runs) == (["F32"], others)
    for output in outputs:
        whole = output.manifest["parity"]["whole"]
        assert whole is None if output.manifest["quant_type"] == "F32" else whole["quant_type"] == "F32"


def test_a_wrong_model_is_refused_by_the_type_that_was_not_asked_for(make_folder, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_Proof, "fails", "F32")
    with pytest.raises(RunError, match="not the one that was trained"):
        _export(make_folder(), "Q8_0")
    assert _Proof.runs == [] and _left() == set()


def _in_bfloat16(folder: Path) -> Path:
    path = folder / "model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(path).items()}, path, {"format": "pt"})
    return folder


def test_a_large_model_of_16_bits_is_proved_in_them(make_folder, monkeypatch: pytest.MonkeyPatch):
    checkpoint = checkpoints.open_checkpoint(str(_in_bfloat16(make_folder())))
    assert proof.whole_type(checkpoint) == "F32"
    monkeypatch.setattr(proof, "_MOST_IN_F32", checkpoint.num_parameters - 1)
    assert proof.whole_type(checkpoint) == "BF16"
    assert proof.whole_type(checkpoints.open_checkpoint(str(make_folder("float32")))) == "F32"


def test_file_and_manifest_lie_where_the_contract_says(make_folder):
    [output] = _export(make_folder(), "Q8_0")
    assert output.gguf == paths.roots().data / "models/trained/tiny/tiny-Q8_0.gguf"
    assert manifest.verify(output.gguf) == output.manifest
    kinds = ("Modelfile", "gguf", "manifest.json", "parity.json", "parity.svg")
    assert _left() == {"tiny", *(f"tiny-Q8_0.{kind}" for kind in kinds)}


def test_the_same_inputs_are_used_again_without_work(make_folder):
    folder = make_folder()
    _export(folder, "F16")
    outputs = _export(folder, "F16", "Q8_0")
    assert [output.reused for output in outputs] == [True, False] and _Proof.runs == ["F16", "Q8_0"]


@pytest.mark.parametrize("what", ["weights", "tokenizer settings", "name", "proof"])
def test_whatever_enters_the_bytes_or_the_proof_is_seen(make_folder, monkeypatch: pytest.MonkeyPatch, what: str):
    """B44: the key is the content, never the place."""
    settings = {}
    _export(make_folder("one"), "F16")
    changed = make_folder("two", weights=random_weights(seed=2)) if what == "weights" else make_folder("two")
    if what == "tokenizer settings":
        edit_json(changed / "tokenizer_config.json", model_max_length=128)
    if what == "name":
        settings["name"] = "other"
    if what == "proof":
        monkeypatch.setattr(proof, "VERSION", proof.VERSION + 1)
    _export(changed, "F16", force=True, **settings)
    assert _Proof.runs == ["F16", "F16"]


def test_an_importance_matrix_is_no_part_of_what_does_not_use_it(make_folder):
    folder = make_folder()
    _export(folder, "F16")
    assert _export(folder, "F16", weighed=True)[0].reused and _Proof.runs == ["F16"]


def test_what_a_matrix_is_counted_on_is_part_of_the_key(ours: Path, own_roots: Path, monkeypatch):
    """The data set may be here today and built-in passages stand in tomorrow."""
    monkeypatch.setattr(quantize, "require_tool", lambda: None)
    checkpoint = checkpoints.open_checkpoint(str(ours))

    def keys(weighed: bool) -> list[str]:
        planned = export._plan(checkpoint, ["F16", "Q6_K"], "tiny", weighed, True, source.choose())
        return [target.inputs_sha256 for target in planned]

    before = [keys(True), keys(False)]
    assert before == [keys(True), keys(False)] and before[0][1] != before[1][1]
    [split] = own_roots.glob("training/datasets/tiny/*/train.jsonl")
    shutil.rmtree(split.parent)
    assert keys(True)[0] == before[0][0] and keys(False) == before[1]
    assert keys(True)[1] not in (before[0][1], before[1][1])


def test_the_same_bytes_from_another_step_keep_the_file_and_renew_the_manifest(ours: Path):
    [first] = _export(ours, "F16")
    before = first.gguf.stat().st_mtime_ns
    edit_json(ours / "manifest.json", step=13)
    [second] = _export(ours, "F16")
    assert second.reused and first.gguf.stat().st_mtime_ns == before
    assert manifest.verify(first.gguf)["step"] == 13


def test_other_bytes_in_the_way_are_refused_unless_forced(make_folder):
    [first] = _export(make_folder("one"), "F16")
    other = make_folder("two", weights=random_weights(seed=2))
    with pytest.raises(UserError, match="another model has this name") as refusal:
        _export(other, "F16")
    assert "--force" in refusal.value.expected and manifest.verify(first.gguf) == first.manifest
    assert refusal.value.found == f"weights {files.short(first.manifest['weights_sha256'])}"  # a folder has no run
    [second] = _export(other, "F16", force=True)
    assert manifest.verify(first.gguf) == second.manifest != first.manifest


def test_what_may_not_be_replaced_is_not_forced_either(make_folder):
    """Asked before any work, of a file that would really be replaced: the same inputs, or a new file, are no matter."""
    asked = []

    def never(path: Path) -> None:
        asked.append(path)
        raise UserError("the file cannot be replaced")

    folder, other = make_folder("one"), make_folder("two", weights=random_weights(seed=2))
    [first] = _export(folder, "F16", force=True, may_replace=never)
    assert _export(folder, "F16", "Q8_0", force=True, may_replace=never)[0].reused and asked == []
    _Proof.runs.clear()
    with pytest.raises(UserError, match="cannot be replaced"):
        _export(other, "F16", force=True, may_replace=never)
    assert asked == [first.gguf] and not _Proof.runs and manifest.verify(first.gguf) == first.manifest


def test_a_disk_that_is_full_at_the_end_changes_nothing(make_folder, monkeypatch: pytest.MonkeyPatch):
    """The last file to be written is the manifest; what was there before is whole until it is on the disk."""
    [first] = _export(make_folder("one"), "F16")
    write = files.write_bytes

    def full(target: Path, data: bytes) -> None:
        if target.name.endswith(".manifest.json"):
            raise OSError(errno.ENOSPC, "No space left on device")
        write(target, data)

    before = {path.name: path.read_bytes() for path in first.gguf.parent.iterdir()}
    monkeypatch.setattr(files, "write_bytes", full)
    with pytest.raises(MachineError, match="the disk is full"):
        _export(make_folder("two", weights=random_weights(seed=2)), "F16", force=True)
    assert {path.name: path.read_bytes() for path in first.gguf.parent.iterdir()} == before


KILLED = """
import os, signal, sys
from training.core import files
from training.export import export, picture, place
text, steps = sys.argv[1], int(sys.argv[2])

def counted(function):
    def call(*args, **settings):
        global steps
        steps -= 1
        if steps < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **settings)
    return call

target = place.folder_of("tiny") / "tiny-F16.gguf"
with place.hold("tiny"), files.scratch_folder(target.parent) as work:
    made = work / target.name
    made.write_text(text)
    manifest = {"kind": "gguf", "name": "tiny", "quant_type": "F16", "file": target.name, **files.file_record(made)}
    picture.write = lambda gguf, *_: [path.write_text(text) for path in picture.paths_of(gguf)]
    for name in ("replace", "rename", "unlink", "rmdir", "mkdir"):
        setattr(os, name, counted(getattr(os, name)))
    export.publish(target, made, manifest | {"parity": {"max_nats": 0.0, "kl_mean_nats": 0.0, "text": text}},
                   [])
    steps = 1 << 30
"""


@pytest.mark.parametrize("before", ["old", "new"])
def test_kill_9_at_any_step_over_an_older_file_leaves_a_pair_or_what_the_next_command_makes_one(before: str):
    """`before` is "new" where the bytes are there already and only the manifest is renewed."""

    def publish(text: str, steps: int) -> int:
        command = [sys.executable, "-c", KILLED, text, str(steps)]
        return subprocess.run(command, cwd=paths.REPOSITORY).returncode

    def told() -> str:
        assert manifest.verify(gguf)["parity"]["text"] == gguf.read_text()
        return gguf.read_text()

    gguf = paths.roots().trained / "tiny/tiny-F16.gguf"
    assert publish(before, 1 << 30) == 0
    kept, seen, steps = {path.name: path.read_bytes() for path in gguf.parent.iterdir()}, [], 0
    while (status := publish("new", steps)) == -signal.SIGKILL:
        if manifest.path_of(gguf).is_file():
            assert told() in (before, "new"), steps
        with place.hold("tiny"):
            pass
        seen.append(told())
        assert [path.name for path in gguf.parent.glob(".*") if path.name != ".tiny.lock"] == [], steps
        for name, data in kept.items():
            (gguf.parent / name).write_bytes(data)
        steps += 1
    assert status == 0 and told() == "new"
    assert seen == sorted(seen, key=lambda text: text == "new") and seen[0] == before and seen[-1] == "new"
    assert len(seen) >= 10, seen


@pytest.mark.parametrize("damage", ["bytes", "no manifest, other bytes"])
def test_a_damaged_file_is_in_the_way_too(make_folder, damage: str):
    folder = make_folder()
    [output] = _export(folder, "F16")
    _flip(output.gguf)
    if damage != "bytes":
        manifest.path_of(output.gguf).unlink()
    with pytest.raises(UserError, match="another model has this name"):
        _export(folder, "F16")
    [healed] = _export(folder, "F16", force=True)
    assert manifest.verify(output.gguf) == healed.manifest


def test_a_file_without_its_manifest_is_finished(make_folder):
    """As a crash between the two renames leaves it."""
    folder = make_folder()
    [output] = _export(folder, "F16")
    manifest.path_of(output.gguf).unlink()
    [again] = _export(folder, "F16")
    assert again.reused and manifest.verify(output.gguf)["sha256"] == output.manifest["sha256"]


def test_nothing_is_published_when_one_of_several_fails(make_folder, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_Proof, "fails", "Q8_0")
    with pytest.raises(RunError):
        _export(make_folder(), "F16", "Q8_0")
    assert _Proof.runs == ["F16", "Q8_0"] and _left() == set()


def test_a_failure_leaves_an_older_file_as_it_was(make_folder, monkeypatch: pytest.MonkeyPatch):
    [first] = _export(make_folder("one"), "F16")
    monkeypatch.setattr(_Proof, "fails", "F16")
    with pytest.raises(RunError):
        _export(make_folder("two", weights=random_weights(seed=2)), "F16", force=True)
    assert manifest.verify(first.gguf) == first.manifest


def test_an_interruption_leaves_nothing(make_folder, monkeypatch: pytest.MonkeyPatch):
    def stop(*_: object):
        raise KeyboardInterrupt

    monkeypatch.setattr(_Proof, "run", stop)
    with pytest.raises(KeyboardInterrupt):
        _export(make_folder(), "F16")
    assert _left() == set()


@pytest.mark.parametrize("number", [999999999, 1], ids=["gone", "of a container, another's here"])
def test_leftovers_of_a_killed_export_are_removed(make_folder, number: int):
    dead = paths.roots().trained / "tiny" / f".work.{number}.abcd.partial"
    dead.mkdir(parents=True)
    (dead / "F16.gguf").write_bytes(b"half")
    _export(make_folder(), "F16")
    assert not dead.exists()


def test_a_full_disk_is_told_before_anything_is_written(make_folder, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1 << 20})())
    with pytest.raises(MachineError, match="not enough disk space"):
        _export(make_folder(), "F16")
    assert _left() == set()


def test_a_name_that_is_a_path_is_refused(make_folder):
    with pytest.raises(UserError):
        _export(make_folder(), "F16", name="../../escape")


def test_the_converter_must_have_written_what_it_was_told(make_folder, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checkpoints.Checkpoint, "chat_template", "{{ messages }}")
    with pytest.raises(Exception, match="wrote something else") as failure:
        _export(make_folder(), "F16")
    assert failure.value.where == "tokenizer.chat_template" and _left() == set()


def test_the_command_marks_what_another_llama_cpp_made(make_folder, monkeypatch: pytest.MonkeyPatch, capsys):
    """The file cannot be made again by the pin, and the report says so too."""

    def choose(given: str | None = None, *, allow_unpinned: bool = False) -> source.LlamaCpp:
        assert (given, allow_unpinned) == ("other", True)
        return source.LlamaCpp(Path("/nowhere"), "f" * 64, is_pinned=False)

    monkeypatch.setattr(source, "choose", choose)
    monkeypatch.setattr(export_gguf, "_fit", lambda gguf: "it does")
    command = ["export-gguf", str(make_folder()), "--quant", "F16", "--name", "tiny"]
    assert main([*command, "--llama-cpp", "other", "--allow-unpinned"]) == 0
    written = manifest.read(paths.roots().trained / "tiny/tiny-F16.gguf")
    assert written["llama_cpp"] == {"reproducible": False, "converter_sha256": "f" * 64}
    assert "not the pinned one" in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="no ssh-keygen on this machine")
def test_the_commands_sign_and_check_a_signature(make_folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    key, signers = tmp_path / "id", tmp_path / "signers"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(key)], check=True)
    signers.write_text(f"someone {key.with_suffix('.pub').read_text()}")
    pretended = source.choose()
    monkeypatch.setattr(source, "choose", lambda given, allow_unpinned: pretended)
    monkeypatch.setattr(export_gguf, "_fit", lambda gguf: "it does")
    export_it = ["export-gguf", str(make_folder()), "--quant", "F16", "--name", "tiny"]
    verify = ["verify", "/app/models/trained/tiny/tiny-F16.gguf", "--signers", str(signers)]
    assert main(export_it) == 0 and main(verify) == 5
    assert main([*export_it, "--sign", str(key)]) == 0
    assert "tiny-F16.manifest.json.sig" in capsys.readouterr().err
    assert main(verify) == 0
    assert "someone" in capsys.readouterr().err
    edit_json(manifest.path_of(paths.roots().trained / "tiny/tiny-F16.gguf"), name="other")
    assert main(verify) == 5


def test_a_preview_says_what_would_be_done_and_writes_nothing(make_folder):
    folder = make_folder()
    preview = export.preview(checkpoints.open_checkpoint(str(folder)), ["F16"], name="tiny")
    assert next(iter(preview.values())).startswith("is new, 2") and not paths.roots().trained.exists()
    [output] = _export(folder, "F16")
    other = checkpoints.open_checkpoint(str(make_folder("two", weights=random_weights(seed=2))))
    assert export.preview(checkpoints.open_checkpoint(str(folder)), ["F16"], name="tiny") == {
        output.gguf: "is there already, of these inputs"
    }
    assert "--force is needed" in export.preview(other, ["F16"], name="tiny")[output.gguf]
