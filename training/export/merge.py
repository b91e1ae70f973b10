"""An adapter and its base written as one model: safetensors of their own, a block of rows at a time.

Two uses: a folder for the converter, in float32 where the adapter adds to a tensor, so that the export's type is the
only rounding; and a standalone Hugging Face folder, cast once to the base's types. Memory is that of a block.
"""

from dataclasses import dataclass
from math import prod
from pathlib import Path

from training.core import files, version
from training.core.errors import UserError
from training.core.progress import Progress
from training.core.report import again
from training.export import checks, place, weights
from training.export.checkpoint import CONFIG, KIND, TEMPLATE, Checkpoint
from training.tokenizer import artifact

_WEIGHTS = "model.safetensors"
_MERGED_FROM = ("run", "step", "method", "base", "weights_sha256", "recipe_sha256")
_TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def write(checkpoint: Checkpoint, folder: Path, *, cast: bool) -> str:
    """Write `model.safetensors` and `config.json` into a folder; returns the sha256 of the weights.

    Args:
        cast: round merged tensors to the base's types; else they stay float32.
    """
    layout = _layout(checkpoint, cast)
    folder.mkdir(parents=True, exist_ok=True)
    files.write_json(folder / CONFIG, checkpoint.config)
    total = sum(prod(shape) for _, shape in layout.values())
    with weights.Writer(folder / _WEIGHTS, layout) as writer, Progress("merging", total, "weights") as progress:
        for name, tensor in checkpoint.tensors.items():
            wanted = weights.torch_type(layout[name][0])
            for _, block in tensor.blocks():
                writer.add(block.to(wanted))
                progress.advance(block.numel())
        return writer.close()


def num_bytes(checkpoint: Checkpoint, *, cast: bool) -> int:
    """The bytes of the weights that `write` writes."""
    return sum(prod(shape) * weights.ITEM_BYTES[dtype] for dtype, shape in _layout(checkpoint, cast).values())


def _layout(checkpoint: Checkpoint, cast: bool) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Type and shape of every tensor that is written."""
    return {
        name: (tensor.base.dtype if cast else tensor.dtype, tensor.shape) for name, tensor in checkpoint.tensors.items()
    }  # fmt: skip


@dataclass(frozen=True)
class Standalone:
    """A merged folder. `reused` says that its bytes were there already."""

    folder: Path
    manifest: dict
    reused: bool


def folder_of(name: str) -> Path:
    """Where the merged model of a name lies."""
    return place.folder_of(name) / f"{name}-merged"


def check(checkpoint: Checkpoint) -> None:
    """Raise UserError where there is nothing to merge, IntegrityError where a weight is no number."""
    if checkpoint.adapter is None:
        raise UserError(
            "there is nothing to merge: the checkpoint is a whole model", where=checkpoint.folder,
            found="no adapter_config.json", expected="a checkpoint of lora or qlora, or --format gguf",
            next_command=again("--format", "gguf"),
        )  # fmt: skip
    checks.check_weights(checkpoint)


def standalone(checkpoint: Checkpoint, name: str, *, force: bool = False) -> Standalone:
    """Write the merged model as a Hugging Face folder of its own, the manifest last.

    Raises UserError where the checkpoint is no adapter, or another model is in the way and `force` is off.
    """
    check(checkpoint)
    target = folder_of(name)
    with place.hold(name), files.scratch_folder(target.parent) as work:
        files.require_space(target, num_bytes(checkpoint, cast=True) + (64 << 20), "the merged model")
        manifest = _fill(checkpoint, work / "model")
        if (target / files.MANIFEST).is_file():
            there = files.read_json(target / files.MANIFEST).get("weights_sha256")
            if there == manifest["weights_sha256"]:
                return Standalone(target, manifest, reused=True)
            if not force:
                wanted = f"no folder, or weights {files.short(manifest['weights_sha256'])}"
                raise place.taken(target, f"weights {files.short(str(there))}", expected=wanted)
        files.replace_folder(work / "model", target)
    return Standalone(target, manifest, reused=False)


def _fill(checkpoint: Checkpoint, folder: Path) -> dict:
    digest = write(checkpoint, folder, cast=True)
    types = {tensor.base.dtype for tensor in checkpoint.tensors.values()}
    dtype = _TYPES.get(next(iter(types))) if len(types) == 1 else None
    if dtype:
        files.write_json(folder / CONFIG, checkpoint.config | {"dtype": dtype})
    sources = [(checkpoint.tokenizer_folder, (artifact.TOKENIZER, artifact.CONFIG, TEMPLATE))]
    sources.append((checkpoint.folder, ("generation_config.json",)))
    for beside, names in sources:
        for name in names:
            if (beside / name).is_file():
                (folder / name).write_bytes((beside / name).read_bytes())
    origin = checkpoint.origin
    body = {
        "run": None, "step": None, "method": "merged", "base": None, "recipe_sha256": None,
        "dataset": origin["dataset"],
        "tokenizer": origin["tokenizer"], "weights_sha256": digest, "tool": version.tool(),
        "merged_from": {key: origin[key] for key in _MERGED_FROM},
        "adapter_tensors": checkpoint.adapter.counts,
    }  # fmt: skip
    known = {_WEIGHTS: {"sha256": digest, "bytes": (folder / _WEIGHTS).stat().st_size}}
    return files.write_manifest(folder, KIND, body, known=known)
