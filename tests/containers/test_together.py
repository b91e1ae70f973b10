"""Makefile, compose.yaml, Dockerfiles and docs speak of the same services, paths, ports, images and variables."""

import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.test_documents import makefile_targets
from training.containers import bases, compose, context, image, wheelhouse
from training.core.paths import CONTAINER_MODELS, REPOSITORY
from training.llamacpp.pin import PIN_FILE

COMPOSE = compose.FILE.read_text()
SERVICES = yaml.safe_load(COMPOSE)["services"]
PAGE = (REPOSITORY / "docs" / "containers.md").read_text()
MAKEFILE = (REPOSITORY / "Makefile").read_text()
DOCKERFILES = {path.name.partition(".")[0]: path.read_text() for path in context.DOCKER.glob("*.Dockerfile")}
SERVERS = sorted(compose.SERVERS)
OF_COMPOSE = {"PWD", "HOME"}


def variables(text: str) -> set[str]:
    return set(re.findall(r"\$\{([A-Z_]+)", text))


def dockerfile_of(name: str) -> str:
    return DOCKERFILES["llama" if name.startswith("llama") else name]


def test_the_services_are_those_that_the_program_and_the_page_know():
    assert tuple(sorted(SERVICES)) == tuple(sorted(compose.SERVICES))
    assert set(re.findall(r"^\| `([a-z-]+)` \|", PAGE, flags=re.M)) >= set(SERVICES)


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_a_service_has_its_own_profile_and_the_image_that_is_built_for_it(name: str):
    assert SERVICES[name]["profiles"] == [name]
    assert SERVICES[name]["image"] == f"trainyard-{compose.image_of(name)}:${{TRAINYARD_TAG:-latest}}"
    assert compose.image_of(name) in image.NAMES and image.BUILD_COMMANDS[compose.image_of(name)].startswith("make ")


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_every_service_is_hardened(name: str):
    service = SERVICES[name]
    assert service["user"] == "${TRAINYARD_UID:-1000}:${TRAINYARD_GID:-1000}" and service["init"] is True
    assert service["read_only"] is True and service["cap_drop"] == ["ALL"] and "privileged" not in service
    assert service["security_opt"] == ["no-new-privileges:true"] and service["pull_policy"] == "never"
    assert service["tmpfs"][0].startswith("/tmp:") and service["mem_limit"]
    if name in compose.SERVERS:
        assert [(mount["target"], mount.get("read_only")) for mount in service["volumes"]] == [("/app/models", True)]
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    else:
        assert service["network_mode"] == "none" and "ports" not in service and service["shm_size"]


def test_the_models_lie_at_one_place_in_every_container():
    for service in SERVICES.values():
        assert str(CONTAINER_MODELS) in [mount["target"] for mount in service["volumes"]]
    assert f"{CONTAINER_MODELS}/champion.gguf" in COMPOSE and str(CONTAINER_MODELS) in PAGE


@pytest.mark.parametrize("name", SERVERS)
def test_a_server_is_told_everything_that_it_would_choose_itself(name: str):
    command, prefix = SERVICES[name]["command"], compose.SERVERS[name]
    given = dict(itertools.pairwise(command))
    assert given["--model"] == f"${{{prefix}_MODEL:-/app/models/champion.gguf}}"
    for flag in ("--ctx-size", "--parallel", "--n-gpu-layers", "--batch-size", "--ubatch-size", "--threads"):
        assert given[flag].startswith(f"${{{prefix}_"), flag
    assert given["--fit"] == "off" and given["--seed"].isdigit() and given["--port"] == "8080"


def test_both_servers_get_the_same_flags_and_the_one_without_a_gpu_knows_them():
    gpu, cpu = ([word for word in SERVICES[name]["command"] if word.startswith("--")] for name in SERVERS[::-1])
    assert gpu == cpu
    words = [re.sub(r"\$\{[A-Z_]+:-([^}]*)\}", r"\1", word) for word in SERVICES["llama-cpu"]["command"]]
    script = REPOSITORY / "training" / "llamacpp" / "server_main.py"
    done = subprocess.run([sys.executable, "-P", str(script), *words], capture_output=True, text=True)
    assert done.returncode == 1 and "cannot serve /app/models/champion.gguf" in done.stderr


def test_the_port_is_one_everywhere():
    dockerfile = DOCKERFILES["llama"]
    assert "EXPOSE 8080" in dockerfile and "LLAMA_ARG_PORT=8080" in dockerfile
    assert "LLAMA_ARG_PORT:-8080" in (context.DOCKER / "llama-healthy.sh").read_text()
    for name in SERVERS:
        (port,) = SERVICES[name]["ports"]
        assert port.endswith(":8080") and f"${{{compose.SERVERS[name]}_PORT:-" in port
        assert re.search(rf"{compose.SERVERS[name]}_PORT.*{re.search(r':-([0-9]+)', port)[1]}", PAGE)


def test_a_device_is_asked_for_in_the_form_that_every_compose_understands():
    gpu = yaml.safe_load((context.DOCKER / "compose.gpu.yaml").read_text())["services"]
    for service in (SERVICES["llama-gpu"], gpu["train"], gpu["export"]):
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    assert "gpus:" not in COMPOSE and set(gpu) <= set(SERVICES)


@pytest.mark.parametrize("name", image.NAMES)
def test_a_dockerfile_copies_only_what_its_build_sees(name: str, monkeypatch, tmp_path):
    if name == "export":
        for part in ("convert_hf_to_gguf.py", "convert_lora_to_gguf.py", "LICENSE", "manifest.json"):
            (tmp_path / part).touch()
        for part in ("conversion", "gguf-py"):
            (tmp_path / part).mkdir()
            (tmp_path / part / "x.py").touch()
        monkeypatch.setattr("training.llamacpp.source.require_source", lambda: tmp_path)
    seen = set(context.contents(name, wheelhouse.lock_path("cpu")))
    text = dockerfile_of(name)
    if name == "llama-cuda":
        text = text.partition("AS cuda\n")[2]
    copied = [word for line in re.findall(r"^COPY (?!--from)(.*)", text, flags=re.M) for word in line.split()[:-1]]
    assert copied
    for word in copied:
        assert any(found == word or found.startswith(f"{word}/") for found in seen), word


def test_every_dockerfile_is_built_and_takes_its_base_as_an_argument():
    names = {"llama" if name.startswith("llama") else name for name in image.NAMES}
    assert set(DOCKERFILES) == names | {"system", "compiler"}
    for name, text in DOCKERFILES.items():
        first = next(line for line in text.splitlines() if not line.startswith("#"))
        assert first == "ARG BASE", name
        assert set(re.findall(r"^FROM (\S+)", text, flags=re.M)) <= {"${BASE}", "${BACKEND}", "${COMPILER}"}, name


@pytest.mark.parametrize("name", ["train", "llama"])
def test_packages_are_installed_by_their_hashes_from_the_wheels_alone(name: str):
    (install,) = re.findall(r"pip .*?install(?:.*\\\n)*.*", DOCKERFILES[name])
    assert all(flag in install for flag in ("--require-hashes", "--no-index", "--find-links /wheels", "--no-deps"))
    assert "pip" not in DOCKERFILES["export"]


def test_the_health_check_is_a_file_of_the_image():
    check = re.search(r'HEALTHCHECK .*CMD \["(.*)"\]', DOCKERFILES["llama"])[1]
    entry = re.search(r'ENTRYPOINT \["(.*)"\]', DOCKERFILES["llama"])[1]
    assert f"COPY llama-healthy.sh {check}\n" in DOCKERFILES["llama"]
    assert f"COPY llama-serve.sh {entry}\n" in DOCKERFILES["llama"]
    assert all("healthcheck" not in service for service in SERVICES.values())


def test_every_variable_of_compose_is_filled_in_by_the_program_or_explained_on_the_page():
    for name in variables(COMPOSE) - set(compose.environment()) - OF_COMPOSE:
        assert f"`{name}`" in PAGE or f"`{re.sub('_[CG]PU_', '_..._', name)}`" in PAGE, name
    assert set(compose.environment()) <= variables(COMPOSE)


def test_every_variable_and_target_of_the_page_exists():
    known = variables(COMPOSE) | set(bases.OPTIONS) | set(re.findall(r"\b[A-Z_]{3,}\b", MAKEFILE))
    known |= {"COMPOSE_PROJECT_NAME", "REQUIRE_DOCKER", "LLAMA_ARG_MODEL", "TRAINYARD_TAG"}
    shortened = {re.sub("_[CG]PU_", "_..._", name) for name in known}
    for name in re.findall(r"`([A-Z][A-Z_.]+)`", PAGE):
        start = name.removesuffix("...")
        assert name in known | shortened or (start != name and any(other.startswith(start) for other in known)), name
    assert set(re.findall(r"make ([a-z][a-z-]+)", PAGE)) <= makefile_targets()


def test_every_path_of_the_page_exists():
    for path in re.findall(r"`((?:docker|training|logs|recipes)/[\w./-]*)`", PAGE):
        assert (REPOSITORY / path).exists() or path.startswith("logs/images"), path
    assert str(PIN_FILE.relative_to(REPOSITORY)) in (context.DOCKER / "bases.env").read_text()


@pytest.mark.docker
@pytest.mark.parametrize("name", sorted(SERVICES))
def test_compose_takes_the_file(name: str, own_roots: Path):
    (found,) = compose.config(name)["services"].items()
    assert found[0] == name and found[1]["image"].startswith(f"trainyard-{compose.image_of(name)}:test-")


@pytest.mark.docker
def test_compose_takes_the_file_by_hand_too():
    command = ["docker", "compose", "--file", str(compose.FILE), "--profile", "*", "config", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == 0 and "variable is not set" not in done.stderr, done.stderr
