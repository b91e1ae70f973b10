"""Where everything lies: the roots of the contract, and the two spellings of a model's path.

`DATA_ROOT` comes from the environment, else from `.env` beside the Makefile, else it is `./data` there.
`TRAINYARD_CACHE` is the machine's, not a checkout's. A path that leaves its root after resolving is refused.
"""

import os
import re
import shlex
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from training.core.errors import UserError

REPOSITORY = Path(__file__).resolve().parents[2]
CONTAINER_MODELS = Path("/app/models")


@dataclass(frozen=True)
class Roots:
    """The folders of the contract; none is created by asking for it."""

    data: Path
    cache: Path

    @property
    def models(self) -> Path:
        return self.data / "models"

    @property
    def trained(self) -> Path:
        return self.models / "trained"

    @property
    def bases(self) -> Path:
        return self.models / "bases"

    @property
    def datasets(self) -> Path:
        return self.data / "training" / "datasets"

    @property
    def tokenizers(self) -> Path:
        return self.data / "training" / "tokenizers"

    @property
    def runs(self) -> Path:
        return self.data / "training" / "runs"

    @property
    def serving(self) -> Path:
        return self.data / "serving"


@cache
def dot_env(path: Path = REPOSITORY / ".env") -> dict[str, str]:
    """The `KEY=VALUE` lines of `.env`, which is read and never written."""
    if not path.is_file():
        return {}
    lines = (line.strip().removeprefix("export ") for line in path.read_text(errors="replace").splitlines())
    pairs = (line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))
    return {key.strip(): re.sub(r"\s#.*$", "", value).strip().strip("\"'") for key, value in pairs}


def setting(name: str, default: str) -> str:
    """A setting of the environment, else of `.env`, else the default. An empty value counts as absent."""
    return os.environ.get(name) or dot_env().get(name) or default


def roots() -> Roots:
    """The roots as the environment has them now."""
    data = Path(setting("DATA_ROOT", str(REPOSITORY / "data"))).expanduser()
    cache_folder = Path(setting("TRAINYARD_CACHE", "~/.cache/trainyard")).expanduser()
    return Roots(data=data.absolute(), cache=cache_folder.absolute())


def inside(root: Path, path: Path, what: str) -> Path:
    """Resolve `path` (symlinks, parent steps) and return it. Raises UserError where it leaves `root`."""
    resolved, resolved_root = path.resolve(), root.resolve()
    if not resolved.is_relative_to(resolved_root):
        raise UserError(
            f"{what} lies outside its root", where=path, found=resolved, expected=f"a path under {root}",
            next_command=f"cp {shlex.quote(str(resolved))} {shlex.quote(str(root))}/",
        )  # fmt: skip
    return resolved


def host_path(text: str) -> Path:
    """The place here of a path that may be a container's. Raises UserError where such a one leaves its root."""
    path = Path(text)
    if path.is_relative_to(CONTAINER_MODELS):
        return inside(roots().models, roots().models / path.relative_to(CONTAINER_MODELS), "the model")
    return path


def model_path(text: str) -> Path:
    """The host's file for a model named by host path or by container path (`/app/models/...`).

    Raises UserError where it leaves `$DATA_ROOT/models`, or where a path elsewhere leads nowhere.
    """
    path = host_path(text)
    if not os.path.lexists(path) and not path.absolute().is_relative_to(roots().models.resolve()):
        raise _no_model(path)
    return inside(roots().models, path, "the model")


def model_file(text: str) -> Path:
    """The host's file of a model that is there. Raises UserError listing what there is, or as `model_path` does."""
    path = model_path(text)
    if not path.is_file():
        raise _no_model(path)
    return path


def _no_model(path: Path) -> UserError:
    there = [str(CONTAINER_MODELS / one.relative_to(roots().models)) for one in sorted(roots().models.rglob("*.gguf"))]
    return UserError(
        "no such model file", where=path,
        found="a folder" if path.is_dir() else f"nothing; there are: {', '.join(there[:8]) or 'none yet'}",
        expected="a .gguf file under $DATA_ROOT/models, by its host path or as /app/models/...",
        next_command="make export-gguf CHECKPOINT=latest",
    )  # fmt: skip


def gguf_manifest(gguf: Path) -> Path:
    """Where a GGUF's manifest lies: `tiny-Q8_0.manifest.json` of `tiny-Q8_0.gguf`."""
    return gguf.with_name(gguf.name.removesuffix(".gguf") + ".manifest.json")


def container_path(path: Path) -> Path:
    """The name of a host's model file inside a container."""
    return CONTAINER_MODELS / path.resolve().relative_to(roots().models.resolve())


def for_people(text: object) -> str:
    """A path or text without the home folder or the data root's place, as reports may show it and a shell take it."""
    named = [(str(roots().data), "$DATA_ROOT")] if os.environ.get("DATA_ROOT") else []
    places = [*named, (str(REPOSITORY), "."), (str(Path.home()), "~")]
    result = str(text)
    for place, name in places:
        if place != "/":
            result = re.sub(re.escape(place) + r"(?=/|$|[^\w.-])", lambda _, name=name: name, result)
    return result
