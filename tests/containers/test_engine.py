"""What is missing is told by its own name with the command that mends it, and not as the engine's error."""

import subprocess
from pathlib import Path

import pytest

from tests.containers.room import Project
from training.calculator import nvml
from training.containers import engine, image
from training.core.errors import MachineError, RunError
from training.llamacpp.server import free_port

CARD = nvml.Gpu("NVIDIA RTX", "GPU-1", None, 1 << 34, 0, ())


def script(folder: Path, monkeypatch, text: str) -> None:
    """A `docker` that answers as given, first on the PATH and alone there."""
    program = folder / "docker"
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_no_docker_is_told_once_and_not_once_a_plugin(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    (problem,) = engine.problems(gpu=False)
    assert problem.what == "Docker is not installed" and problem.exit_code == 3


@pytest.mark.docker
def test_an_engine_that_is_not_there_is_told_with_the_command_that_starts_it(monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", f"tcp://127.0.0.1:{free_port()}")
    with pytest.raises(MachineError, match="the Docker engine does not answer") as error:
        engine.require_engine()
    assert error.value.next_command == "sudo systemctl start docker"
    with pytest.raises(MachineError, match="the Docker engine does not answer"):
        engine.run(["ps"], "listing")


def test_an_engine_that_may_not_be_used_is_told_as_that(tmp_path: Path, monkeypatch):
    script(tmp_path, monkeypatch, 'echo "permission denied while trying to connect to the Docker daemon" >&2; exit 1')
    with pytest.raises(MachineError, match="may not use the Docker engine") as error:
        engine.require_engine()
    assert "usermod -aG docker" in error.value.next_command


@pytest.mark.parametrize("name", ["compose", "buildx"])
def test_a_missing_plugin_is_told_by_name(name: str, tmp_path: Path, monkeypatch):
    script(tmp_path, monkeypatch, f'[ "$1" = {name} ] && exit 1; echo 28.0')
    (problem,) = engine.problems(gpu=False)
    assert name in problem.what and f"docker-{name}-plugin" in problem.next_command


def test_driver_gpu_and_toolkit_are_told_apart(tmp_path: Path, monkeypatch):
    script(tmp_path, monkeypatch, 'echo "{}"')
    answers = {
        "no NVIDIA driver": nvml.Answer((), None, "no NVIDIA driver answers"),
        "no GPU to hand": nvml.Answer((), "580.1", "CUDA_VISIBLE_DEVICES names none"),
        "cannot hand out the GPU": nvml.Answer((CARD,), "580.1", None),
    }
    for message, answer in answers.items():
        monkeypatch.setattr(nvml, "ask", lambda answer=answer: answer)
        with pytest.raises(MachineError, match=message):
            engine.require_gpu()
    script(tmp_path, monkeypatch, 'echo \'{"nvidia": {}, "runc": {}}\'')
    engine.require_gpu()


@pytest.mark.docker
def test_the_engines_own_refusal_of_a_gpu_is_told_as_the_missing_toolkit(llama_image):
    if engine.gpu_options():
        pytest.skip("this machine hands out a GPU")
    with pytest.raises(MachineError, match="cannot hand out the GPU") as error:
        engine.run(["run", "--rm", "--gpus", "all", llama_image["reference"]], "starting a server")
    assert "nvidia-ctk runtime configure" in error.value.next_command


@pytest.mark.docker
def test_a_service_with_a_gpu_is_refused_as_that_where_there_is_none(own_roots: Path, llama_image, own_tag):
    """The reservation of compose.yaml reaches the engine: a form that Compose drops would start without the GPU."""
    if engine.gpu_options():
        pytest.skip("this machine hands out a GPU")
    engine.run(["tag", llama_image["reference"], image.reference("llama-cuda")], "naming a stand-in")
    project = Project.make(own_roots, LLAMA_GPU_MODEL="/app/models/tiny.gguf", LLAMA_GPU_PORT=free_port())
    try:
        with pytest.raises(MachineError, match="cannot hand out the GPU"):
            project.run("up", "--detach", "llama-gpu")
    finally:
        project.run("--profile", "llama-gpu", "down")


def test_a_builds_error_shows_what_its_step_printed():
    text = "#7 [2/3] RUN make\n#7 0.817 no such file\n#7 ERROR: executor failed running [long text]\n"
    done = subprocess.CompletedProcess([], 1, "", text)
    error = engine.translated("building x", done, "docker buildx")
    assert isinstance(error, RunError) and error.found == "status 1; its last lines:\nno such file"
