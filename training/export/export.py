"""An export from its first check to the last rename.

Everything happens in a workspace beside the target; a GGUF and its manifest get their final names only after the ids
and the log-probabilities were right, the manifest last. The same inputs give the same bytes, so a file that is there
already is used again where its bytes are the same, and is never replaced by others unless told to.
"""

import contextlib
import logging
import os
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from training.core import files, locks, paths, store, version
from training.core.errors import IntegrityError, UserError
from training.core.units import format_bytes
from training.export import checks, gguf_file, manifest, proof
from training.export.checkpoint import Checkpoint
from training.export.gguf_file import GgufFile
from training.llamacpp import convert, pin, source

QUANTS = convert.OUTTYPES
_BYTES_A_WEIGHT = {"F32": 4.0, "F16": 2.0, "BF16": 2.0, "Q8_0": 8.5 / 8}
_SPARE_BYTES = 32 << 20
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Output:
    """One exported file. `reused` says that its bytes were there already."""

    gguf: Path
    manifest: dict
    reused: bool


@dataclass(frozen=True)
class _Target:
    quant: str
    gguf: Path
    inputs_sha256: str


def default_name(checkpoint: Checkpoint) -> str:
    """The recipe's name, else the folder's."""
    recipe = checkpoint.folder / "recipe.json"
    name = files.read_json(recipe).get("name") if recipe.is_file() else checkpoint.folder.name
    return store.name_from(name)


def preview(checkpoint: Checkpoint, quants: list[str], *, name: str) -> dict[Path, str]:
    """Check what can be checked before a conversion and say what `export` would do with each file. Writes nothing."""
    return {target.gguf: _intent(target, checkpoint) for target in _plan(checkpoint, quants, name)}


def _intent(target: _Target, checkpoint: Checkpoint) -> str:
    if _reusable(target):
        return "is there already, of these inputs"
    size = f"about {format_bytes(checkpoint.num_parameters * _BYTES_A_WEIGHT[target.quant])}"
    if target.gguf.exists():
        return f"has a file of its name there: kept where the bytes are the same, else --force is needed ({size})"
    return f"is new, {size}"


def export(checkpoint: Checkpoint, quants: list[str], *, name: str, force: bool = False) -> list[Output]:
    """Export a checkpoint as `$DATA_ROOT/models/trained/<name>/<name>-<QUANT>.gguf`, one file for each quant.

    Raises before anything is written where the checkpoint or the machine cannot do it, RunError where the served
    model is not the trained one, UserError where other bytes are in the way and `force` is off.
    """
    targets = _plan(checkpoint, quants, name)
    lock = paths.roots().trained / f".{name}.lock"
    with locks.hold(lock, f"export of {name}", resource=f"the model folder {name}"):
        kept = {target.quant: output for target in targets if (output := _reusable(target))}
        missing = [target for target in targets if target.quant not in kept]
        made = _make(checkpoint, missing, name, force) if missing else {}
        return [(kept | made)[quant] for quant in quants]


def _plan(checkpoint: Checkpoint, quants: list[str], name: str) -> list[_Target]:
    store.check_name(name, "model")
    pinned = pin.load()
    checks.check(checkpoint, convert.architectures(source.require_source(pinned)))
    inputs = {
        **checkpoint.input_hashes(), "run": checkpoint.origin["run"], "step": checkpoint.origin["step"],
        "name": name, "converter": pinned.converter_sha256, "proof": proof.VERSION,
    }  # fmt: skip
    folder = paths.roots().trained / name
    return [
        _Target(quant, folder / f"{name}-{quant}.gguf", files.sha256_json(inputs | {"quant": quant}))
        for quant in quants
    ]


def _reusable(target: _Target) -> Output | None:
    """The finished file of the very same inputs, its bytes verified; None where there is none."""
    try:
        found = manifest.read(target.gguf)
        if found["inputs_sha256"] != target.inputs_sha256:
            return None
        manifest.verify(target.gguf)
    except (IntegrityError, KeyError):
        return None
    return Output(target.gguf, found, reused=True)


def _make(checkpoint: Checkpoint, targets: list[_Target], name: str, force: bool) -> dict[str, Output]:
    if not force:
        for target in targets:
            _refuse_other_weights(target, checkpoint)
    folder = targets[0].gguf.parent
    needed_bytes = sum(checkpoint.num_parameters * _BYTES_A_WEIGHT[target.quant] for target in targets) + _SPARE_BYTES
    files.require_space(folder, int(needed_bytes), "the GGUF files")
    with files.disk_errors(folder), _workspace(folder) as workspace:
        outputs = {target.quant: workspace / f"{target.quant}.gguf" for target in targets}
        with convert.Conversion.start(
            checkpoint.folder, outputs, tokenizer=checkpoint.tokenizer_folder,
            pre_tokenizer=checkpoint.origin["tokenizer"]["pre_tokenizer"], add_bos=checkpoint.add_bos, name=name,
            workspace=workspace,
        ) as conversion:  # fmt: skip
            _logger.info("converting to %s; meanwhile PyTorch computes what they must say", ", ".join(outputs))
            prepared = proof.Proof.prepare(checkpoint)
            conversion.wait()
        made = {}
        for target in targets:
            facts = _inspect(outputs[target.quant], checkpoint)
            if not force:
                _refuse_other_bytes(target, checkpoint, facts)
            proved = prepared.run(outputs[target.quant], target.quant, workspace)
            made[target] = _manifest(checkpoint, target, name, facts, proved)
        return {target.quant: _publish(target, outputs[target.quant], written) for target, written in made.items()}


@contextlib.contextmanager
def _workspace(folder: Path) -> Iterator[Path]:
    """A temporary folder beside the targets, on their file system; those of dead exports are removed."""
    folder.mkdir(parents=True, exist_ok=True)
    files.remove_leftovers(folder)
    workspace = folder / f".export.{os.getpid()}.{secrets.token_hex(4)}.partial"
    workspace.mkdir()
    try:
        yield workspace
    finally:
        shutil.rmtree(workspace, ignore_errors=True)
        with contextlib.suppress(OSError):
            folder.rmdir()  # only where it is empty: nothing was there before, and nothing has come


def _refuse_other_weights(target: _Target, checkpoint: Checkpoint) -> None:
    """Refuse at once what could only be refused after the conversion."""
    try:
        there = manifest.read(target.gguf)
    except IntegrityError:
        return
    if there.get("weights_sha256") != checkpoint.origin["weights_sha256"]:
        raise _in_the_way(target, checkpoint, f"a model of run {there.get('run')}, step {there.get('step')}")


def _refuse_other_bytes(target: _Target, checkpoint: Checkpoint, facts: GgufFile) -> None:
    if target.gguf.exists():
        digest = files.sha256_file(target.gguf)
        if digest != facts.sha256:
            raise _in_the_way(target, checkpoint, f"sha256 {files.short(digest)}")


def _in_the_way(target: _Target, checkpoint: Checkpoint, found: str) -> UserError:
    return UserError(
        "another model has this name",
        where=target.gguf,
        found=found,
        expected="no file, or the same bytes",
        next_command="the same command with another --name, or with --force to replace the file, in ARGS",
    )


def _inspect(gguf: Path, checkpoint: Checkpoint) -> GgufFile:
    """Read the converted file, and hold what the converter wrote against what it was to write."""
    facts = gguf_file.inspect(gguf)
    tokenizer = checkpoint.origin["tokenizer"]
    pairs = {
        "tokenizer.ggml.pre": (facts.pre_tokenizer, tokenizer["pre_tokenizer"]),
        "tokenizer.ggml.add_bos_token": (facts.add_bos, checkpoint.add_bos),
        "tokenizer.ggml.bos_token_id": (facts.bos_id, checkpoint.special_id("bos")),
        "tokenizer.ggml.eos_token_id": (facts.eos_id, checkpoint.special_id("eos")),
        "tokenizer.chat_template": (facts.chat_template, checkpoint.chat_template),
        "number of tokens": (facts.vocab_size, checkpoint.config["vocab_size"]),
    }
    for key, (found, expected) in pairs.items():
        if found != expected:
            raise IntegrityError("the converter wrote something else", where=key, found=found, expected=expected)
    return facts


def _manifest(checkpoint: Checkpoint, target: _Target, name: str, facts: GgufFile, proved: dict) -> dict:
    origin = checkpoint.origin
    return {
        "schema": 1, "kind": manifest.KIND, "name": name, "file": target.gguf.name,
        "sha256": facts.sha256, "bytes": facts.bytes, "tensor_sha256": facts.tensor_sha256,
        "quant_type": target.quant, "tensor_types": facts.tensor_types, "architecture": facts.architecture,
        "vocab_size": facts.vocab_size, "context_length": facts.context_length, "parameters": facts.parameters,
        "run": origin["run"], "step": origin["step"], "weights_sha256": origin["weights_sha256"],
        "base": origin["base"], "method": origin["method"],
        "tokenizer": origin["tokenizer"] | {"add_bos": checkpoint.add_bos},
        "chat_template": checkpoint.chat_template, "dataset": origin["dataset"],
        "recipe_sha256": origin["recipe_sha256"], "llama_cpp": pin.load().to_json(), "tool": version.tool(),
        "inputs_sha256": target.inputs_sha256, **proved,
    }  # fmt: skip


def _publish(target: _Target, made: Path, written: dict) -> Output:
    """Give a proved file its final name, then its manifest; at no moment does a manifest stand beside other bytes."""
    same = target.gguf.exists() and files.sha256_file(target.gguf) == written["sha256"]
    if not same:
        manifest.path_of(target.gguf).unlink(missing_ok=True)
        files.fsync_path(made)
        os.replace(made, target.gguf)
        files.fsync_path(target.gguf.parent)
    files.write_json(manifest.path_of(target.gguf), written)
    return Output(target.gguf, written, reused=same)
