"""The server image and its service on a real engine: what is served, as whom, and what it refuses."""

import json
import subprocess
import time
from pathlib import Path

import pytest

from tests.containers.room import Project, user
from training.containers import engine, image, trial
from training.llamacpp import tiny

pytestmark = pytest.mark.docker


def inspected(container: str) -> dict:
    return json.loads(engine.run(["inspect", container], "inspecting"))[0]


def test_the_service_serves_the_model_that_is_named_and_is_healthy_by_its_own_check(own_roots, llama_image):
    project = Project.make(own_roots)
    with project.up("--wait") as client:
        assert client.model_info()["path"] == "/app/models/tiny.gguf"
        assert client.model_info()["parameters"] == tiny.parameters()
        assert client.model_info()["ctx_size"] == 256 and client.model_info()["slots"] == 1
        state = inspected(project.container())
        assert state["State"]["Health"]["Status"] == "healthy" and state["Image"] == llama_image["id"]


def test_the_server_runs_as_the_caller_with_nothing_that_it_does_not_need(own_roots, llama_image):
    project = Project.make(own_roots)
    with project.up("--wait"):
        container = project.container()
        found = inspected(container)
        host = found["HostConfig"]
        assert found["Config"]["User"] == user()
        assert host["ReadonlyRootfs"] and host["CapDrop"] == ["ALL"] and host["Init"]
        assert host["SecurityOpt"] == ["no-new-privileges:true"]
        assert host["Memory"] > 0 and not host["Privileged"]
        assert host["PortBindings"]["8080/tcp"][0]["HostIp"] == "127.0.0.1"
        assert [(mount["Destination"], mount["RW"]) for mount in found["Mounts"]] == [("/app/models", False)]
        for place in ("/app/models/x", "/app/x", "/x"):
            assert not engine.succeeds(["exec", container, "touch", place]), place
        assert engine.succeeds(["exec", container, "touch", "/tmp/x"])
        capabilities = engine.run(["exec", container, "grep", "CapEff", "/proc/self/status"], "reading")
        assert capabilities.split()[1].strip("0") == ""


@pytest.mark.parametrize("how", ["variable", "flag", "nothing"])
def test_a_start_without_a_model_is_refused_and_not_a_healthy_router(how: str, llama_image):
    command = ["docker", "run", *engine.as_caller(), "--network", "none"]
    command += ["--env", "LLAMA_ARG_MODEL="] if how == "variable" else []
    command += [llama_image["reference"], *(["--model", ""] if how == "flag" else [])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "no model is named" in done.stderr


def test_an_empty_variable_in_compose_means_the_default_and_not_no_model(own_roots, llama_image):
    project = Project.make(own_roots, LLAMA_CPU_MODEL="")
    words = project.run("--profile", "llama-cpu", "config", "--format", "json")
    command = json.loads(words)["services"]["llama-cpu"]["command"]
    assert command[command.index("--model") + 1] == "/app/models/champion.gguf"


def test_a_flag_that_is_unknown_is_refused(llama_image):
    values = {"CTX_SIZE": 256, "N_PARALLEL": 1, "THREADS": 1, "BATCH": 256, "UBATCH": 256, "MODEL": "x"}
    variables = [word for name, value in values.items() for word in ("--env", f"LLAMA_ARG_{name}={value}")]
    command = ["docker", "run", *engine.as_caller(), "--network", "none", *variables, llama_image["reference"]]
    done = subprocess.run([*command, "--seed", "1", "--jinja-magic"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "--jinja-magic" in done.stderr


def test_a_model_that_cannot_be_read_ends_the_server_with_the_reason(own_roots: Path, llama_image):
    project = Project.make(own_roots)
    (own_roots / "models" / "tiny.gguf").write_bytes(b"GGUF but not really")
    with project.up():
        deadline = time.monotonic() + 30
        while inspected(project.container())["RestartCount"] == 0 and time.monotonic() < deadline:
            time.sleep(0.2)
        assert inspected(project.container())["RestartCount"] > 0
        assert "cannot serve /app/models/tiny.gguf" in project.run("logs", "llama-cpu")


def test_the_image_passes_its_trial_and_lists_its_distribution_packages(llama_image):
    said = trial.run("llama-cpu")
    assert "refuses to start without a model" in said["passed"] and said["completion"] is not None
    names = {line.split()[0] for line in trial.distribution_packages("llama-cpu")}
    assert {"libc6", "libgomp1", "python3.11"} <= names


def test_the_labels_say_what_it_is_made_of(llama_image):
    labels = llama_image["labels"]
    assert labels["base"] == "debian:bookworm-slim" and labels["base-pinned"] == "no"
    assert labels["lock"] == "cpu" and len(labels["lock-sha256"]) == 64 and labels["tool"].startswith("0.1.0 ")
    assert image.require("llama-cpu")["id"] == llama_image["id"]


def test_two_checkouts_side_by_side_serve_at_once(own_roots, llama_image):
    first, second = Project.make(own_roots), Project.make(own_roots)
    with first.up("--wait") as one, second.up("--wait") as two:
        assert one.health() == two.health() == "ok"
        assert first.container() != second.container()
