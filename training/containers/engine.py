"""The Docker engine of this machine: whether it is there, what it lacks, and its command line.

What is missing is told by its own name with the command that mends it, never as the engine's error. Nothing here
starts, stops or configures an engine.
"""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from training.core.errors import MachineError, RunError

_ASK_SECONDS = 10.0
_LAST_LINES = 15
_PRINTED_BY_STEP = re.compile(r"^#\d+ \d+\.\d+ (.*)$", re.M)
"""What the steps of a build have printed, without BuildKit's own repetition of the Dockerfile."""
_TOOLKIT_COMMAND = "sudo nvidia-ctk runtime configure --runtime=docker && sudo systemctl restart docker"
_INSTALL_TOOLKIT = f"sudo apt-get install nvidia-container-toolkit && {_TOOLKIT_COMMAND}"
_GPU_WORDS = (
    "could not select device driver", "failed to discover GPU vendor", "invalid runtime name: nvidia",
    "unresolvable CDI devices", "nvidia-container-cli",
)  # fmt: skip


def _ask(*arguments: str, seconds: float = _ASK_SECONDS) -> subprocess.CompletedProcess:
    try:
        return subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=seconds)
    except FileNotFoundError:
        raise MachineError(
            "Docker is not installed",
            found="no program named docker",
            expected="a Docker engine with Compose v2 and buildx (docs.docker.com/engine/install), or RUNTIME=local",
            next_command="sudo apt-get install docker.io",
        ) from None
    except subprocess.TimeoutExpired:
        raise MachineError(
            "the Docker engine does not answer",
            found=f"nothing within {seconds:g} s",
            next_command="sudo systemctl restart docker",
        ) from None


def require_engine() -> str:
    """The engine's version. Raises MachineError where there is none, it does not answer, or may not be used."""
    answer = _ask("version", "--format", "{{.Server.Version}}")
    if answer.returncode == 0:
        return answer.stdout.strip()
    denied = "permission denied" in answer.stderr
    raise MachineError(
        "this user may not use the Docker engine" if denied else "the Docker engine does not answer",
        where=os.environ.get("DOCKER_HOST"),
        found=_last(answer.stderr, 1),
        expected="a user of the group docker, logged in since" if denied else "a running engine",
        next_command="sudo usermod -aG docker $USER" if denied else "sudo systemctl start docker",
    )


def require_plugin(name: str) -> str:
    """The version of a plugin, `compose` or `buildx`. Raises MachineError where it is missing."""
    answer = _ask(name, "version", *(["--short"] if name == "compose" else []))
    if answer.returncode != 0:
        raise MachineError(
            f"Docker's plugin {name} is not installed",
            found=f"docker {name} is unknown",
            expected="Compose v2" if name == "compose" else "buildx",
            next_command=f"sudo apt-get install docker-{name}-plugin",
        )
    return answer.stdout.strip()


def require_gpu() -> None:
    """Raise MachineError where a container could not have the GPU: no GPU, no driver, or no NVIDIA toolkit."""
    from training.calculator import nvml

    answer = nvml.ask()
    if not answer.gpus:
        raise MachineError(
            "there is no GPU to hand to a container" if answer.driver else "there is no NVIDIA driver on this machine",
            found=answer.problem,
            expected="the NVIDIA driver and a GPU; the service llama-cpu needs neither",
            next_command="nvidia-smi",
        )
    if not _knows_nvidia():
        raise MachineError(
            "the engine cannot hand out the GPU",
            found="the NVIDIA container toolkit is not set up",
            expected="a runtime named nvidia, or CDI devices",
            next_command=_INSTALL_TOOLKIT,
        )


def _knows_nvidia() -> bool:
    answer = _ask("info", "--format", "{{json .Runtimes}}")
    listed = json.loads(answer.stdout) if answer.returncode == 0 else {}
    specifications = [path for place in ("/etc/cdi", "/var/run/cdi") for path in Path(place).glob("nvidia*")]
    return "nvidia" in (listed or {}) or bool(specifications)


def problems(*, gpu: bool) -> list[MachineError]:
    """All that stands in the way of containers here, each as its message; empty where nothing does."""
    found = []
    checks = [require_engine, lambda: require_plugin("compose"), lambda: require_plugin("buildx")]
    for check in checks + ([require_gpu] if gpu else []):
        try:
            check()
        except MachineError as error:
            found.append(error)
            if shutil.which("docker") is None:
                break
    return found


def run(
    arguments: Sequence[str],
    what: str,
    *,
    environment: Mapping[str, str] | None = None,
    seconds: float | None = None,
    next_command: str | None = None,
) -> str:
    """Run a docker command and return its stdout. Raises RunError with its last lines, MachineError for a lost GPU."""
    try:
        done = subprocess.run(
            ["docker", *arguments], capture_output=True, text=True, errors="replace", timeout=seconds,
            env=None if environment is None else os.environ | environment,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise RunError(f"{what} took longer than {seconds:g} s", where=f"docker {arguments[0]}") from None
    if done.returncode != 0:
        raise translated(what, done, f"docker {arguments[0]}", next_command)
    return done.stdout


def translated(
    what: str, done: subprocess.CompletedProcess, where: str, next_command: str | None = None
) -> RunError | MachineError:
    """A failed docker command as an error: one about the GPU by its own name, else with its last lines."""
    if any(words in done.stderr for words in _GPU_WORDS):
        return MachineError(
            "the engine cannot hand out the GPU", where=where, found=_last(done.stderr, 1),
            expected="the NVIDIA driver and container toolkit", next_command=_INSTALL_TOOLKIT,
        )  # fmt: skip
    if "Cannot connect to the Docker daemon" in done.stderr:
        return MachineError(
            "the Docker engine does not answer", where=where, found=_last(done.stderr, 1),
            next_command="sudo systemctl start docker",
        )  # fmt: skip
    text = done.stderr or done.stdout
    printed = "\n".join(_PRINTED_BY_STEP.findall(text)) or text
    return RunError(
        f"{what} failed",
        where=where,
        found=f"status {done.returncode}; its last lines:\n{_last(printed, _LAST_LINES)}",
        next_command=next_command,
    )


def _last(text: str, count: int) -> str:
    return "\n".join(text.strip().splitlines()[-count:]) or "nothing"


def inspect(image: str) -> dict | None:
    """What the engine knows of an image; None where it is not on this machine."""
    answer = _ask("image", "inspect", image)
    return json.loads(answer.stdout)[0] if answer.returncode == 0 else None


def labels(image: dict) -> dict[str, str]:
    """The labels of an inspected image."""
    return image["Config"].get("Labels") or {}


def as_caller() -> list[str]:
    """The options that every container of ours runs with: the calling user, and nothing that it does not need."""
    return [
        "--rm", "--init", "--user", f"{os.getuid()}:{os.getgid()}", "--cap-drop", "ALL", "--read-only",
        "--security-opt", "no-new-privileges", "--tmpfs", "/tmp:mode=1777",
    ]  # fmt: skip


def gpu_options() -> list[str]:
    """The options that hand a container the GPU, where this machine can; none otherwise."""
    try:
        require_gpu()
    except MachineError:
        return []
    return ["--gpus", "all"]


# ---- one container


def succeeds(arguments: Sequence[str]) -> bool:
    """Whether a docker command ends with status 0."""
    return _ask(*arguments, seconds=60.0).returncode == 0


def published(container: str, port: int) -> str:
    """Where a container's port is published, `127.0.0.1:49153`."""
    return run(["port", container, str(port)], "asking for the port").split()[0]


def is_running(container: str) -> bool:
    """Whether a container runs."""
    return _ask("inspect", "--format", "{{.State.Running}}", container).stdout.strip() == "true"


def last_lines(container: str) -> str:
    """The last lines that a container has printed."""
    answer = _ask("logs", "--tail", str(_LAST_LINES), container)
    return _last(answer.stdout + answer.stderr, _LAST_LINES)
