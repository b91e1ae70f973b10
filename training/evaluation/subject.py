"""What is measured: a checkpoint of any method, a pinned base, a Hugging Face folder, or a GGUF file.

Owns what a reference means and which hashes tell the model; loading is `loading`'s and `served`'s. Bytes are verified
where a manifest names them. It imports no torch.
"""

from dataclasses import dataclass
from pathlib import Path

from training.core import files, paths, store
from training.core.errors import IntegrityError, UserError
from training.recipe import bases
from training.recipe.load import Resolved
from training.runs.folder import RUN_FILE, resolve_checkpoint, step_name
from training.tokenizer import artifact

CONFIG = "config.json"
CHECKPOINT, BASE, FOLDER, GGUF = "checkpoint", "base", "folder", "gguf"


@dataclass(frozen=True)
class Subject:
    """A model to measure.

    Args:
        label: how people are told of it.
        path: the folder, or the GGUF file.
        sha256: of its weights; of several files, over their names and hashes; of a GGUF, the file's.
        origin: what its manifest says of where it came from.
        resolved: the recipe that a checkpoint was trained by.
    """

    form: str
    label: str
    path: Path
    sha256: str
    tokenizer: artifact.Tokenizer
    origin: dict
    resolved: Resolved | None = None

    @property
    def run(self) -> Path | None:
        """The run's folder of a checkpoint that lies in one."""
        folder = self.path.absolute().parent.parent
        return folder if self.form == CHECKPOINT and (folder / RUN_FILE).is_file() else None

    @property
    def dataset(self) -> str | None:
        """The data set that it was trained on, `name@hash`, where its manifest names one."""
        named = self.origin.get("dataset")
        return named and store.reference_to(named)

    @property
    def quant_type(self) -> str | None:
        return self.origin.get("quant_type")

    def identity(self) -> dict:
        """Which model it is: its own weights, and the base that an adapter stands beside."""
        base = self.origin.get("base") or {}
        return {"sha256": self.sha256, "base_sha256": base.get("weights_sha256") if self.form == CHECKPOINT else None}

    def to_json(self) -> dict:
        """The model as records show it."""
        kept = {key: self.origin.get(key) for key in ("run", "step", "method", "quant_type")}
        return {"form": self.form, "label": self.label, "path": paths.for_people(self.path), **self.identity(), **kept}


def find(reference: str) -> Subject:
    """Find a model: a GGUF, a base's name, a Hugging Face folder, a step folder, or a run (its best checkpoint).

    Raises UserError where there is none, IntegrityError where its bytes are not what is written of them.
    """
    if reference.endswith(".gguf"):
        return _gguf(reference)
    if not Path(reference).exists() and reference in bases.load():
        return _base(bases.find(reference))
    path = Path(reference)
    if (path / CONFIG).is_file() and not (path / files.MANIFEST).is_file():
        return _folder(path.absolute())
    if (path / files.MANIFEST).is_file() and files.read_json(path / files.MANIFEST).get("kind") == bases.KIND:
        return _base(bases.find(path.resolve().name))
    return _checkpoint(resolve_checkpoint(reference).absolute())


def _checkpoint(folder: Path) -> Subject:
    manifest = files.verify_manifest(folder, "checkpoint")
    resolved = Resolved.from_values(files.read_json(folder / "recipe.json"))
    run = manifest.get("run")
    label = f"{run} {step_name(manifest['step'])}" if run else folder.name
    return Subject(
        CHECKPOINT, label, folder, manifest["weights_sha256"], artifact.load(folder), manifest, resolved
    )  # fmt: skip


def _base(base: bases.Base) -> Subject:
    manifest = base.require()
    return Subject(
        BASE, base.name, base.folder, manifest["weights_sha256"], artifact.load(base.folder), {"base": manifest}
    )  # fmt: skip


def _folder(folder: Path) -> Subject:
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise UserError(
            "the folder holds no weights", where=folder, found="no .safetensors file",
            expected="a checkpoint, or a Hugging Face folder with safetensors", next_command="make runs",
        )  # fmt: skip
    sha256 = files.sha256_together({path.name: files.sha256_file(path) for path in weights})
    return Subject(FOLDER, folder.name, folder, sha256, artifact.of_folder(folder), {})


def _gguf(reference: str) -> Subject:
    path = paths.model_file(reference)
    beside = paths.gguf_manifest(path)
    manifest = files.read_json(beside) if beside.is_file() else {}
    if manifest:
        files.verify_file(path, manifest)
    sha256 = manifest.get("sha256") or files.sha256_file(path)
    quant = manifest.get("quant_type") or _quant_type(path)
    origin = {key: manifest.get(key) for key in ("run", "step", "dataset", "weights_sha256")}
    return Subject(GGUF, path.name, path, sha256, artifact.find(str(path)), origin | {"quant_type": quant})


def _quant_type(path: Path) -> str:
    from training.llamacpp import gguf_header

    try:
        return gguf_header.read(path).quant_type
    except (KeyError, ValueError) as error:
        raise IntegrityError("the file does not tell its quant type", where=path, found=error) from error
