"""What the images are built on: the pins of `docker/bases.env`, and a base asked for by name.

A pin is a registry digest or the id of a local image. Anything else moves under one's feet, so an unpinned base is
taken only when it is named on the command line, and the image says so in a label.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from training.containers import engine
from training.core.errors import IntegrityError, UserError
from training.core.paths import REPOSITORY
from training.llamacpp.pin import Pin

PIN_FILE = REPOSITORY / "docker" / "bases.env"
OPTIONS = {"PYTHON": "--base", "LLAMA_CUDA": "--server-base"}
_DIGEST = re.compile(r"([^\s@]+@)?sha256:[0-9a-f]{64}")
_VERSION, _REVISION = "org.opencontainers.image.version", "org.opencontainers.image.revision"


@dataclass(frozen=True)
class Base:
    """A base by its reference; `pinned` where the reference can only ever mean these bytes."""

    reference: str
    pinned: bool

    @property
    def in_dockerfile(self) -> str:
        """The reference as FROM takes it: BuildKit knows no bare image id, so that gets a name holding it."""
        if not self.reference.startswith("sha256:"):
            return self.reference
        name = f"trainyard-base:{self.reference[7:19]}"
        engine.run(["tag", self.reference, name], "naming the base", next_command=f"docker image inspect {name}")
        return name


def load(path: Path = PIN_FILE) -> dict[str, tuple[str, str]]:
    """The pin and the command that prints it, by name; an empty pin has not been fetched."""
    pins, command = {}, ""
    for line in path.read_text().splitlines():
        if line.startswith("#   "):
            command = line[4:].strip()
        elif "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            pins[name.strip()] = (value.strip(), command)
    if set(pins) != set(OPTIONS):
        raise IntegrityError("the bases are damaged", where=path, found=sorted(pins), expected=sorted(OPTIONS))
    return pins


def choose(name: str, named: str | None, path: Path = PIN_FILE) -> Base:
    """The base to build on: the one named on the command line, else the pin. Raises UserError where neither is."""
    if named:
        return Base(named, pinned=bool(_DIGEST.fullmatch(named)))
    pin, command = load(path)[name]
    if not pin:
        raise UserError(
            f"the base {name} is not pinned",
            where=path,
            found=f"{name}= is empty",
            expected=f"the value that the next command prints, or a base of your own by {OPTIONS[name]}, pinned or not",
            next_command=command,
        )
    if not _DIGEST.fullmatch(pin):
        raise UserError(
            f"the base {name} is pinned to a name that can move", where=path, found=pin,
            expected="NAME@sha256:... or sha256:...", next_command=command,
        )  # fmt: skip
    return Base(pin, pinned=True)


def require_revision(image: dict, pin: Pin, where: str) -> None:
    """Hold an official server image's labels against the pin. Raises IntegrityError where it is another build."""
    found = engine.labels(image)
    if found.get(_VERSION) != pin.build or found.get(_REVISION) != pin.commit:
        raise IntegrityError(
            "the server's base is another llama.cpp than the pinned one",
            where=where,
            found=f"{found.get(_VERSION)} {found.get(_REVISION)}",
            expected=f"{pin.build} {pin.commit}",
            next_command=load()["LLAMA_CUDA"][1],
        )
