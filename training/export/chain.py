"""The chain of hashes walked back: GGUF, manifest, weights, base, recipe, run, dataset, tokenizer.

Each link is `ok`, `broken` (bytes or claims differ) or `absent` (not on this machine, or never named). What a link
claims of those before it comes from the manifest where the walk began. Nothing is written and nothing is repaired.
"""

import contextlib
import difflib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from training.core import files, paths, store
from training.core.errors import IntegrityError, UserError
from training.data import dataset as datasets
from training.export import adapter as adapters
from training.export import checkpoint as checkpoints
from training.export import manifest as manifests
from training.recipe import bases
from training.recipe import load as recipes
from training.runs.folder import RUN_FILE, RunFolder, step_name
from training.tokenizer import artifact

_WEIGHTS = ("model.safetensors", adapters.WEIGHTS)
OK, BROKEN, ABSENT = "ok", "broken", "absent"
_CLAIMS = ("run", "step", "weights_sha256", "recipe_sha256", "dataset", "tokenizer", "base", "merged_from")


@dataclass(frozen=True)
class Link:
    """One link: its name, its state, the hash that is right or the reason why not, and what is next if broken."""

    name: str
    state: str
    detail: str
    next_command: str | None = None


class _AbsentError(Exception):
    """The thing a link stands for is not here."""


def walk(start: str) -> Iterator[Link]:
    """Yield the links back from a GGUF, a checkpoint, a run (its best checkpoint), a base, a dataset or a tokenizer.

    Raises UserError where there is nothing of that name.
    """
    if start.endswith(".gguf"):
        yield from _from_gguf(paths.model_file(start))
        return
    folder = _folder(start)
    kind = files.read_json(folder / files.MANIFEST).get("kind") if (folder / files.MANIFEST).is_file() else None
    if kind == datasets.KIND:
        look = f"make data-verify DATASET={store.reference(folder)}"
        yield _link("dataset", lambda: _verified(folder, datasets.KIND)["hash"], look)
    elif kind == artifact.KIND:
        yield _link("tokenizer", lambda: _tokenizer_hash(folder))
    elif kind == bases.KIND:
        claims = files.read_json(folder / files.MANIFEST)
        yield _base_link(claims)
        yield _link("tokenizer", lambda: _tokenizer(claims["tokenizer"]))
    else:
        yield from _from_checkpoint(folder)


def _folder(start: str) -> Path:
    """The folder that is meant; of a run the best checkpoint, else the latest, damaged or not."""
    path = paths.host_path(start)
    if path.is_dir() and not (path / RUN_FILE).is_file():
        return path.absolute()
    roots = paths.roots()
    found = store.find(start, roots.datasets) or store.find(start, roots.tokenizers)
    if found is not None:
        return found
    if base := bases.load().get(start):
        base.require_folder()
        return base.folder
    if start != "latest" and not any((one / RUN_FILE).is_file() for one in (path, roots.runs / start)):
        raise UserError(
            "nothing of that name to verify", where=roots.data, found=start,
            expected="a GGUF file under /app/models, a run, a checkpoint's folder, a base, a data set, a tokenizer"
            + _near(start),
            next_command="make runs",
        )  # fmt: skip
    run = RunFolder.open(start)
    for pointer in ("best", "latest"):
        if (run.checkpoints / f"{pointer}.json").is_file():
            return run.checkpoints / files.read_json(run.checkpoints / f"{pointer}.json")["folder"]
    raise UserError("the run has no checkpoint yet", where=run.path, next_command=f"make resume RUN={run.id}")


def _near(start: str) -> str:
    """The names that a wrong one may have meant."""
    roots = paths.roots()
    ggufs = {str(paths.CONTAINER_MODELS / one.relative_to(roots.models)) for one in roots.models.rglob("*.gguf")}
    known = {Path(one).parent.name: one for one in ggufs} | {Path(one).stem: one for one in ggufs}
    named = [one for root in (roots.datasets, roots.tokenizers, roots.runs) for one in root.glob("[!.]*")]
    known |= {one.name: one.name for one in named} | {name: name for name in bases.load()}
    near = difflib.get_close_matches(Path(start.partition("@")[0]).name, known, 3, cutoff=0.6)
    return f"; perhaps {', '.join(dict.fromkeys(known[name] for name in near))}" if near else ""


def _from_gguf(gguf: Path) -> Iterator[Link]:
    claims: dict = {}
    yield (link := _link("manifest", lambda: _read_claims(gguf, claims)))
    if link.state != OK:
        return
    yield _link("GGUF", lambda: manifests.verify(gguf)["sha256"])
    yield from _links(claims)


def _read_claims(gguf: Path, claims: dict) -> str:
    read = manifests.read(gguf)
    claims |= {key: read.get(key) for key in _CLAIMS}
    return files.sha256_file(manifests.path_of(gguf))


def _from_checkpoint(folder: Path) -> Iterator[Link]:
    link = _link("weights", lambda: _manifest_of(folder, read=files.read_manifest)[0]["weights_sha256"])
    if link.state != OK:
        yield link
        return
    origin, _ = _manifest_of(folder, read=files.read_manifest)
    yield from _links({key: origin.get(key) for key in _CLAIMS}, folder)


def _manifest_of(folder: Path, read: Callable[[Path, str], dict]) -> tuple[dict, dict]:
    """What the manifest of a checkpoint, a merged folder or a delta claims, and its files' records."""
    named = files.read_json(folder / files.MANIFEST).get("kind")
    manifest = read(folder, checkpoints.DELTA if named == checkpoints.DELTA else checkpoints.KIND)
    return checkpoints.origin_of(manifest), manifest["files"]


def _links(claims: dict, folder: Path | None = None) -> Iterator[Link]:
    """The links of what the claims are of, its weights in `folder`, or where its run has them."""
    if claims.get("merged_from"):
        yield _link("merged weights", lambda: _weights(claims, folder))
        kept = {key: claims[key] for key in ("dataset", "tokenizer")}
        yield from _links({key: claims["merged_from"].get(key) for key in _CLAIMS} | kept)
        return
    is_base = claims["run"] is None and (claims["base"] or {}).get("weights_sha256") == claims["weights_sha256"]
    if not is_base:
        yield _link("weights", lambda: _weights(claims, folder))
    if claims["base"] is not None:
        yield _base_link(claims["base"])
    if not is_base:
        yield _link("recipe", lambda: _recipe(claims, folder))
        yield _link("run", lambda: _run(claims))
        look = f"make data-verify DATASET={store.reference_to(claims['dataset'])}" if claims["dataset"] else None
        yield _link("dataset", lambda: _dataset(claims["dataset"]), look)
    yield _link("tokenizer", lambda: _tokenizer(claims["tokenizer"]))


def _link(name: str, digest_of: Callable[[], str], next_command: str | None = None) -> Link:
    try:
        return Link(name, OK, files.short(digest_of()))
    except _AbsentError as reason:
        return Link(name, ABSENT, str(reason))
    except IntegrityError as error:
        parts = [
            error.what,
            error.where,
            error.found and f"found {error.found}",
            error.expected and f"expected {error.expected}",
        ]
        return Link(name, BROKEN, paths.for_people("; ".join(part for part in parts if part)), next_command)


def _base_link(claim: dict) -> Link:
    return _link("base", lambda: _base(claim), f"make base-fetch BASE={claim['name']}")


def _verified(folder: Path, kind: str) -> dict:
    return files.verify_manifest(folder, kind)


def _require_equal(what: str, where: object, found: object, expected: object) -> None:
    if found != expected:
        raise IntegrityError(f"another {what}", where=where, found=found, expected=expected)


def _checkpoint_of(claims: dict, folder: Path | None) -> Path:
    if folder is not None:
        return folder
    own = None if claims["run"] is None else _step_of(claims)
    if own is not None and own.is_dir():
        return own
    for made in (*paths.roots().trained.glob("[!.]*/*-merged"), *paths.roots().trained.glob("[!.]*/*-delta")):
        with contextlib.suppress(IntegrityError):
            if _manifest_of(made, read=files.read_manifest)[0]["weights_sha256"] == claims["weights_sha256"]:
                return made
    if own is None:
        raise _AbsentError("made of a folder that is not of this toolchain, or not where it was written")
    raise _AbsentError(f"no checkpoint {step_name(claims['step'])} of run {claims['run']} on this machine")


def _step_of(claims: dict) -> Path:
    return RunFolder(paths.roots().runs / claims["run"]).checkpoints / step_name(claims["step"])


def _weights(claims: dict, folder: Path | None) -> str:
    folder = _checkpoint_of(claims, folder)
    found, records = _manifest_of(folder, read=_verified)
    for key in ("weights_sha256", "recipe_sha256", "run", "step", "dataset"):
        _require_equal(key, folder / files.MANIFEST, found.get(key), claims[key])
    _require_equal("tokenizer", folder, (found.get("tokenizer") or {}).get("hash"), claims["tokenizer"]["hash"])
    for weights in (folder / name for name in _WEIGHTS if name in records):
        _require_equal("weights_sha256", weights, records[weights.name]["sha256"], claims["weights_sha256"])
    return claims["weights_sha256"]


def _base(claim: dict) -> str:
    known = bases.load().get(claim["name"])
    if known is None or not known.is_fetched:
        raise _AbsentError(f"the base {claim['name']} is not on this machine")
    found = known.require()["weights_sha256"]
    _require_equal("base", known.folder, found, claim["weights_sha256"])
    return found


def _recipe(claims: dict, folder: Path | None) -> str:
    """A merged folder and a delta keep none: theirs is in the run's checkpoint."""
    path = _checkpoint_of(claims, folder) / "recipe.json"
    if not path.is_file() and (claims["run"] is None or not _step_of(claims).is_dir()):
        raise _AbsentError("no recipe is named, or the run's checkpoint is not on this machine")
    path = path if path.is_file() else _step_of(claims) / "recipe.json"
    _require_equal("recipe", path, files.sha256_json(files.read_json(path)), claims["recipe_sha256"])
    return claims["recipe_sha256"]


def _run(claims: dict) -> str:
    if claims["run"] is None:
        raise _AbsentError("no run is named")
    run = RunFolder(paths.roots().runs / claims["run"])
    if not run.path.is_dir():
        raise _AbsentError(f"run {claims['run']} is not on this machine")
    record = run.record()
    for key in ("recipe_sha256", "dataset"):
        _require_equal(key, run.path / RUN_FILE, record.get(key), claims[key])
    named = (record.get("tokenizer") or {}).get("hash")
    _require_equal("tokenizer", run.path / RUN_FILE, named, claims["tokenizer"]["hash"])
    kept = run.path / "recipe.yaml"
    if kept.is_file():
        _require_equal("recipe", kept, _kept_recipe_hash(kept), claims["recipe_sha256"])
    _require_equal("run id", run.path / RUN_FILE, record.get("id"), claims["run"])
    return files.sha256_json(record)


def _kept_recipe_hash(path: Path) -> str:
    try:
        return recipes.load(path).sha256
    except UserError as error:
        raise IntegrityError("the run's recipe cannot be read", where=path, found=error.what) from error


def _dataset(claim: dict | None) -> str:
    if claim is None:
        raise _AbsentError("no dataset is named")
    folder = _resolved(claim, datasets.resolve)
    _require_equal("dataset", folder / files.MANIFEST, _verified(folder, datasets.KIND)["hash"], claim["hash"])
    return claim["hash"]


def _tokenizer(claim: dict) -> str:
    """Of an artifact, or of the base that brings its own."""
    folder = _resolved(claim, artifact.resolve)
    _require_equal("tokenizer", folder / files.MANIFEST, _tokenizer_hash(folder), claim["hash"])
    return claim["hash"]


def _resolved(claim: dict, resolve: Callable[[str], Path]) -> Path:
    reference = store.reference_to(claim)
    try:
        return resolve(reference)
    except UserError:
        raise _AbsentError(f"{reference} is not on this machine") from None


def _tokenizer_hash(folder: Path) -> str:
    """Hash the tokenizer's own files; those of a base's folder that are none of them are the link base's."""
    records = files.read_json(folder / files.MANIFEST)["files"]
    for name in artifact.FILES:
        if name in records:
            files.verify_file(folder / name, records[name])
    return artifact.load(folder).hash
