"""An export from its first check to the last rename.

Everything happens in a workspace beside the target; a GGUF and its manifest get their final names only after the ids
and the log-probabilities were right, the manifest last. The same inputs give the same bytes, so a file that is there
already is used again where its bytes are the same, and is never replaced by others unless told to.
"""

import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from training.core import files, store, version
from training.core.errors import IntegrityError, UserError
from training.core.log import say
from training.core.report import again
from training.core.units import format_bytes
from training.export import (
    checks,
    gguf_file,
    importance,
    manifest,
    merge,
    modelfile,
    picture,
    place,
    plan,
    positions,
    proof,
)
from training.export.checkpoint import Checkpoint
from training.export.gguf_file import GgufFile
from training.export.plan import QUANTS, Plan
from training.llamacpp import convert, pin, quantize, source
from training.llamacpp.source import LlamaCpp

__all__ = ["QUANTS", "Output", "default_name", "export", "preview", "publish"]
_SPARE_BYTES = 32 << 20
_PLAN_TOLERANCE = 0.01
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Output:
    """One exported file. `reused` says that its bytes were there already."""

    gguf: Path
    manifest: dict
    reused: bool


@dataclass(frozen=True, eq=False)
class _Target:
    quant: str
    gguf: Path
    inputs_sha256: str
    plan: Plan


def _architecture(checkpoint: Checkpoint, llama_cpp: LlamaCpp) -> str:
    """llama.cpp's own name of the architecture. Raises UserError where the names of its tensors are not known here."""
    name = (checkpoint.config.get("architectures") or [None])[0]
    found = convert.architecture_of(llama_cpp.folder, name)
    if found is None:
        raise UserError(
            "it cannot be told what a file of this architecture will be", where=checkpoint.folder / "config.json",
            found=name, expected="an architecture whose tensors the gguf package names: LlamaForCausalLM ...",
        )  # fmt: skip
    return found


def default_name(checkpoint: Checkpoint) -> str:
    """The name of the recipe that the checkpoint was trained by, else its folder's."""
    recipe = checkpoint.own_folder / "recipe.json"
    name = files.read_json(recipe).get("name") if recipe.is_file() else checkpoint.own_folder.name
    return store.name_from(name)


def preview(
    checkpoint: Checkpoint, quants: list[str], *, name: str, weighed: bool = False, fallback: bool = True,
    llama_cpp: LlamaCpp | None = None,
) -> dict[Path, str]:  # fmt: skip
    """Check what can be checked before a conversion and say what `export` would do with each file. Writes nothing."""
    planned = _plan(checkpoint, quants, name, weighed, fallback, llama_cpp or source.choose())
    return {target.gguf: _intent(target, checkpoint) for target in planned}


def _intent(target: _Target, checkpoint: Checkpoint) -> str:
    if _reusable(target):
        return "is there already, of these inputs"
    planned = f"{format_bytes(target.plan.num_bytes)}: {target.plan.text()}"
    if target.gguf.exists():
        return f"has a file of its name there: kept where the bytes are the same, else --force is needed ({planned})"
    return f"is new, {planned}"


def export(
    checkpoint: Checkpoint, quants: list[str], *, name: str, force: bool = False, weighed: bool = False,
    fallback: bool = True, llama_cpp: LlamaCpp | None = None, may_replace: Callable[[Path], None] = lambda _: None,
) -> list[Output]:  # fmt: skip
    """Export a checkpoint as `$DATA_ROOT/models/trained/<name>/<name>-<QUANT>.gguf`, one file for each quant.

    Args:
        weighed: let K-quants weigh their rounding by an importance matrix of the training data.
        fallback: where a type's blocks do not divide a row, take another type; else refuse.
        llama_cpp: what converts; None takes what `source.choose` does by itself.
        may_replace: raises where a file may not be replaced whatever `force` says.

    Raises before anything is written where the checkpoint or the machine cannot do it, RunError where the served
    model is not the trained one, UserError where other bytes are in the way and `force` is off.
    """
    llama_cpp = llama_cpp or source.choose()
    targets = _plan(checkpoint, quants, name, weighed, fallback, llama_cpp)
    with place.hold(name):
        kept = {target.quant: output for target in targets if (output := _reusable(target))}
        missing = [target for target in targets if target.quant not in kept]
        made = _Work(checkpoint, missing, name, force, weighed, llama_cpp, may_replace).run() if missing else {}
        return [(kept | made)[quant] for quant in quants]


def _plan(
    checkpoint: Checkpoint, quants: list[str], name: str, weighed: bool, fallback: bool, llama_cpp: LlamaCpp
) -> list[_Target]:  # fmt: skip
    folder = place.folder_of(name)
    checks.check(checkpoint, convert.architectures(llama_cpp.folder))
    checks.check_name(checkpoint, name)
    if any(quant in quantize.K_QUANTS for quant in quants):
        quantize.require_tool()
    architecture = _architecture(checkpoint, llama_cpp)
    origin = {key: checkpoint.origin[key] for key in ("run", "step", "merged_from")}
    inputs = {
        **checkpoint.input_hashes(), **origin, "name": name, "converter": llama_cpp.converter_sha256,
        "proof": proof.VERSION,
    }  # fmt: skip
    weighed = weighed and any(quant in quantize.K_QUANTS for quant in quants)
    weighed_by, targets = importance.key(checkpoint) if weighed else None, []
    for quant in quants:
        key = inputs | {"quant": quant, "weighed_by": weighed_by if quant in quantize.K_QUANTS else None}
        planned = plan.make(checkpoint, quant, architecture)
        if planned.fallbacks and not fallback:
            raise _does_not_fit(planned)
        targets.append(_Target(quant, folder / f"{name}-{quant}.gguf", files.sha256_json(key), planned))
    return targets


def _does_not_fit(planned: Plan) -> UserError:
    name, instead = next(iter(planned.fallbacks.items()))
    return UserError(
        f"{planned.quant} does not fit {len(planned.fallbacks)} of {len(planned.types)} tensors",
        where=name, found=f"it would become {instead}", expected="rows that the type's blocks divide",
        next_command=again("--quant", "Q8_0"),
    )  # fmt: skip


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


class _Work:
    """The making of the files that are missing, in a workspace beside their places."""

    def __init__(
        self, checkpoint: Checkpoint, targets: list[_Target], name: str, force: bool, weighed: bool,
        llama_cpp: LlamaCpp, may_replace: Callable[[Path], None],
    ):  # fmt: skip
        self.checkpoint, self.targets, self.name, self.force = checkpoint, targets, name, force
        self.llama_cpp, self.may_replace = llama_cpp, may_replace
        self.weighed = weighed and any(target.quant in quantize.K_QUANTS for target in targets)
        self.importance: dict | None = None

    def run(self) -> dict[str, Output]:
        """Make, prove and publish. Nothing has its final name before all of it is proved."""
        folder = self.targets[0].gguf.parent
        for target in self.targets:
            if not self.force:
                _refuse_other_weights(target, self.checkpoint)
            elif target.gguf.exists():
                self.may_replace(target.gguf)
        for target in self.targets:
            say(f"{target.gguf.name}: {format_bytes(target.plan.num_bytes)}, {target.plan.text()}")
        files.require_space(folder, self._needed_bytes(), "the GGUF files")
        with files.scratch_folder(folder) as workspace:
            made, prepared = self._convert(workspace)
            proved = self._prove_all(made, prepared, workspace)
            return {
                target.quant: self._publish(target, made[target.quant], *proved[target.quant])
                for target in self.targets
            }

    def _publish(self, target: _Target, made: Path, written: dict, positions: list[dict]) -> Output:
        named = made.rename(made.with_name(target.gguf.name))
        beside = modelfile.write(self.checkpoint, named, written["context_length"])
        return publish(target.gguf, named, written, positions, beside)

    @property
    def _whole_type(self) -> str:
        """The type that K-quants are made of, and that is proved beside types that round."""
        is_asked = any(target.quant == "F32" for target in self.targets)
        return "F32" if is_asked else proof.whole_type(self.checkpoint)

    def _needed_bytes(self) -> int:
        whole = self._whole_type
        quants = {whole: self.checkpoint.num_parameters * (4 if whole == "F32" else 2)}
        quants |= {target.quant: target.plan.num_bytes for target in self.targets}
        merged = merge.num_bytes(self.checkpoint, cast=False) if self.checkpoint.adapter else 0
        return sum(quants.values()) + merged + _SPARE_BYTES

    def _convert(self, workspace: Path) -> tuple[dict[str, Path], "proof.Proof"]:
        checkpoint, folder = self.checkpoint, self.checkpoint.folder
        if checkpoint.adapter is not None:
            folder = workspace / "merged"
            merge.write(checkpoint, folder, cast=False)
        quants = [target.quant for target in self.targets]
        converted = [quant for quant in (*convert.OUTTYPES,) if quant in (*quants, self._whole_type)]
        outputs = {quant: workspace / f"{quant}.gguf" for quant in converted}
        with convert.Conversion.start(
            folder, outputs, tokenizer=checkpoint.tokenizer_folder,
            pre_tokenizer=checkpoint.origin["tokenizer"]["pre_tokenizer"], add_bos=checkpoint.add_bos, name=self.name,
            workspace=workspace, bos_id=checkpoint.bos_id, turn_end_id=checkpoint.turn_end_id,
            source=self.llama_cpp.folder,
        ) as conversion:  # fmt: skip
            _logger.info("converting to %s; meanwhile PyTorch computes what they must say", ", ".join(outputs))
            matrix = self._weigh(workspace) if self.weighed else None
            prepared = proof.Proof.prepare(checkpoint)
            conversion.wait()
        shutil.rmtree(workspace / "merged", ignore_errors=True)
        for quant in quants:
            if quant in quantize.K_QUANTS:
                outputs[quant] = workspace / f"{quant}.gguf"
                threads = len(os.sched_getaffinity(0))
                quantize.run(outputs[self._whole_type], outputs[quant], quant, threads=threads, importance=matrix)
        return outputs, prepared

    def _llama_cpp(self) -> dict:
        """The manifest's `llama_cpp`: the pin, or, of another one, only what can be said of it."""
        if self.llama_cpp.is_pinned:
            return pin.load().to_json()
        return {"reproducible": False, "converter_sha256": self.llama_cpp.converter_sha256}

    def _weigh(self, workspace: Path) -> Path:
        architecture = _architecture(self.checkpoint, self.llama_cpp)
        path = workspace / "importance.gguf"
        self.importance = importance.of_training_data(self.checkpoint, architecture, path)
        return path

    def _prove_all(
        self, made: dict[str, Path], prepared: "proof.Proof", workspace: Path
    ) -> dict[str, tuple[dict, dict]]:  # fmt: skip
        """Prove each file: first, asked for or not, the one that loses nothing, for the others' limits leave room."""
        whole, targets = self._whole_type, {target.quant: target for target in self.targets}
        proved = {}
        if whole in targets:
            proved[whole] = self._prove(targets.pop(whole), made[whole], prepared, workspace)
            figures = proved[whole][0]["parity"]
        else:
            figures, _ = prepared.compare(made[whole], whole, workspace)
        told = proof.as_whole(figures, whole)
        for quant, target in targets.items():
            proved[quant] = self._prove(target, made[quant], prepared, workspace, told)
        return proved

    def _prove(
        self, target: _Target, made: Path, prepared: "proof.Proof", workspace: Path, whole: dict | None = None
    ) -> tuple[dict, dict]:  # fmt: skip
        """The manifest of a file and its positions. Raises where it is another model than the trained one."""
        facts = _inspect(made, self.checkpoint, target)
        if not self.force:
            _refuse_other_bytes(target, facts)
        proved = prepared.run(made, target.quant, workspace)
        each = proved.pop("positions")
        proved["parity"]["whole"] = whole
        weighed = self.importance if target.quant in quantize.K_QUANTS else None
        return _manifest(
            self.checkpoint, target, self.name, facts, proved | {"importance": weighed, "llama_cpp": self._llama_cpp()}
        ), each


def _refuse_other_weights(target: _Target, checkpoint: Checkpoint) -> None:
    """Refuse at once what could only be refused after the conversion."""
    try:
        there = manifest.read(target.gguf)
    except IntegrityError:
        return
    digest = there.get("weights_sha256")
    if digest != checkpoint.origin["weights_sha256"]:
        run = f"a model of run {there['run']}, step {there['step']}, " if there.get("run") else ""
        raise place.taken(target.gguf, f"{run}weights {files.short(str(digest))}")


def _refuse_other_bytes(target: _Target, facts: GgufFile) -> None:
    if target.gguf.exists():
        digest = files.sha256_file(target.gguf)
        if digest != facts.sha256:
            raise place.taken(target.gguf, f"sha256 {files.short(digest)}")


def _inspect(gguf: Path, checkpoint: Checkpoint, target: _Target) -> GgufFile:
    """Read the converted file, and hold what the converter wrote against what it was to write."""
    facts = gguf_file.inspect(gguf)
    tokenizer, head = checkpoint.origin["tokenizer"], "output.weight"
    pairs = {
        "tokenizer.ggml.pre": (facts.pre_tokenizer, tokenizer["pre_tokenizer"]),
        "tokenizer.ggml.add_bos_token": (facts.add_bos, checkpoint.add_bos),
        "tokenizer.ggml.bos_token_id": (facts.bos_id, checkpoint.bos_id),
        "tokenizer.ggml.eos_token_id": (facts.eos_id, checkpoint.special_id("eos")),
        "tokenizer.chat_template": (facts.chat_template, checkpoint.chat_template),
        "number of tokens": (facts.vocab_size, checkpoint.config["vocab_size"]),
        "two matrices of embedding and head": (head in facts.tensor_names, head in target.plan.types),
    }
    for key, (found, expected) in pairs.items():
        if found != expected:
            raise IntegrityError("the converter wrote something else", where=key, found=found, expected=expected)
    positions.require_equal(checkpoint.config, facts.values, facts.rope_factors)
    if abs(facts.bytes - target.plan.num_bytes) > _PLAN_TOLERANCE * facts.bytes:
        _logger.warning("the file has %d bytes, %d were planned", facts.bytes, target.plan.num_bytes)
    return facts


def _manifest(checkpoint: Checkpoint, target: _Target, name: str, facts: GgufFile, proved: dict) -> dict:
    origin = checkpoint.origin
    return {
        "schema": 1, "kind": manifest.KIND, "name": name, "file": target.gguf.name,
        "sha256": facts.sha256, "bytes": facts.bytes, "tensor_sha256": facts.tensor_sha256,
        "quant_type": target.quant, "tensor_types": facts.tensor_types, "architecture": facts.architecture,
        "vocab_size": facts.vocab_size, "context_length": facts.context_length, "parameters": facts.parameters,
        "run": origin["run"], "step": origin["step"], "weights_sha256": origin["weights_sha256"],
        "base": origin["base"], "method": origin["method"], "merged_from": origin["merged_from"],
        "tokenizer": origin["tokenizer"] | {"add_bos": checkpoint.add_bos},
        "chat_template": checkpoint.chat_template, "dataset": origin["dataset"],
        "recipe_sha256": origin["recipe_sha256"], "tool": version.tool(),
        "inputs_sha256": target.inputs_sha256, "planned_bytes": target.plan.num_bytes,
        "adapter_tensors": checkpoint.adapter.counts if checkpoint.adapter else None, **proved,
    }  # fmt: skip


def publish(target: Path, made: Path, written: dict, positions: list[dict], *beside: Path) -> Output:
    """Move a proved file out of its workspace, then what lies beside it, and the manifest last.

    All of it is on the disk before the first is moved, so a full one changes nothing. `made` has the target's name
    already.
    """
    picture.write(made, written, positions)
    files.write_json(manifest.path_of(made), written)
    same = target.exists() and files.sha256_file(target) == written["sha256"]
    new = [*beside, *picture.paths_of(made), manifest.path_of(made)]
    place.publish(new if same else [made, *new], target)
    return Output(target, written, reused=same)
