"""Pins of the bases: what counts as one, what is refused, and the server's revision."""

import subprocess
from pathlib import Path

import pytest

from tests.conftest import TEST_BASE, real_wheels
from training.containers import bases, engine, image, runtime, wheelhouse
from training.containers.bases import Base
from training.core.errors import IntegrityError, UserError
from training.llamacpp import pin as pins

DIGEST = "sha256:" + "ab" * 32


def pin_file(folder: Path, python: str = "", cuda: str = "") -> Path:
    path = folder / "bases.env"
    path.write_text(f"#   docker pull p\nPYTHON={python}\n#   docker pull c\nLLAMA_CUDA={cuda}\n")
    return path


def test_an_empty_pin_is_refused_with_the_command_that_prints_its_value(tmp_path: Path):
    with pytest.raises(UserError, match="PYTHON is not pinned") as error:
        bases.choose("PYTHON", None, pin_file(tmp_path))
    assert "docker pull p" in error.value.next_command and "--base" in error.value.expected


@pytest.mark.parametrize("pin", [DIGEST, f"python@{DIGEST}", f"registry:443/a/b@{DIGEST}"])
def test_a_digest_and_an_image_id_are_pins(tmp_path: Path, pin: str):
    assert bases.choose("PYTHON", None, pin_file(tmp_path, python=pin)) == Base(pin, pinned=True)


@pytest.mark.parametrize("pin", ["python:3.11-slim", "python", DIGEST[:-1], f"{DIGEST} x", "python@sha256:latest"])
def test_a_name_that_can_move_is_no_pin(tmp_path: Path, pin: str):
    with pytest.raises(UserError, match="can move"):
        bases.choose("PYTHON", None, pin_file(tmp_path, python=pin))


def test_a_base_asked_for_by_name_is_taken_and_known_as_unpinned(tmp_path: Path):
    path = pin_file(tmp_path, python=DIGEST)
    assert bases.choose("PYTHON", "debian:bookworm-slim", path) == Base("debian:bookworm-slim", pinned=False)
    assert bases.choose("PYTHON", DIGEST, path).pinned


def test_a_damaged_pin_file_is_told(tmp_path: Path):
    path = tmp_path / "bases.env"
    path.write_text("PYTHON=\n")
    with pytest.raises(IntegrityError, match="bases are damaged"):
        bases.load(path)


def test_every_pin_of_the_checkout_is_one_or_empty_with_its_command():
    for name, (pin, command) in bases.load().items():
        assert command.startswith("docker pull "), name
        assert pin == "" or bases.choose(name, None).pinned
    assert f"server-cuda-{pins.load().build}" in bases.load()["LLAMA_CUDA"][1]


@pytest.mark.docker
def test_a_local_image_is_built_on_by_its_id(llama_image, own_tag):
    base = engine.inspect(TEST_BASE)["Id"]
    built = image.build("llama-cpu", image.Plan(wheelhouse.lock_path("cpu"), wheels=real_wheels(), base=base))
    assert built["labels"]["base"] == base and built["labels"]["base-pinned"] == "yes"


@pytest.fixture(scope="module")
def official(tmp_path_factory) -> str:
    """A base shaped like the official CUDA server: its labels, its path, a program that says how it was called."""
    folder = tmp_path_factory.mktemp("official")
    pin = pins.load()
    (folder / "llama-server").write_text('#!/bin/bash\necho "called with: $*"\n')
    (folder / "llama-server").chmod(0o755)
    (folder / "Dockerfile").write_text(
        f"FROM {TEST_BASE}\nCOPY llama-server /app/llama-server\n"
        f"LABEL org.opencontainers.image.version={pin.build} org.opencontainers.image.revision={pin.commit}\n"
        'ENTRYPOINT ["/app/llama-server"]\n'
    )
    subprocess.run(["docker", "build", "-q", "-t", "trainyard-test-official:right", str(folder)], check=True)
    with open(folder / "Dockerfile", "a") as file:
        file.write(f"LABEL org.opencontainers.image.revision={'0' * 40}\n")
    subprocess.run(["docker", "build", "-q", "-t", "trainyard-test-official:wrong", str(folder)], check=True)
    return "trainyard-test-official"


@pytest.mark.docker
def test_the_cuda_server_keeps_entry_port_user_and_health_check(official: str, llama_image):
    plan = image.Plan(wheelhouse.lock_path("cpu"), server_base=f"{official}:right")
    built = image.build("llama-cuda", plan)
    assert built["labels"]["llama.cpp"] == pins.load().name and built["labels"]["base-pinned"] == "no"
    ours, other = (engine.inspect(found["reference"])["Config"] for found in (built, llama_image))
    for part in ("Entrypoint", "ExposedPorts", "User", "WorkingDir", "Healthcheck", "Cmd"):
        assert ours[part] == other[part], part
    run = ["docker", "run", *engine.as_caller(), "--network", "none", built["reference"]]
    done = subprocess.run([*run, "--model", "x.gguf", "--fit", "off"], capture_output=True, text=True)
    assert done.stdout == "called with: --model x.gguf --fit off\n"
    assert subprocess.run(run, capture_output=True).returncode == 1


@pytest.mark.docker
def test_a_server_of_another_llama_cpp_is_refused(official: str, tmp_path: Path):
    plan = image.Plan(wheelhouse.lock_path("cpu"), server_base=f"{official}:wrong")
    with pytest.raises(IntegrityError, match=r"another llama\.cpp than the pinned one") as error:
        image.build("llama-cuda", plan)
    assert "0" * 40 in error.value.found and pins.load().commit in error.value.expected


@pytest.mark.docker
def test_an_export_image_of_another_pin_is_refused(own_tag, monkeypatch):
    monkeypatch.setenv("RUNTIME", "docker")
    text = f"FROM {TEST_BASE}\nLABEL trainyard.image=export trainyard.llama.cpp=b1-000000000\n"
    build = ["docker", "build", "-q", "-t", image.reference("export"), "-"]
    subprocess.run(build, input=text, text=True, check=True)
    with pytest.raises(IntegrityError, match=r"trainyard\.llama\.cpp differs") as error:
        runtime.choose("export")
    assert error.value.found == "b1-000000000" and error.value.expected == pins.load().name
    assert error.value.next_command == "make export-build"
