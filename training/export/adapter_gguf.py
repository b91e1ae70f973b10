"""An adapter as a GGUF of its own, which a server loads beside the base's file, unmerged.

It is proved as a whole model is: served beside its base in F16, against the adapter beside its base in PyTorch. Only
pairs of factors can be served so; trained rows and full copies need a merge.
"""

from pathlib import Path

from training.core import files, version
from training.core.errors import UserError
from training.core.report import again
from training.export import checks, gguf_file, place, proof
from training.export.adapter import HEAD
from training.export.checkpoint import Checkpoint
from training.export.export import Output, publish
from training.export.manifest import ADAPTER_KIND
from training.llamacpp import convert, pin, source

QUANTS = ("F16", "F32")


def path_of(name: str, quant: str) -> Path:
    """Where the adapter of a name lies."""
    return place.folder_of(name) / f"{name}-adapter-{quant}.gguf"


def check(checkpoint: Checkpoint) -> None:
    """Raise UserError where a checkpoint cannot be served as an adapter, and what is wrong with it or its base."""
    if checkpoint.adapter is None:
        found = "a whole model"
    elif checkpoint.adapter.rows or checkpoint.adapter.copies:
        counts = checkpoint.adapter.counts
        found = ", ".join(f"{counts[kind]} {kind}" for kind in ("trained rows", "full copies") if counts[kind])
    elif HEAD in checkpoint.adapter.pairs and checkpoint.is_configured_tied:
        found = "factors of a head that is tied in the base's file"
    elif checkpoint.adapter.alpha is None:
        found = "factors of several ranks, scaled by their square root"
    else:
        checks.check(checkpoint, convert.architectures(source.require_source()))
        return
    raise UserError(
        "this cannot be served as an adapter beside its base", where=checkpoint.folder, found=found,
        expected="an adapter of factors alone, scaled by one alpha over their ranks",
        next_command=again("--format", "gguf"),
    )  # fmt: skip


def export(checkpoint: Checkpoint, quant: str, *, name: str, force: bool = False) -> Output:
    """Export `$DATA_ROOT/models/trained/<name>/<name>-adapter-<QUANT>.gguf` with its manifest, proved.

    Raises UserError where it is no adapter of factors alone, RunError where the served model is not the trained one.
    """
    check(checkpoint)
    target = path_of(name, quant)
    files.require_space(target.parent, checkpoint.num_parameters * 4 + (64 << 20), "the adapter and its base")
    with place.hold(name), files.scratch_folder(target.parent) as work:
        made = work / target.name
        facts, proved = _made(checkpoint, quant, name, made, work)
        if not force and target.exists() and files.sha256_file(target) != facts["sha256"]:
            raise place.taken(target, "other bytes")
        positions = proved.pop("positions")
        return publish(target, made, _manifest(checkpoint, target, quant, name, facts, proved), positions)


def _made(checkpoint: Checkpoint, quant: str, name: str, made: Path, work: Path) -> tuple[dict, dict]:
    """Convert adapter and base, and prove the two together; what the file is, and its proof."""
    base, whole = work / "base.gguf", proof.whole_type(checkpoint)
    wholly = _converted(checkpoint, "F32", work / "whole.gguf") if (quant, whole) == ("F16", "F32") else None
    _converted(checkpoint, quant, made)
    with convert.Conversion.start(
        checkpoint.folder, {whole: base}, tokenizer=checkpoint.tokenizer_folder,
        pre_tokenizer=checkpoint.origin["tokenizer"]["pre_tokenizer"], add_bos=checkpoint.add_bos, name=name,
        workspace=work, bos_id=checkpoint.bos_id, turn_end_id=checkpoint.turn_end_id,
    ) as conversion:  # fmt: skip
        prepared = proof.Proof.prepare(checkpoint)
        conversion.wait()
    told = None
    if wholly:  # F16's limits leave room for another adapter
        figures, _ = prepared.compare(base, whole, work, lora=wholly)
        told = proof.as_whole(figures, whole)
    proved = prepared.run(base, quant if whole == "F32" else whole, work, lora=made)
    proved["parity"]["whole"] = told
    return gguf_file.tensors_of(made), proved


def _converted(checkpoint: Checkpoint, quant: str, target: Path) -> Path:
    """Convert the adapter alone, in a folder beside the file."""
    adapter, beside = checkpoint.adapter, target.with_suffix("")
    beside.mkdir()
    with convert.Conversion.start_adapter(
        adapter.folder, checkpoint.config, quant, target, alpha=adapter.alpha, workspace=beside
    ) as conversion:
        conversion.wait()
    return target


def _manifest(checkpoint: Checkpoint, target: Path, quant: str, name: str, facts: dict, proved: dict) -> dict:
    origin = checkpoint.origin
    keys = ("run", "step", "method", "base", "weights_sha256", "tokenizer", "dataset", "recipe_sha256")
    return {
        "schema": 1, "kind": ADAPTER_KIND, "name": name, "file": target.name, "quant_type": quant, **facts,
        **{key: origin[key] for key in keys}, "adapter_tensors": checkpoint.adapter.counts,
        "llama_cpp": pin.load().to_json(), "tool": version.tool(), **proved,
    }  # fmt: skip
