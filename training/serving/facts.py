"""Facts read off a container as the engine describes it (Docker Engine API, `ContainerInspect`)."""

import datetime
import itertools
from pathlib import Path


def model_of(container: dict) -> str:
    """The file that a container is told to serve: by its command, which wins over the environment."""
    command = container["Config"]["Cmd"] or []
    for flag, value in itertools.pairwise(command):
        if flag in ("-m", "--model"):
            return value
    given = dict(entry.partition("=")[::2] for entry in container["Config"]["Env"] or [])
    return given.get("LLAMA_ARG_MODEL", "")


def host_path(served_as: str, mounts: list[dict]) -> Path:
    """The host's file of a container's path, by what is mounted where."""
    for mount in mounts:
        if Path(served_as).is_relative_to(mount["Destination"]):
            return Path(mount["Source"]) / Path(served_as).relative_to(mount["Destination"])
    return Path(served_as)


def flags(command: list[str] | None) -> dict[str, str]:
    """`--ctx-size 4096 --no-ui` as `{"ctx-size": "4096", "no-ui": ""}`, without the model."""
    words = [*(command or []), "--"]
    pairs = itertools.pairwise(words)
    found = {flag[2:]: "" if value.startswith("--") else value for flag, value in pairs if flag.startswith("--")}
    return {flag: value for flag, value in found.items() if flag != "model"}


def epoch(text: str) -> float:
    """The engine's time as seconds; 0 for a container that was never started."""
    if text.startswith("0001"):
        return 0.0
    return datetime.datetime.fromisoformat(text.rstrip("Z")[:26]).replace(tzinfo=datetime.UTC).timestamp()
