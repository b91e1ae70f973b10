"""The pinned llama.cpp: which revision, in which source distribution, with which hashes.

The pin is data of the export room (`training/export/llama_cpp_pin.txt`, `key: value` lines) and is read here alone.
`converter_sha256` stands for the files that are run in a conversion; it is checked at every use.
"""

from dataclasses import dataclass, fields
from pathlib import Path

from training.core import files
from training.core.errors import IntegrityError
from training.core.paths import REPOSITORY

PIN_FILE = REPOSITORY / "training" / "export" / "llama_cpp_pin.txt"
CONVERTER_PARTS = ("convert_hf_to_gguf.py", "convert_lora_to_gguf.py", "conversion", "gguf-py")
_COMMIT_DIGITS = 9


@dataclass(frozen=True)
class Pin:
    """One revision of llama.cpp and where its source is found."""

    commit: str
    build: str
    licence: str
    package: str
    version: str
    sdist: str
    sdist_sha256: str
    subtree: str
    converter_sha256: str

    @property
    def name(self) -> str:
        """`b11312-0c1e57098`, as llama.cpp's own tools print it."""
        return f"{self.build}-{self.commit[:_COMMIT_DIGITS]}"

    def to_json(self) -> dict:
        """The pin as manifests hold it."""
        return {"commit": self.commit, "build": self.build, "sdist": self.sdist, "sdist_sha256": self.sdist_sha256}


def load(path: Path = PIN_FILE) -> Pin:
    """Read a pin. Raises IntegrityError where a key is missing, unknown or twice there."""
    values: dict[str, str] = {}
    for line in path.read_text().splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        key, _, value = line.partition(":")
        if key.strip() in values:
            raise IntegrityError("a key stands twice in the pin", where=path, found=key.strip())
        values[key.strip()] = value.strip()
    expected = [field.name for field in fields(Pin)]
    if set(values) != set(expected) or not all(values.values()):
        raise IntegrityError(
            "the pin is damaged", where=path, found=", ".join(values), expected=f"each of {', '.join(expected)}, once"
        )
    return Pin(**values)


def converter_hash(folder: Path) -> str:
    """The hash of a converter: over the sorted relative paths and the sha256 of every file of its parts."""
    found = []
    for part in CONVERTER_PARTS:
        root = folder / part
        found += [root] if root.is_file() else [path for path in root.rglob("*") if path.is_file()]
    names = sorted(path.relative_to(folder).as_posix() for path in found)
    return files.sha256_json([[name, files.sha256_file(folder / name)] for name in names])
