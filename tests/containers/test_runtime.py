"""Commands in their containers: the same run as on the host, files of the caller, signals, exit codes, refusals."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.engine.conftest import make_recipe
from training.cli import main
from training.containers import compose, engine, image, runtime
from training.core import paths
from training.core.errors import IntegrityError, MachineError, UserError
from training.core.files import read_json

OWNER = 1234


@pytest.fixture
def recipe(own_roots: Path) -> Path:
    own_roots.mkdir()
    return make_recipe(own_roots)


def only_run() -> Path:
    (folder,) = [path for path in paths.roots().runs.iterdir() if path.is_dir()]
    return folder


@pytest.mark.docker
@pytest.mark.slow
def test_a_training_in_the_container_is_the_hosts_and_its_files_are_the_callers(
    recipe: Path, own_roots: Path, train_image, monkeypatch, capfd
):
    for place in (own_roots, paths.roots().cache):
        place.mkdir(exist_ok=True)
        subprocess.run(["chown", "-R", f"{OWNER}:{OWNER}", str(place)], check=True)
    monkeypatch.setattr(os, "getuid", lambda: OWNER)
    monkeypatch.setattr(os, "getgid", lambda: OWNER)
    monkeypatch.setenv("RUNTIME", "docker")
    assert main(["train", "--config", str(recipe)]) == 0
    said = capfd.readouterr().err
    assert said.splitlines()[0] == f"runtime docker: {train_image['reference']}"
    assert "verdict" in said and "PASS (exit 0)" in said
    inside = only_run()
    assert {path.stat().st_uid for path in [inside, *inside.rglob("*")]} == {OWNER}
    assert (
        read_json(inside / "environment.json")["tool"]["commit"] == image.describe("train")["labels"]["tool"].split()[1]
    )

    monkeypatch.setenv("RUNTIME", "local")
    monkeypatch.setenv("DATA_ROOT", str(own_roots))
    inside_hash = read_json(inside / "checkpoints" / "step_000012" / "manifest.json")["files"]["model.safetensors"]
    assert main(["train", "--config", str(recipe)]) == 0
    (outside,) = [path for path in paths.roots().runs.iterdir() if path.is_dir() and path != inside]
    manifest = read_json(outside / "checkpoints" / "step_000012" / "manifest.json")
    assert manifest["files"]["model.safetensors"] == inside_hash


@pytest.mark.docker
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_the_training_inside_which_saves(number: int, recipe: Path, train_image, monkeypatch):
    command = [sys.executable, "-m", "training", "train", "--config", str(recipe), "stop.max_steps=100000"]
    environment = os.environ | {"RUNTIME": "docker"}
    process = subprocess.Popen(command, cwd=paths.REPOSITORY, env=environment, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not list(paths.roots().runs.glob("*/checkpoints/step_00000*")) and time.monotonic() < deadline:
        time.sleep(0.2)
    process.send_signal(number)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 130, said
    assert read_json(only_run() / "run.json")["status"] == "paused", said
    assert not engine.run(["ps", "--quiet", "--filter", f"name={compose.project()}-train-"], "listing").strip()


@pytest.mark.docker
def test_a_refusal_inside_keeps_its_exit_code(own_roots: Path, train_image, monkeypatch):
    (own_roots / "models").mkdir(parents=True)
    recipe = own_roots / "x.yaml"
    recipe.write_text("name: x\nmethod: pretrain\nmodle: {}\n")
    monkeypatch.setenv("RUNTIME", "docker")
    assert main(["train", "--config", str(recipe)]) == 2


@pytest.mark.docker
def test_a_file_that_the_container_would_not_see_is_refused_by_name(tmp_path: Path, train_image, monkeypatch):
    recipe = tmp_path / "elsewhere.yaml"
    recipe.write_text("name: x\n")
    monkeypatch.setenv("RUNTIME", "docker")
    with pytest.raises(UserError, match="outside of what the container sees"):
        runtime.run("train", ["train", "--config", str(recipe)])


@pytest.mark.docker
def test_training_has_no_network_and_the_limits_of_the_file(own_roots: Path, train_image):
    (own_roots / "models").mkdir(parents=True)
    paths.roots().cache.mkdir()
    words = ["run", "--rm", "-T", "--entrypoint", "python", "train", "-c", _LOOK]
    found = json.loads(compose.run(*words, what="looking", seconds=120))
    assert found["interfaces"] == ["lo"]
    assert found["uid"] == os.getuid() and found["capabilities"].strip("0") == ""
    assert found["shm_bytes"] == 2 << 30
    assert not found["writable"]


_LOOK = """
import json, os
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
shm = os.statvfs("/dev/shm")
print(json.dumps({
    "interfaces": os.listdir("/sys/class/net"), "uid": os.getuid(), "capabilities": status["CapEff"].strip(),
    "shm_bytes": shm.f_blocks * shm.f_frsize,
    "writable": [place for place in ("/", "/app/trainyard", "/opt/venv") if os.access(place, os.W_OK)],
}))
"""


@pytest.mark.docker
def test_auto_takes_the_image_of_this_checkout_and_no_other(train_image, monkeypatch):
    monkeypatch.setenv("RUNTIME", "auto")
    assert runtime.choose("train") == ("docker", train_image["reference"])
    monkeypatch.setattr("training.containers.context.sources_sha256", lambda *_: "0" * 64)
    assert runtime.choose("train")[0] == "local"
    monkeypatch.setenv("RUNTIME", "docker")
    with pytest.raises(IntegrityError, match=r"trainyard\.sources differs"):
        runtime.choose("train")
    monkeypatch.setenv("TRAINYARD_TAG", "nobody")
    with pytest.raises(MachineError, match="is not on this machine"):
        runtime.choose("train")


def test_without_docker_auto_is_local_and_docker_says_what_is_missing(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("RUNTIME", "auto")
    assert runtime.choose("train")[0] == "local"
    monkeypatch.setenv("RUNTIME", "docker")
    with pytest.raises(MachineError, match="Docker is not installed"):
        runtime.choose("train")
    monkeypatch.setenv("RUNTIME", "podman")
    with pytest.raises(UserError, match="no such runtime"):
        runtime.choose("train")
