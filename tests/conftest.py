"""Every test has a data root and a cache of its own, and no report of a test reaches the real logs.

Tests marked `docker` use a real engine, images and a Compose project of their own; where there is no engine they are
skipped by name, and with REQUIRE_DOCKER=1 that is a failure. So it is with `gpu` and REQUIRE_GPU=1. `make test` runs
files side by side.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import psutil
import pytest
from xdist.scheduler import LoadScopeScheduling

from training.calculator import nvml
from training.containers import engine, image, wheelhouse
from training.core import files, locks, paths
from training.engine import base_fetch
from training.engine.pulse import Pulse

REAL_CACHE = paths.roots().cache
TEST_BASE = "debian:bookworm-slim"
BASE = "smollm2-135m-instruct"


@pytest.fixture(autouse=True)
def own_roots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Point DATA_ROOT and TRAINYARD_CACHE into the test's own folder; returns the data root."""
    data = tmp_path / "data"
    monkeypatch.setenv("DATA_ROOT", str(data))
    monkeypatch.setenv("TRAINYARD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("RUNTIME", "local")
    for name in ("MAKELEVEL", "MAKEFLAGS", "TRAINYARD_COMMAND"):
        monkeypatch.delenv(name, raising=False)
    return data


@pytest.fixture(autouse=True)
def engine_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let runs of this process train in it, where they need not import torch again; what a test starts as a command of
    its own has an engine of its own."""
    from training.engine import launch, supervisor

    monkeypatch.setattr(supervisor, "train", lambda run, _locks: launch.train(run, Pulse.create()))


@pytest.fixture(autouse=True)
def own_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the reports of commands that run inside the test's process in its own folder."""
    from training.core.report import Report

    keep = Report.publish
    monkeypatch.setattr(Report, "publish", lambda self, folder=tmp_path / "reports": keep(self, folder))


def pytest_configure() -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job ignores it, and so would children
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.pop("ARGS", None)  # `make test ARGS=...` means this program, and no other target that a test calls
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if num_workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):  # torch's threads wait busily for one another
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // int(num_workers))))
    os.environ.setdefault("TRAINYARD_TAG", f"test-{image.checkout()}")
    os.environ.setdefault("COMPOSE_PROJECT_NAME", f"trainyard-test-{os.getpid()}")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """With `-n auto`: as many as there are cores, of 6 GiB of memory each."""
    return max(1, min(len(os.sched_getaffinity(0)), int(psutil.virtual_memory().available // (6 << 30))))


class Scheduling(LoadScopeScheduling):
    """A file to a worker; those that need the one Docker engine, or the GPU, follow each other in the same one."""

    def _split_scope(self, nodeid: str) -> str:
        return _group(paths.REPOSITORY / nodeid.partition("::")[0])


@cache
def _group(path: Path) -> str:
    text = path.read_text()
    return next((name for name in ("docker", "gpu") if f"mark.{name}" in text), str(path))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> Scheduling:
    return Scheduling(config, log)


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker, missing in (("docker", _missing), ("gpu", lambda: nvml.ask().problem)):
        if item.get_closest_marker(marker) is None or not (why := missing()):
            continue
        required = f"REQUIRE_{marker.upper()}"
        if os.environ.get(required) == "1":
            pytest.fail(f"{required}=1, and there is none: {why}", pytrace=False)
        pytest.skip(f"{item.name}: {why}")


@cache
def _missing() -> str | None:
    """What the machine lacks for a test with an engine, in a line; None where nothing."""
    problems = engine.problems(gpu=False)
    if not problems and engine.inspect(TEST_BASE) is None:
        return f"the base {TEST_BASE} is not on this machine"
    return "; ".join(problem.what for problem in problems) or None


def real_wheels() -> Path:
    """The machine's own folder of wheels, so that no test fetches them again."""
    lock = wheelhouse.lock_path("cpu")
    return REAL_CACHE / "wheels" / wheelhouse.default_folder(lock).name


@contextmanager
def small_disk(place: Path, size: str) -> Iterator[Path]:
    """A real file system of a size (`1m`) at a place that is made for it; skips where this user may mount none."""
    place.mkdir(parents=True)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", place], capture_output=True).returncode:
        pytest.skip("mounting a tmpfs needs root")
    try:
        yield place
    finally:
        subprocess.run(["umount", place], check=True)


@contextmanager
def made_once(place: Path) -> Iterator[bool]:
    """Whether something of this machine's cache is there; the tests beside this one wait while the block makes it."""
    with locks.hold(place.with_name(f"{place.name}.lock"), "the tests", resource=str(place)):
        yield place.exists()


def extra(name: str) -> Path:
    """A folder with the packages of an extra's lock file, their hashes held, installed once for this machine."""
    lock = wheelhouse.lock_path(name)
    folder = REAL_CACHE / "tests" / "extras" / wheelhouse.default_folder(lock).name
    with made_once(folder) as is_there:
        if is_there:
            return folder
        with files.atomic_folder(folder) as partial:
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--require-hashes"]
            command += ["--only-binary", ":all:", "--target", str(partial), "--requirement", str(lock)]
            subprocess.run(command, check=True)
    return folder


@pytest.fixture
def with_trl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process find TRL, as where its extra is installed."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(extra("trl"))])


@pytest.fixture(scope="session")
def fetched_base() -> Path:
    """The folder of SmolLM2-135M-Instruct as `base-fetch` makes it, once for this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DATA_ROOT", str(REAL_CACHE / "tests"))
        return base_fetch.fetch(BASE).base.folder


@pytest.fixture
def smollm2(fetched_base: Path) -> Path:
    """SmolLM2-135M-Instruct as a base of the test's own data root; returns its folder there."""
    folder = paths.roots().bases / BASE
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.symlink_to(fetched_base)
    return folder


def _built(name: str) -> dict:
    return image.build(name, image.Plan(wheelhouse.lock_path("cpu"), wheels=real_wheels(), base=TEST_BASE))


def remove_images(tag: str) -> None:
    """Take a tag's images away again; the builder keeps what it needs to be quick the next time."""
    for name in ("system", "compiler", *image.NAMES):
        engine.succeeds(["image", "rm", "--force", f"trainyard-{name}:{tag}"])


@pytest.fixture
def own_tag(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A tag for images of the test's own, which go with it."""
    tag = f"test-{os.getpid()}"
    monkeypatch.setenv("TRAINYARD_TAG", tag)
    yield tag
    remove_images(tag)


@pytest.fixture(scope="session")
def llama_image() -> dict:
    """The server image without a GPU, built for this session: its record."""
    return _built("llama-cpu")


@pytest.fixture(scope="session")
def train_image() -> dict:
    """The train image, built for this session: its record."""
    return _built("train")


@pytest.fixture(scope="session")
def export_image(train_image: dict) -> dict:
    """The export image on the train image, built for this session: its record."""
    return _built("export")
