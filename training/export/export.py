"""An export from its first check to the last rename.

Everything happens in a workspace beside the target; a GGUF and its manifest get their final names only after the ids
and the log-probabilities were right, the manifest last. The same inputs give the same bytes, so a file that is there
already is used again where its bytes are the same, and is never replaced by others unless told to.
"""

import contextlib
import importlib.metadata
import logging
import os
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from training.core import files, locks, paths, version
from training.core.errors import IntegrityError, UserError
from training.export import checks, gguf_file, ids, manifest, parity, probes, reference
from training.export.checkpoint import Checkpoint
from training.export.gguf_file import GgufFile
from training.llamacpp import convert, pin, source
from training.llamacpp.client import Client
from training.llamacpp.server import ServerProcess
from training.tokenizer import store

QUANTS = convert.OUTTYPES
# Raised when what an export proves changes: files proved by an older rule are proved again.
PROOF = 1
FINGERPRINT_TEXTS = ("The", "1234567 + 89 =", "import os\n\n", "Once upon a time")
_BYTES_A_WEIGHT = {"F32": 4.0, "F16": 2.0, "BF16": 2.0, "Q8_0": 8.5 / 8}
_SPARE_BYTES = 32 << 20
_HEALTH_SECONDS = 180.0
_SPARE_CONTEXT_TOKENS = 16
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Output:
    """One exported file. `reused` says that its bytes were there already."""

    gguf: Path
    manifest: dict
    tensor_types: dict[str, int]
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


def export(checkpoint: Checkpoint, quants: list[str], *, name: str, force: bool = False) -> list[Output]:
    """Export a checkpoint as `$DATA_ROOT/models/trained/<name>/<name>-<QUANT>.gguf`, one file for each quant.

    Raises before anything is written where the checkpoint or the machine cannot do it, RunError where the served
    model is not the trained one, UserError where other bytes are in the way and `force` is off.
    """
    store.check_name(name, "model")
    pinned = pin.load()
    checks.check(checkpoint, convert.architectures(source.require_source(pinned)))
    folder = paths.roots().trained / name
    with locks.hold(folder.parent / f".{name}.lock", f"export of {name}", resource=f"the model folder {name}"):
        targets = [_target(checkpoint, quant, name, folder, pinned) for quant in quants]
        kept = {target.quant: output for target in targets if (output := _reusable(target))}
        missing = [target for target in targets if target.quant not in kept]
        made = _make(checkpoint, missing, name, pinned, force) if missing else {}
        return [(kept | made)[quant] for quant in quants]


def _target(checkpoint: Checkpoint, quant: str, name: str, folder: Path, pinned: pin.Pin) -> _Target:
    inputs = {
        **checkpoint.input_hashes(), "run": checkpoint.origin["run"], "step": checkpoint.origin["step"],
        "name": name, "quant": quant, "converter": pinned.converter_sha256, "proof": PROOF,
    }  # fmt: skip
    return _Target(quant, folder / f"{name}-{quant}.gguf", files.sha256_json(inputs))


def _reusable(target: _Target) -> Output | None:
    """The finished file of the very same inputs, its bytes verified; None where there is none."""
    try:
        found = manifest.read(target.gguf)
        if found["inputs_sha256"] != target.inputs_sha256:
            return None
        manifest.verify(target.gguf)
    except (IntegrityError, KeyError):
        return None
    return Output(target.gguf, found, found["tensor_types"], reused=True)


def _make(checkpoint: Checkpoint, targets: list[_Target], name: str, pinned: pin.Pin, force: bool) -> dict[str, Output]:
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
            proof = _Proof.prepare(checkpoint)
            conversion.wait()
        made = {}
        for target in targets:
            facts = _inspect(outputs[target.quant], checkpoint)
            if not force:
                _refuse_other_bytes(target, facts)
            proved = proof.run(outputs[target.quant], target.quant, workspace)
            made[target] = _manifest(checkpoint, target, name, pinned, facts, proved)
        return {
            target.quant: _publish(target, outputs[target.quant], written, written["tensor_types"])
            for target, written in made.items()
        }


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
        raise _in_the_way(target, f"a model of run {there.get('run')}, step {there.get('step')}")


def _refuse_other_bytes(target: _Target, facts: GgufFile) -> None:
    if target.gguf.exists():
        digest = files.sha256_file(target.gguf)
        if digest != facts.sha256:
            raise _in_the_way(target, f"sha256 {files.short(digest)}")


def _in_the_way(target: _Target, found: str) -> UserError:
    return UserError(
        "another model has this name", where=target.gguf, found=found, expected="no file, or the same bytes",
        next_command="the same command with --name OTHER, or with --force to replace it",
    )  # fmt: skip


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


@dataclass(frozen=True)
class _Proof:
    """What every file of one checkpoint is proved with: PyTorch runs once."""

    checkpoint: Checkpoint
    texts: probes.Texts
    prompts: list[probes.Prompt]
    reference_NV: object

    @classmethod
    def prepare(cls, checkpoint: Checkpoint) -> "_Proof":
        checks.check_finite(checkpoint)
        texts = probes.draw_texts(checkpoint.origin["dataset"])
        context_tokens = checkpoint.config.get("max_position_embeddings", probes.MAX_PROMPT_TOKENS)
        prompts = probes.make_prompts(checkpoint.encoder, texts.documents, context_tokens)
        return cls(checkpoint, texts, prompts, reference.logprobs(checkpoint, prompts))

    def run(self, gguf: Path, quant: str, workspace: Path) -> dict:
        """Serve the file privately and compare. Returns the manifest's `parity` and `fingerprint`."""
        encoder, tokenizer = self.checkpoint.encoder, self.checkpoint.origin["tokenizer"]
        # Half of the CPUs: on a busy machine threads that wait for each other cost more than they bring.
        threads = max(1, len(os.sched_getaffinity(0)) // 2)
        ctx_size = probes.MAX_PROMPT_TOKENS + _SPARE_CONTEXT_TOKENS
        log = workspace / f"server-{quant}.log"
        with ServerProcess.start(gguf, log=log, ctx_size=ctx_size, threads=threads) as server:
            server.wait_healthy(_HEALTH_SECONDS)
            client = Client(server.url)
            counts = ids.check(client, encoder, self.texts.lines, tokenizer["pre_tokenizer"])
            _logger.info(
                "%s: ids equal on %d nasty strings and %d lines", quant, counts["nasty_strings"], counts["lines"]
            )
            figures = parity.judge(parity.compare(client, self.prompts, self.reference_NV), quant)
            fingerprint = [_fingerprint(client, encoder.encode(text).ids) for text in FINGERPRINT_TEXTS]
        _logger.info("%s: at most %g nats off, divergence %g", quant, figures["max_nats"], figures["kl_mean_nats"])
        server_text = f"xllamacpp {importlib.metadata.version('xllamacpp')}"
        return {
            "parity": {**figures, "drawn_from": self.texts.origin, "server": server_text, "ids": counts},
            "fingerprint": {"server": server_text, "prompts": fingerprint},
        }


def _fingerprint(client: Client, prompt_ids: list[int]) -> dict:
    top = client.top_logprobs(prompt_ids, parity.TOP)
    return {"ids": prompt_ids, "top": [[token, round(logprob, 5)] for token, logprob in top]}


def _manifest(
    checkpoint: Checkpoint, target: _Target, name: str, pinned: pin.Pin, facts: GgufFile, proved: dict
) -> dict:
    origin = checkpoint.origin
    return {
        "schema": 1, "kind": manifest.KIND, "name": name, "file": target.gguf.name,
        "sha256": facts.sha256, "bytes": facts.bytes, "tensor_sha256": facts.tensor_sha256,
        "quant_type": target.quant, "tensor_types": facts.tensor_types, "architecture": facts.architecture,
        "vocab_size": facts.vocab_size, "context_length": facts.context_length, "parameters": facts.parameters,
        "run": origin["run"], "step": origin["step"], "weights_sha256": origin["weights_sha256"],
        "base": origin["base"], "method": origin["method"],
        "tokenizer": origin["tokenizer"] | {"add_bos": checkpoint.add_bos}, "dataset": origin["dataset"],
        "recipe_sha256": origin["recipe_sha256"], "llama_cpp": pinned.to_json(), "tool": version.tool(),
        "inputs_sha256": target.inputs_sha256, **proved,
    }  # fmt: skip


def _publish(target: _Target, made: Path, written: dict, tensor_types: dict[str, int]) -> Output:
    """Give a proved file its final name, then its manifest; at no moment does a manifest stand beside other bytes."""
    same = target.gguf.exists() and files.sha256_file(target.gguf) == written["sha256"]
    if not same:
        manifest.path_of(target.gguf).unlink(missing_ok=True)
        files.fsync_path(made)
        os.replace(made, target.gguf)
        files.fsync_path(target.gguf.parent)
    files.write_json(manifest.path_of(target.gguf), written)
    return Output(target.gguf, written, tensor_types, reused=same)
