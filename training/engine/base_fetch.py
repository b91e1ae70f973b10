"""A pinned base brought to this machine: fetched, every file's hash checked, made a Hugging Face folder.

Owns `$DATA_ROOT/models/bases/<name>/`: what transformers reads, the tokenizer's manifest, and `manifest.json` last,
which names the pins that it was made of. Nothing that is not pinned stays, unless it was asked to be pinned.
"""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from training.calculator import shapes
from training.core import files, store, version
from training.core.errors import IntegrityError, UserError
from training.engine import base_source, gguf_folder
from training.recipe import bases
from training.recipe.bases import KIND, Base
from training.tokenizer import artifact, huggingface

_SOURCE = ".source"


@dataclass(frozen=True)
class Fetched:
    """A base that is on this machine now."""

    base: Base
    manifest: dict
    reused: bool


def fetch(name: str, *, given: Path | None = None, pin: bool = False) -> Fetched:
    """Bring a base to this machine, or find it there.

    Args:
        given: a folder with the source's files, in place of the source.
        pin: write what is found (commit or version, and the sha256 of every file) into the file of bases.

    Raises UserError for a base without pins, IntegrityError where a file is not the pinned one, MachineError.
    """
    base = bases.find(name)
    if pin:
        base = replace(base, files={})
    elif not base.pinned:
        raise UserError(
            "the base has no pins", where=bases.FILE, found=f"{name} without a revision or hashes",
            expected="a commit or version, and the sha256 of every file",
            next_command=f"make base-fetch BASE={name} ARGS=--pin",
        )  # fmt: skip
    with store.exclusive(base.folder.parent, KIND):
        if not pin and store.reusable(base.folder, KIND):
            manifest = files.read_manifest(base.folder, KIND)
            if manifest["pinned"] == base.files:  # else it was made of what was pinned before
                return Fetched(base, manifest, True)
        files.require_space(base.folder, 3 * 4 * _num_parameters(base), f"the base {name}")
        with files.atomic_folder(base.folder) as folder:
            base, manifest = _fill(folder, base, given)
            shutil.rmtree(base.folder, ignore_errors=True)  # the old one stays until the new one is whole
        if pin:
            bases.write_pins(base)
    return Fetched(base, manifest, False)


def _num_parameters(base: Base) -> int:
    try:
        return shapes.from_config(base.config, base.name).parameters
    except UserError:  # a shape that the formula does not know
        return 0


def _fill(folder: Path, base: Base, given: Path | None) -> tuple[Base, dict]:
    """Fetch, check, convert and write the manifest; returns the base with its pins, and the manifest."""
    source = folder / _SOURCE
    source.mkdir()
    revision = base_source.obtain(base, source, given)
    found = {str(path.relative_to(source)): files.sha256_file(path) for path in _all_files(source)}
    base = _held_against_pins(base, revision, found)
    _make_folder(folder, source, list(found))
    shutil.rmtree(source)
    _require_shape(folder, base)
    tokenizer = huggingface.describe(folder) | {"name": base.name}
    files.write_json(folder / artifact.MANIFEST_IN_CHECKPOINT, tokenizer)
    weights = {path.name: files.file_record(path) for path in sorted(folder.glob("*.safetensors"))}
    body = {
        "name": base.name, "source": base.source, "revision": base.revision, "licence": base.licence,
        "pinned": base.files, "weights_sha256": _weights_sha256(weights),
        "tokenizer": {"name": base.name, "hash": tokenizer["hash"]}, "tool": version.tool(),
    }  # fmt: skip
    return base, files.write_manifest(folder, KIND, body, known=weights)


def _all_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _held_against_pins(base: Base, revision: str, found: dict[str, str]) -> Base:
    if not base.files:
        return replace(base, revision=revision, files=found)
    wrong = [name for name, digest in base.files.items() if found[name] != digest]
    if wrong:
        raise IntegrityError(
            "a file of the base is not the pinned one", where=f"{base.source}: {wrong[0]}",
            found=f"sha256 {files.short(found[wrong[0]])}", expected=f"sha256 {files.short(base.files[wrong[0]])}",
        )  # fmt: skip
    return base


def _make_folder(folder: Path, source: Path, names: list[str]) -> None:
    """Lay out the folder: a GGUF is converted, everything else is taken as it is."""
    ggufs = [name for name in names if name.endswith(".gguf")]
    if len(ggufs) == 1:
        gguf_folder.convert(source / ggufs[0], folder)
        return
    for name in names:
        (source / name).rename(folder / Path(name).name)
    for name in ("config.json", artifact.TOKENIZER, artifact.CONFIG):
        if not (folder / name).is_file():
            raise UserError(
                "the base's files are no whole model", where=folder.name, found=f"no {name}",
                expected=f"config.json, safetensors, {artifact.TOKENIZER} and {artifact.CONFIG}, or one GGUF",
            )  # fmt: skip


def _require_shape(folder: Path, base: Base) -> None:
    """Hold the configuration against the one that plans are made by."""
    config = files.read_json(folder / "config.json")
    inner = config.get("text_config", config)
    wrong = [key for key, value in base.config.items() if key in inner and not _same(inner[key], value)]
    if wrong:
        raise UserError(
            "the base has another shape than it is planned by", where=f"bases.yaml: {base.name}.config.{wrong[0]}",
            found=base.config[wrong[0]], expected=inner[wrong[0]],
        )  # fmt: skip


def _same(one: object, other: object) -> bool:
    """Whether two values are one; a GGUF keeps numbers in float32."""
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= 1e-6 * abs(other)
    return one == other


def _weights_sha256(weights: dict[str, dict]) -> str:
    return files.sha256_together({name: record["sha256"] for name, record in weights.items()})
