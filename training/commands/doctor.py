"""`doctor`: what this machine has. Whatever is absent is told, and is no error."""

import argparse
import dataclasses
import os
import platform
import shutil
import subprocess
from pathlib import Path

from training.core import files, paths, version
from training.core.report import Report
from training.core.units import format_bytes

SUMMARY = "tell what this machine has: CPU, memory, disk, GPU, engine, versions"
EXAMPLE = "make doctor"
_ASK_SECONDS = 0.7


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No arguments of its own."""


def run(args: argparse.Namespace, report: Report) -> dict:
    from training.calculator import devices, nvml
    from training.containers import engine

    memory, answer = devices.this_machine(), nvml.ask()
    document = {
        "schema": 1,
        "cpu": {"model": devices.processor(), "cores": os.cpu_count(), "usable_cores": len(os.sched_getaffinity(0))},
        "memory": {"total_bytes": memory.total_bytes, "available_bytes": memory.available_bytes},
        "disk": {"data": _disk(paths.roots().data), "cache": _disk(paths.roots().cache)},
        "gpus": [dataclasses.asdict(gpu) for gpu in answer.gpus],
        "driver": answer.driver,
        "no_gpu": answer.problem,
        "docker": _ask("docker", "version", "--format", "{{.Server.Version}}"),
        "compose": _ask("docker", "compose", "version", "--short"),
        "missing_for_containers": [error.to_json() for error in engine.problems(gpu=bool(answer.gpus))],
        "images": {},
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "packages": version.packages(),
        "llama_cpp": _pin(),
        "llama_cpp_source": _source(),
    }
    if document["docker"]:
        document["images"] = _images()
    _fill(report, document)
    return document


def _fill(report: Report, document: dict) -> None:
    cpu, memory = document["cpu"], document["memory"]
    report.add("cpu", f"{cpu['model']}, {cpu['usable_cores']} of {cpu['cores']} cores usable")
    report.add("memory", f"{format_bytes(memory['available_bytes'])} free of {format_bytes(memory['total_bytes'])}")
    for name, disk in document["disk"].items():
        report.add(f"disk {name}", f"{format_bytes(disk['free_bytes'])} free at {disk['path']}")
    for gpu in document["gpus"]:
        free = gpu["total_bytes"] - gpu["used_bytes"]
        report.add(
            "gpu",
            f"{gpu['name']}, {format_bytes(free)}"
            f" free of {format_bytes(gpu['total_bytes'])}, driver {document['driver']}",
        )
    if not document["gpus"]:
        report.add("gpu", f"{document['no_gpu']}: training runs on the CPU in fp32")
    _fill_containers(report, document)
    report.add("python", f"{document['python']}, {document['platform']}")
    report.add("packages", ", ".join(f"{name} {found}" for name, found in document["packages"].items() if found))
    report.add("llama.cpp", f"{document['llama_cpp']}, {document['llama_cpp_source']}")
    if missing := version.missing(document["packages"], on_gpu=bool(document["gpus"])):
        report.add("missing", ", ".join(missing))
    report.add("next", "make setup" if missing else "make demo")


def _fill_containers(report: Report, document: dict) -> None:
    missing = document["missing_for_containers"]
    rows = [
        f"engine {document['docker']}, Compose {document['compose']}"
        if document["docker"]
        else "none answers; none is needed: commands run in .venv (RUNTIME=local)"
    ]
    for_containers = {error["what"]: error["next"] for error in missing}
    rows += [f"for containers: {what}; next: {command}" for what, command in for_containers.items()]
    report.add("docker", "\n".join(rows))
    if document["docker"]:
        report.add("images", "\n".join(f"{name}: {state}" for name, state in document["images"].items()))


def _images() -> dict[str, str]:
    """Each image's state: of this checkout, or what is wrong with it and the command that mends it."""
    from training.containers import image
    from training.core.errors import TrainyardError

    states = {}
    for name in image.NAMES:
        try:
            states[name] = f"{image.require(name)['reference']}, of this checkout"
        except TrainyardError as error:
            states[name] = f"{error.what}; next: {error.next_command}"
    return states


def _disk(path: Path) -> dict:
    usage = shutil.disk_usage(files.existing_parent(path))
    return {"path": paths.for_people(path), "free_bytes": usage.free, "total_bytes": usage.total}


def _ask(*command: str) -> str | None:
    """A program's one-line answer; None where it is absent, says no, or takes too long."""
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_SECONDS, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.strip() or None


def _pin() -> str:
    from training.core.errors import TrainyardError
    from training.llamacpp import pin

    try:
        return pin.load().name
    except (OSError, TrainyardError) as error:
        return f"no pin: {error}"


def _source() -> str:
    """Whether the pinned llama.cpp's source, which converts, is here."""
    from training.core.errors import MachineError, TrainyardError
    from training.llamacpp import source

    try:
        source.require_source()
        return "its source verified"
    except MachineError as error:
        return f"its source not here yet; next: {error.next_command}"
    except (OSError, TrainyardError) as error:
        return f"its source cannot be used: {error}"
