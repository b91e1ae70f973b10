"""What goes into an image: the packages by their hashes, nothing of the host's, and the same content each time."""

import os
import re
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from tests.conftest import TEST_BASE, real_wheels
from training.containers import context, engine, image, trial, wheelhouse
from training.core import files, paths
from training.core.errors import IntegrityError, MachineError, RunError

LOCK = wheelhouse.lock_path("cpu")
_LIST = """cd /
find app opt -printf '%p %y %m %u %l\\n' | sort
find app opt -type f -print0 | sort -z | xargs -0 sha256sum
"""


def content(reference: str) -> list[str]:
    """Each file of the layers that are ours: name, kind, mode, owner, target of a link, and sha256."""
    run = ["run", "--rm", "--network", "none", "--user", "0", "--entrypoint", "sh", reference, "-c", _LIST]
    return engine.run(run, "listing").splitlines()


@pytest.mark.docker
@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-cpu", "train"])
def test_the_same_sources_give_the_same_content(name: str, llama_image, train_image, own_tag, monkeypatch):
    before = {"llama-cpu": llama_image, "train": train_image}[name]
    monkeypatch.setenv("TRAINYARD_CACHE", str(paths.roots().cache / "elsewhere"))
    again = image.build(name, image.Plan(LOCK, wheels=real_wheels(), base=TEST_BASE, fresh=True))
    first, second = set(content(before["reference"])), set(content(again["reference"]))
    assert len(first) > 20
    assert sorted(first ^ second) == []


@pytest.mark.docker
@pytest.mark.slow
def test_the_train_image_passes_its_trial(train_image):
    said = trial.run("train")
    assert said["device"] == "cpu" and said["packages"]["torch"] == "2.13.0+cpu"
    assert said["passed"][0].startswith("torch 2.13.0+cpu, one step on cpu, loss 4.")


@pytest.mark.docker
def test_a_wheel_with_other_bytes_ends_the_build(tmp_path: Path, llama_image, own_tag):
    (wheel,) = real_wheels().glob("xllamacpp-*.whl")
    forged = tmp_path / "wheels" / wheel.name
    forged.parent.mkdir()
    forged.write_bytes(wheel.read_bytes() + b"x")
    files.write_json(forged.parent / "complete.json", {"lock_sha256": files.sha256_file(LOCK)})
    with pytest.raises(RunError) as error:
        image.build("llama-cpu", image.Plan(LOCK, wheels=forged.parent, base=TEST_BASE))
    assert "DO NOT MATCH THE HASHES" in error.value.found


@pytest.mark.docker
def test_a_certificate_bundle_is_lent_and_not_left(tmp_path: Path, llama_image, own_tag):
    """The step that fetches distribution packages sees it; neither the layers nor the history hold a word of it."""
    bundle = tmp_path / "company.pem"
    bundle.write_text("MARK-OF-THE-COMPANY\n")
    built = image.build("llama-cpu", image.Plan(LOCK, wheels=real_wheels(), base=TEST_BASE, extra_ca=bundle))
    search = ["run", "--rm", "--network", "none", "--user", "0", "--entrypoint", "sh", built["reference"], "-c"]
    found = engine.run([*search, "grep -rls MARK-OF-THE-COMPANY /etc /usr /opt /app /run /tmp || true"], "searching")
    assert found == "" and str(bundle) not in engine.run(["history", "--no-trunc", built["reference"]], "history")


@pytest.mark.docker
def test_nothing_of_the_checkout_but_the_listed_files_is_in_the_train_image(train_image):
    listed = {name for name in context.contents("train", LOCK) if name.startswith("trainyard/")}
    run = ["run", "--rm", "--network", "none", "--entrypoint", "find", train_image["reference"], "/app", "-type", "f"]
    assert {line.removeprefix("/app/") for line in engine.run(run, "listing").split()} == listed
    assert not any(".env" in name or "__pycache__" in name or name.startswith("trainyard/tests") for name in listed)


def test_the_hash_of_the_sources_follows_their_bytes_and_nothing_else(tmp_path: Path, monkeypatch):
    for name in ("llama.Dockerfile", "llama-serve.sh", "llama-healthy.sh"):
        (tmp_path / name).write_bytes((context.DOCKER / name).read_bytes())
    before = context.sources_sha256("llama-cuda", LOCK)
    monkeypatch.setattr(context, "DOCKER", tmp_path)
    assert context.sources_sha256("llama-cuda", LOCK) == before
    (tmp_path / "llama-serve.sh").write_text("#!/bin/sh\n")
    assert context.sources_sha256("llama-cuda", LOCK) != before


def test_what_a_build_sees_has_the_same_modes_under_any_umask(tmp_path: Path):
    (tmp_path / "a").mkdir()
    before = os.umask(0o077)
    try:
        context.lay_out("llama-cuda", LOCK, None, tmp_path / "a")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "a").iterdir()}
    assert modes == {"Dockerfile": 0o644, "llama-serve.sh": 0o755, "llama-healthy.sh": 0o755}


# ---- wheels


def test_an_excerpt_holds_the_package_with_all_its_hashes_and_no_other():
    text = wheelhouse.excerpt(LOCK, ("xllamacpp",))
    assert text.startswith("xllamacpp==") and text.count("==") == 1
    (own,) = (entry for entry in re.split(r"\n(?=\S)", LOCK.read_text()) if entry.startswith("xllamacpp=="))
    assert text.count("--hash=sha256:") == own.count("--hash=sha256:") > 1


def test_a_package_that_the_lock_lacks_is_told():
    with pytest.raises(IntegrityError, match="lacks a package"):
        wheelhouse.excerpt(LOCK, ("xllamacpp", "no-such-package"))


def lock_of(folder: Path, text: str) -> Path:
    path = folder / "small.lock"
    path.write_text(text)
    return path


def test_a_folder_filled_for_another_lock_is_not_taken(tmp_path: Path, monkeypatch):
    lock = lock_of(tmp_path, "a==1 \\\n    --hash=sha256:00\n")
    filled = []

    def download(lock: Path, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "a-1-py3-none-any.whl").touch()
        filled.append(lock.read_text())

    monkeypatch.setattr(wheelhouse, "_download", download)
    folder = tmp_path / "wheels"
    wheelhouse.ensure(lock, folder)
    wheelhouse.ensure(lock, folder)
    assert len(filled) == 1
    lock.write_text("a==2 \\\n    --hash=sha256:00\n")
    wheelhouse.ensure(lock, folder)
    assert len(filled) == 2


def write_wheel(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("nothere-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: nothere\nVersion: 1\n")
        archive.writestr("nothere-1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("nothere-1.dist-info/RECORD", "")


def test_wheels_that_pip_cannot_find_or_that_differ_are_told(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    lock = lock_of(tmp_path, f"nothere==1 --hash=sha256:{'0' * 64}\n")
    with pytest.raises(MachineError, match="could not be fetched") as error:
        wheelhouse.ensure(lock, tmp_path / "wheels")
    assert "make wheelhouse" in error.value.next_command
    write_wheel(tmp_path / "nothere-1-py3-none-any.whl")
    with pytest.raises(IntegrityError, match="could not be fetched"):
        wheelhouse.ensure(lock, tmp_path / "wheels")


@pytest.mark.docker
def test_a_build_leaves_no_nameless_image_behind_unless_a_container_needs_it(own_tag, llama_image):
    plan = image.Plan(LOCK, wheels=real_wheels(), base=TEST_BASE)
    first = image.build("llama-cpu", plan)["id"]
    second = image.build("llama-cpu", replace(plan, base=engine.inspect(TEST_BASE)["Id"]))["id"]  # another label
    assert first != second and engine.inspect(first) is None
    container = engine.run(["create", second], "holding the image").strip()
    try:
        third = image.build("llama-cpu", plan)["id"]
        assert third != second and engine.inspect(second) is not None
    finally:
        engine.run(["rm", container], "letting it go")
        engine.run(["image", "rm", second], "removing it")
