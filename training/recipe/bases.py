"""The pinned base models: `recipes/bases.yaml`, read as strictly as a recipe.

A base is pinned by its source, its revision and the sha256 of every file. An entry without them is unpinned: it can be
planned by its `config`, and is refused for training. A fetched base lies in `$DATA_ROOT/models/bases/<name>/` as a
Hugging Face folder whose manifest names the pins that it was made of.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from training.core import files, paths
from training.core.errors import IntegrityError, Problems, UserError
from training.recipe.checking import violations
from training.recipe.reading import Origin, Reader, show
from training.recipe.strict_yaml import parse

FILE = paths.REPOSITORY / "recipes" / "bases.yaml"
KIND = "base"
FLOATING = ("latest", "main", "master", "head", "stable", "newest", "dev", "nightly")
_SCHEMA = Path(__file__).parent / "bases.schema.json"


@dataclass(frozen=True)
class Base:
    """One base model: where its bytes come from, and its shape in Hugging Face's words."""

    name: str
    source: str
    revision: str | None
    licence: str
    files: dict[str, str]  # name -> sha256
    config: dict

    @property
    def pinned(self) -> bool:
        return bool(self.revision and self.files)

    @property
    def folder(self) -> Path:
        """Where it lies, or would lie, once it is fetched."""
        return paths.roots().bases / self.name

    @property
    def is_fetched(self) -> bool:
        return (self.folder / files.MANIFEST).is_file()

    def require_folder(self) -> None:
        """Raise UserError where the base is not fetched."""
        if not self.is_fetched:
            raise UserError(
                "the base is not on this machine", where=self.folder, found="nothing",
                expected=f"a fetched {self.name}", next_command=f"make base-fetch BASE={self.name}",
            )  # fmt: skip

    def require(self, verify: Callable[[Path, str], dict] = files.verify_manifest) -> dict:
        """Verify every byte of the fetched base, by `verify` where it is read for more, and return its manifest.

        Raises UserError where it is not there, IntegrityError where it is not what is pinned.
        """
        self.require_folder()
        manifest = verify(self.folder, KIND)
        if manifest["pinned"] != self.files:
            raise IntegrityError(
                "the base was made of other files than are pinned", where=self.folder / files.MANIFEST,
                found=_told(manifest["pinned"]), expected=f"{_told(self.files)}, as {show(FILE)} has it",
                next_command=f"make base-fetch BASE={self.name}",
            )  # fmt: skip
        for name, digest in self.files.items():
            own = manifest["files"].get(Path(name).name)  # what a GGUF was made into has other names
            if own is not None and own["sha256"] != digest:
                raise IntegrityError(
                    "a file of the base is not the pinned one", where=self.folder / Path(name).name,
                    found=f"sha256 {files.short(own['sha256'])}", expected=f"sha256 {files.short(digest)}, as "
                    f"{show(FILE)} has it", next_command=f"make base-fetch BASE={self.name}",
                )  # fmt: skip
        return manifest


def load(path: Path | None = None) -> dict[str, Base]:
    """Read every base. Raises Problems with all that is wrong in the file."""
    path = path or FILE
    nodes, problems = parse(path.read_bytes(), show(path))
    schema = json.loads(_SCHEMA.read_text())
    reading = Reader(schema, lambda line: Origin("file", path, line)).read(nodes)
    where = {key: str(origin) for key, origin in reading.origins.items()}
    broken = violations(reading.values, schema, lambda key: where.get(key, f"{show(path)}: {key}"))
    problems += reading.problems + [error for key, error in broken.items() if key not in reading.bad_keys]
    for name, values in reading.values.items():
        if is_floating(values.get("revision") or ""):
            where_revision = where.get(f"{name}.revision", show(path))
            problems.append(
                UserError(
                    "a floating revision",
                    where=where_revision,
                    found=values["revision"],
                    expected="a commit or a version",
                )
            )
    if problems:
        raise Problems("the file of bases is wrong", problems)
    return {name: _base(name, values) for name, values in reading.values.items()}


def _base(name: str, values: dict) -> Base:
    return Base(
        name, values["source"], values.get("revision"), values["licence"], values.get("files", {}), values["config"]
    )  # fmt: skip


def write_pins(base: Base) -> None:
    """Write a base's revision and hashes into the file of bases, whose other lines and comments stay as they are."""
    lines = FILE.read_text().splitlines(keepends=True)
    first = next(i for i, line in enumerate(lines) if line.startswith(f"{base.name}:")) + 1
    last = next((i for i in range(first, len(lines)) if re.match(r"[^\s#]", lines[i])), len(lines))
    kept, inside = [], False
    for line in lines[first:last]:
        if re.match(r"  \S", line):
            inside = line.startswith(("  files:", "  revision:"))
        if not inside:
            kept.append(line)
    pins = [f"  revision: {json.dumps(base.revision)}\n", "  files:\n"]
    pins += [f"    {json.dumps(name)}: {digest}\n" for name, digest in base.files.items()]
    files.write_text(FILE, "".join([*lines[:first], *pins, *kept, *lines[last:]]))


def _told(hashes: dict[str, str]) -> str:
    return ", ".join(f"{name} {files.short(digest)}" for name, digest in hashes.items()) or "no file"


def is_floating(name: str) -> bool:
    """Whether a name or its last part (`org/model@main`, `model:latest`) moves with time."""
    last = name.replace("@", ":").rpartition(":")[2]
    return last.lower() in FLOATING


def find(name: str, where: object = None) -> Base:
    """The base of a name. Raises UserError with the nearest name where there is none, or where the name floats."""
    bases = load()
    if name in bases:
        return bases[name]
    near = difflib.get_close_matches(name, bases, 1, cutoff=0.4)
    expected = f"a name of {show(FILE)}: " + (f"perhaps {near[0]}" if near else ", ".join(bases))
    what = "a floating name is no base" if is_floating(name) else f"unknown base {name}"
    raise UserError(what, where=where, found=name, expected=expected)
