"""The images: their names, how each is built, what their labels say, and whether one here is of this checkout.

Built with BuildKit's own docker driver, so that a base of this machine can be used. Only `system` (the distribution's
packages) sees a network; the images on top of it are built with `--network none` from the folder of wheels.
"""

import hashlib
import logging
import tempfile
from dataclasses import dataclass
from pathlib import Path

from training.containers import bases, context, engine, wheelhouse
from training.core import files, locks, paths, version
from training.core.errors import IntegrityError, MachineError
from training.core.report import make_command
from training.llamacpp import pin as pins

NAMES = ("train", "export", "llama-cpu", "llama-cuda")
_logger = logging.getLogger(__name__)
_LABEL = "trainyard"
_FROM_DISTRIBUTION = ("system", "compiler")
_WITH_PIN = ("export", "llama-cuda")
_WITH_WHEELS = ("train", "llama-cpu")
BUILD_COMMANDS = {
    "train": make_command("images", "--only", "train"),
    "export": "make export-build",
    "llama-cpu": make_command("images", "--only", "llama", "--backend", "cpu"),
    "llama-cuda": make_command("images", "--only", "llama", "--backend", "cuda"),
}


def checkout() -> str:
    """Eight digits for this checkout's place: two side by side share neither images nor containers."""
    return hashlib.sha256(str(paths.REPOSITORY).encode()).hexdigest()[:8]


def tag() -> str:
    """The tag of the images of this checkout: the setting TRAINYARD_TAG, else `checkout()`."""
    return paths.setting("TRAINYARD_TAG", checkout())


def reference(image: str) -> str:
    """An image's name with its tag, as compose.yaml has it: `trainyard-train:1a2b3c4d`."""
    return f"trainyard-{image}:{tag()}"


@dataclass(frozen=True)
class Plan:
    """What to build on and from; `wheels` and `extra_ca` are folders and files of the host."""

    lock: Path
    wheels: Path | None = None
    base: str | None = None
    server_base: str | None = None
    extra_ca: Path | None = None
    fresh: bool = False


def base_of(image: str, plan: Plan) -> bases.Base:
    """The base of an image. Raises UserError where it is not pinned and none is named."""
    if image == "llama-cuda":
        return bases.choose("LLAMA_CUDA", plan.server_base)
    return bases.choose("PYTHON", plan.base)


def build(image: str, plan: Plan) -> dict:
    """Build one image, with what it stands on, and return its record (`describe`)."""
    base = base_of(image, plan)
    with locks.hold(paths.roots().cache / "locks" / "images.lock", f"building {image}", resource="the image builder"):
        if image == "llama-cuda":
            bases.require_revision(_pulled(base), pins.load(), base.reference)
            _build(image, plan, base, {"BASE": base.in_dockerfile})
        else:
            _build(image, plan, base, _foundation(image, plan, base))
    return describe(image)


def _foundation(image: str, plan: Plan, base: bases.Base) -> dict[str, str]:
    """The build arguments that name what an image stands on; each of those is built first."""
    _build("system", plan, base, {"BASE": base.in_dockerfile})
    on_system = {"BASE": reference("system")}
    if image != "export":
        return on_system
    pin = pins.load()
    _build("train", plan, base, on_system)
    _build("compiler", plan, base, on_system)
    return {
        "BASE": reference("train"), "COMPILER": reference("compiler"), "PIN": pin.name,
        "BUILD_NUMBER": pin.build.removeprefix("b"), "BUILD_COMMIT": pin.commit[:9],
    }  # fmt: skip


def _pulled(base: bases.Base) -> dict:
    found = engine.inspect(base.reference)
    if found is None:
        engine.run(["pull", "--quiet", base.reference], "fetching the server's base")
        found = engine.inspect(base.reference)
    return found


def _build(image: str, plan: Plan, base: bases.Base, build_arguments: dict[str, str]) -> None:
    wheels = wheelhouse.ensure(plan.lock, plan.wheels) if image in _WITH_WHEELS else None
    network = "default" if image in _FROM_DISTRIBUTION else "none"
    command = ["buildx", "build", "--builder", "default", "--load", "--provenance=false", "--network", network]
    command += ["--tag", reference(image)]
    if image == "train":
        build_arguments = build_arguments | {"COMMIT": version.tool()["commit"] or ""}
    elif image.startswith("llama"):
        build_arguments = build_arguments | {"BACKEND": image.partition("-")[2]}
    for name, value in build_arguments.items():
        command += ["--build-arg", f"{name}={value}"]
    for name, value in _labels(image, plan, base).items():
        command += ["--label", f"{_LABEL}.{name}={value}"]
    if plan.extra_ca:
        command += ["--secret", f"id=extra_ca,src={plan.extra_ca}"]
    if plan.fresh and image not in _FROM_DISTRIBUTION:
        command.append("--no-cache")
    paths.roots().cache.mkdir(parents=True, exist_ok=True)
    _logger.info("building %s", reference(image))
    with tempfile.TemporaryDirectory(dir=paths.roots().cache, prefix="build-") as folder:
        context.lay_out(image, plan.lock, wheels, Path(folder))
        before = engine.inspect(reference(image))
        engine.run([*command, folder], f"building {reference(image)}", next_command="make doctor")
    if before and before["Id"] != engine.inspect(reference(image))["Id"]:
        engine.succeeds(["image", "rm", before["Id"]])  # the engine keeps it where a container or an image needs it


def _labels(image: str, plan: Plan, base: bases.Base) -> dict[str, str]:
    tool = version.tool()
    found = {
        "image": image,
        "tool": f"{tool['version']} {tool['commit'] or 'unknown'}",
        "sources": context.sources_sha256(image, plan.lock),
        "base": base.reference,
        "base-pinned": "yes" if base.pinned else "no",
    }
    if image in _WITH_PIN:
        found["llama.cpp"] = pins.load().name
    if image != "llama-cuda":
        found |= {"lock": plan.lock.stem, "lock-sha256": files.sha256_file(plan.lock)}
    return found


def describe(image: str) -> dict:
    """An image of this machine: `{"image", "reference", "id", "bytes", "labels"}`, labels without their prefix."""
    found = engine.inspect(reference(image))
    if found is None:
        raise MachineError(
            f"the image {reference(image)} is not on this machine", expected="an image built here",
            next_command=BUILD_COMMANDS[image],
        )  # fmt: skip
    own = {
        name.removeprefix(f"{_LABEL}."): value
        for name, value in engine.labels(found).items()
        if name.startswith(_LABEL)
    }
    return {"image": image, "reference": reference(image), "id": found["Id"], "bytes": found["Size"], "labels": own}


def require(image: str) -> dict:
    """The record of an image that is of this checkout and its pin. Raises MachineError or IntegrityError."""
    found = describe(image)
    own = found["labels"]
    expected = {"image": image} | ({"llama.cpp": pins.load().name} if image in _WITH_PIN else {})
    expected["sources"] = context.sources_sha256(image, wheelhouse.lock_path(own.get("lock", "cpu")))
    for name, value in expected.items():
        if own.get(name) != value:
            raise IntegrityError(
                f"the image {found['reference']} is not of this checkout: its label {_LABEL}.{name} differs",
                found=own.get(name), expected=value, next_command=BUILD_COMMANDS[image],
            )  # fmt: skip
    return found
