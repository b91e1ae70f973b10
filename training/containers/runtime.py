"""Where a command runs: on the host (`local`) or in an image (`docker`), by the setting RUNTIME=auto|local|docker.

`auto` takes `docker` where an engine answers and the image is here and of this checkout, else `local`; which one and
why is said on the first line. Inside, the same program runs with the same paths; its report block and its exit code are
the command's. Signals go to the program inside, which saves and ends as it would on the host.
"""

import os
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from training.containers import compose, engine, image
from training.core import paths, signals
from training.core.errors import TrainyardError, UserError
from training.core.log import say
from training.core.report import again

_CHOICES = ("auto", "local", "docker")


def setting() -> str:
    """The setting RUNTIME. Raises UserError."""
    chosen = paths.setting("RUNTIME", "auto")
    if chosen not in _CHOICES:
        raise UserError("no such runtime", where="RUNTIME", found=chosen, expected=", ".join(_CHOICES))
    return chosen


def choose(service: str) -> tuple[str, str]:
    """The runtime, `local` or `docker`, and why. Raises what stands in the way where `docker` was asked for."""
    asked = setting()
    if asked == "local":
        return "local", "asked for"
    if asked == "auto" and shutil.which("docker") is None:
        return "local", "no Docker here"
    try:
        engine.require_engine()
        engine.require_plugin("compose")
        found = image.require(compose.image_of(service))
        if uses_gpu(found):
            engine.require_gpu()
    except TrainyardError as error:
        if asked == "docker":
            raise
        return "local", error.what
    return "docker", found["reference"]


def uses_gpu(record: dict) -> bool:
    """Whether an image is made for a GPU."""
    return record["labels"].get("lock") == "cuda" or record["image"] == "llama-cuda"


def run(service: str, argv: Sequence[str]) -> int | None:
    """Run a command line in a service's container and return the exit code; None where it is to run on the host."""
    if setting() == "local":
        return None
    runtime, why = choose(service)
    if runtime == "local":
        say(f"runtime local, without a container: {why}")
        return None
    say(f"runtime docker: {why}")
    for folder in (paths.roots().models, paths.roots().cache, paths.REPOSITORY / "logs"):
        folder.mkdir(parents=True, exist_ok=True)  # the engine would make them as root
    _require_visible(argv)
    gpu = uses_gpu(image.describe(compose.image_of(service)))
    name = f"{compose.project()}-{service}-{os.getpid()}"
    command = compose.arguments("run", "--rm", "--no-deps", "-T", "--name", name, "--workdir", str(_workdir()), gpu=gpu)
    environment = os.environ | compose.environment()
    process = subprocess.Popen(["docker", *command, service, *argv], env=environment, start_new_session=True)
    with _signals_to(name, process):
        return process.wait()


def _workdir() -> Path:
    here = Path.cwd()
    return here if here.is_relative_to(paths.REPOSITORY) else paths.REPOSITORY


def _require_visible(argv: Sequence[str]) -> None:
    """Refuse a file that the container would not see, by name."""
    seen = [place.resolve() for place in (paths.REPOSITORY, paths.roots().data, paths.roots().cache)]
    for word in argv[1:]:
        path = Path(word).resolve()
        if path.exists() and not any(path.is_relative_to(place) for place in seen):
            raise UserError(
                "a file lies outside of what the container sees", where=word,
                expected="a place in this checkout or under DATA_ROOT",
                next_command=f"RUNTIME=local {again()}",
            )  # fmt: skip


def _signals_to(container: str, process: subprocess.Popen) -> AbstractContextManager[None]:
    """Pass signals on to the program inside, whose own handling decides how it ends."""

    def forward(number: int, _: object) -> None:
        if not engine.succeeds(["kill", "--signal", str(number), container]):
            process.send_signal(number)  # there is no container yet: Compose itself is to stop

    return signals.handled(forward)
