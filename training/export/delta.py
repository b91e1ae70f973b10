"""An adapter as one file to hand on: a zip of its factors, its settings and a manifest, without any path of a machine.

Owns what may be in such a file. Import takes three names and no other, looks at sizes before it unpacks a byte, checks
the header of every tensor, and refuses a base that is not here under the very hash that the adapter was trained on.
The same adapter, with the same known of it, gives the same bytes.
"""

import contextlib
import hashlib
import json
import shutil
import zipfile
from collections.abc import Sequence
from pathlib import Path

from training.core import files, paths, version
from training.core.errors import IntegrityError, UserError
from training.core.units import format_bytes
from training.export import adapter as adapters
from training.export import checks, place
from training.export.checkpoint import DELTA, Checkpoint, verified
from training.recipe import bases
from training.runs.folder import SUMMARY_FILE, RunFolder

NAMES = (adapters.SETTINGS, adapters.WEIGHTS, files.MANIFEST)
_MAX_BYTES = 16 << 30
_MAX_TEXT_BYTES = 1 << 20
_CHUNK_BYTES = 4 << 20
_KEPT = (
    "peft_type", "task_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "lora_dropout", "target_modules",
    "exclude_modules", "layers_to_transform", "layers_pattern", "bias", "fan_in_fan_out", "use_rslora",
    "trainable_token_indices", "modules_to_save", "init_lora_weights", "inference_mode",
)  # fmt: skip
_NO_ZIP = (zipfile.BadZipFile, zipfile.LargeZipFile, EOFError, NotImplementedError, RuntimeError)
_DATE = (1980, 1, 1, 0, 0, 0)


def path_of(name: str) -> Path:
    """Where the delta of a name lies."""
    return place.folder_of(name) / f"{name}.delta.zip"


def export(
    checkpoint: Checkpoint, name: str, *, force: bool = False, scores: Sequence[dict] = ()
) -> tuple[Path, dict]:  # fmt: skip
    """Write an adapter as `$DATA_ROOT/models/trained/<name>/<name>.delta.zip`; returns its path and manifest.

    Args:
        scores: what base and adapter scored on the same papers, as `evaluation.kept` has it.

    An older file of the same adapter is replaced: the manifest has what is known of it by now.
    Raises UserError where the checkpoint is no adapter of a pinned base, or other bytes are in the way.
    """
    if checkpoint.adapter is None or checkpoint.origin["base"]["name"] not in bases.load():
        raise UserError(
            "only an adapter of a pinned base can be handed on", where=checkpoint.folder,
            found="a whole model" if checkpoint.adapter is None else checkpoint.origin["base"]["name"],
            expected=f"an adapter of one of {', '.join(bases.load())}",
        )  # fmt: skip
    checks.check_weights(checkpoint)
    target, settings = path_of(name), _settings(checkpoint)
    manifest = _manifest(checkpoint, name, settings, list(scores))
    with place.hold(name), files.scratch_folder(target.parent) as work:
        made = work / target.name
        _write(made, checkpoint.adapter.folder / adapters.WEIGHTS, settings, manifest)
        if target.exists() and not force and not _is_of(target, manifest):
            raise place.taken(target, "other bytes")
        files.fsync_path(made)
        made.replace(target)
    files.fsync_path(target.parent)
    return target, manifest


def _is_of(archive: Path, manifest: dict) -> bool:
    """Whether a file holds the same adapter, whatever else its manifest says."""
    try:
        with zipfile.ZipFile(archive) as opened:
            return files.parse_json(opened.read(files.MANIFEST))["files"] == manifest["files"]
    except (OSError, ValueError, KeyError, TypeError, *_NO_ZIP):
        return False


def _settings(checkpoint: Checkpoint) -> bytes:
    """PEFT's settings by the keys that mean something, the base by its name: a foreign file may hold any path."""
    own = checkpoint.adapter.settings
    kept = {key: own[key] for key in _KEPT if own.get(key) is not None}
    return _text(kept | {"base_model_name_or_path": checkpoint.origin["base"]["name"]})


def _text(value: dict) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False, sort_keys=True, allow_nan=False) + "\n").encode()


def _manifest(checkpoint: Checkpoint, name: str, settings: bytes, scores: list[dict]) -> dict:
    origin, own = checkpoint.origin, checkpoint.adapter.settings
    weights_file = checkpoint.adapter.folder / adapters.WEIGHTS
    return {
        "schema": 1, "kind": DELTA, "name": name, "base": origin["base"], "method": origin["method"],
        "rank": own["r"], "alpha": own["lora_alpha"], "dropout": own.get("lora_dropout", 0.0),
        "targets": own.get("target_modules"), "run": origin["run"], "step": origin["step"],
        "dataset": origin["dataset"], "tokenizer": origin["tokenizer"], "recipe_sha256": origin["recipe_sha256"],
        "losses": _losses(origin["run"]), "scores": scores, "parity": _parity(origin["weights_sha256"]),
        "tool": version.tool(),
        "files": {
            adapters.SETTINGS: {"sha256": hashlib.sha256(settings).hexdigest(), "bytes": len(settings)},
            adapters.WEIGHTS: files.file_record(weights_file),
        },
    }  # fmt: skip


def _parity(weights_sha256: str) -> list[dict]:
    """What the files that were exported of these weights, and lie here, are off them."""
    found = []
    for path in sorted(paths.roots().trained.glob("*/*.manifest.json")):
        with contextlib.suppress(IntegrityError):  # what is damaged is no proof
            found.append(files.read_json(path))
    return [
        {key: one[key] for key in ("kind", "quant_type", "sha256", "parity")}
        for one in found if one.get("weights_sha256") == weights_sha256 and one.get("parity")
    ]  # fmt: skip


def _losses(run: str | None) -> dict | None:
    """The losses of the run's summary; None where the run is not on this machine."""
    folder = run and RunFolder(paths.roots().runs / run)
    if not folder or not (folder.path / SUMMARY_FILE).is_file():
        return None
    found = folder.summary()
    return {key: value for key, value in found.items() if isinstance(value, int | float) and "loss" in key} or None


def _write(made: Path, weights_file: Path, settings: bytes, manifest: dict) -> None:
    with zipfile.ZipFile(made, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for name, data in ((files.MANIFEST, _text(manifest)), (adapters.SETTINGS, settings)):
            archive.writestr(zipfile.ZipInfo(name, _DATE), data)
        info = zipfile.ZipInfo(adapters.WEIGHTS, _DATE)
        info.file_size = weights_file.stat().st_size
        with open(weights_file, "rb") as source, archive.open(info, "w", force_zip64=True) as target:
            shutil.copyfileobj(source, target, _CHUNK_BYTES)


# ---- import


def load(archive: Path, name: str | None = None) -> tuple[Path, dict]:
    """Unpack a delta into `$DATA_ROOT/models/trained/<name>/<name>-delta/` and open it; returns folder and manifest.

    Raises IntegrityError where the file holds anything else than it should, UserError where its base is not known.
    """
    try:
        with zipfile.ZipFile(archive) as opened:
            entries = _entries(archive, opened)
            manifest = _read_manifest(archive, opened)
            name = name or manifest["name"]
            target = place.folder_of(name) / f"{name}-delta"
            files.require_space(target, sum(entry.file_size for entry in entries), "the delta")
            with place.hold(name), files.scratch_folder(target.parent) as work:
                (work / "delta").mkdir()
                for entry in entries:
                    _unpack(opened, entry, work / "delta" / entry.filename)
                _check(archive, work / "delta", manifest)
                _publish(work, target, manifest)
    except _NO_ZIP as error:
        if isinstance(error, RecursionError):
            raise
        raise IntegrityError("not a delta's zip", where=archive, found=error, expected=", ".join(NAMES)) from error
    return target, manifest


def _entries(archive: Path, opened: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    """The entries, their names and sizes judged before anything is read."""
    entries = opened.infolist()
    names = [entry.filename for entry in entries]
    if sorted(names) != sorted(NAMES) or any(entry.is_dir() or _is_link(entry) for entry in entries):
        raise IntegrityError(
            "a delta holds other files than it may", where=archive, found=", ".join(names[:6]) or "nothing",
            expected=", ".join(NAMES),
        )  # fmt: skip
    for entry in entries:
        limit = _MAX_BYTES if entry.filename == adapters.WEIGHTS else _MAX_TEXT_BYTES
        if entry.file_size > limit or entry.file_size > 100 * max(entry.compress_size, 1):
            raise IntegrityError(
                "an entry of the delta is larger than it may be", where=f"{archive}: {entry.filename}",
                found=f"{format_bytes(entry.file_size)} packed in {format_bytes(entry.compress_size)}",
                expected=f"at most {format_bytes(limit)}, hardly packed",
            )  # fmt: skip
    return entries


def _is_link(entry: zipfile.ZipInfo) -> bool:
    return (entry.external_attr >> 16) & 0o170000 not in (0, 0o100000)


def _read_manifest(archive: Path, opened: zipfile.ZipFile) -> dict:
    try:
        manifest = files.parse_json(opened.read(files.MANIFEST))
        well_formed = manifest["kind"] == DELTA and {*manifest["files"]} == {*NAMES} - {files.MANIFEST}
        records = all({*record} == {"sha256", "bytes"} for record in manifest["files"].values())
        wrong = [key for key, holds in _claims(manifest).items() if not holds]
        base = manifest["base"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise IntegrityError("the delta's manifest is damaged", where=archive, found=repr(error)[:200]) from error
    if not (well_formed and records):
        raise IntegrityError("the delta's manifest is another thing's", where=archive, found=manifest["kind"])
    if wrong:
        raise IntegrityError(
            "the delta's manifest is damaged", where=f"{archive}: manifest.json: {wrong[0]}",
            found=repr(manifest.get(wrong[0]))[:80], expected="what an export of a delta writes there",
        )  # fmt: skip
    known = bases.load()
    if base["name"] not in known:
        raise UserError(
            "the delta's base is not known here", where=archive, found=base["name"],
            expected=f"one of recipes/bases.yaml, pinned and fetched: {', '.join(known)}",
        )  # fmt: skip
    known[base["name"]].require_folder()
    own = files.read_manifest(known[base["name"]].folder, bases.KIND)["weights_sha256"]
    if own != base["weights_sha256"]:
        raise UserError(
            "the delta was trained on other weights of its base", where=archive,
            found=files.short(base["weights_sha256"]), expected=f"{base['name']}, {files.short(own)}",
        )  # fmt: skip
    return manifest


def _claims(manifest: dict) -> dict[str, bool]:
    """Whether what is read of a manifest later on has its form: each claim by its key."""

    def texts(part: object, *keys: str) -> bool:
        return isinstance(part, dict) and all(isinstance(part.get(key), str) for key in keys)

    def plain(name: object) -> bool:
        return isinstance(name, str) and Path(name).name == name

    run, step, dataset, tokenizer = (manifest.get(key) for key in ("run", "step", "dataset", "tokenizer"))
    return {
        "name": plain(manifest.get("name")),
        "base": texts(manifest.get("base"), "name", "weights_sha256"),
        "run": run is None or plain(run),
        "step": step is None or (type(step) is int and step >= 0),
        "method": isinstance(manifest.get("method"), str),
        "recipe_sha256": manifest.get("recipe_sha256") is None or isinstance(manifest["recipe_sha256"], str),
        "dataset": dataset is None or (texts(dataset, "name", "hash") and plain(dataset["name"])),
        "tokenizer": texts(tokenizer, "name", "hash", "pre_tokenizer") and plain(tokenizer["name"])
        and tokenizer.get("add_bos") in (None, True, False),
    }  # fmt: skip


def _unpack(opened: zipfile.ZipFile, entry: zipfile.ZipInfo, target: Path) -> None:
    """Unpack one entry, never more of it than it claims."""
    left = entry.file_size
    with opened.open(entry) as source, open(target, "wb") as output:
        while chunk := source.read(min(_CHUNK_BYTES, left + 1)):
            left -= len(chunk)
            if left < 0:
                raise zipfile.BadZipFile(f"{entry.filename} is larger than it claims")
            output.write(chunk)


def _check(archive: Path, folder: Path, manifest: dict) -> None:
    """Hold the unpacked files against the manifest, and the adapter against itself and its base."""
    _, not_finite = verified(folder, DELTA)
    opened = adapters.open_adapter(folder)
    for where, found in not_finite:
        raise IntegrityError("a weight of the delta is no number", where=f"{archive}: {where}", found=found)
    base = bases.find(manifest["base"]["name"]).folder
    Checkpoint(base, base, manifest, opened).tensors  # noqa: B018, raises where a tensor has no place


def _publish(work: Path, target: Path, manifest: dict) -> None:
    if target.exists():
        there = files.read_json(target / files.MANIFEST)
        if there != manifest:
            raise place.taken(target, str(there.get("name")), expected="a name that is free", forcible=False)
        return
    files.replace_folder(work / "delta", target)
