"""Devices by name, by size, as found; and what their absence means."""

import os
import sys
from types import SimpleNamespace

import psutil
import pytest

from training.calculator import devices, fit, nvml
from training.core.errors import MachineError, RunError, UserError
from training.recipe.load import load

GIB = 1 << 30


def test_a_gpu_by_name_or_size(recipe):
    assert devices.choose(recipe(), gpu="rtx 3080 10gb").total_bytes == 10 * GIB
    assert devices.choose(recipe(), gpu="NVIDIA GeForce RTX 3090").total_bytes == 24 * GIB
    sized = devices.choose(recipe(), vram="10GiB")
    assert devices.is_same("NVIDIA GeForce RTX 3090", "RTX 3090 24GB")
    assert not devices.is_same("NVIDIA GeForce RTX 3080", "RTX 3080 Ti 12GB")
    assert (sized.total_bytes, sized.usable_bytes) == (10 * GIB, 10 * GIB - devices.MARGIN_BYTES)


@pytest.mark.parametrize(("name", "near"), [("RTX 3080", "RTX 3080 12GB"), ("RTX 3095", "RTX 3090 24GB")])
def test_an_unknown_or_ambiguous_name_is_told_with_the_nearest(recipe, name: str, near: str):
    with pytest.raises(UserError) as caught:
        devices.choose(recipe(), gpu=name)
    assert near in str(caught.value)


@pytest.mark.parametrize("size", ["ten", "10 gibibytes", "-1GiB", "1MiB", "0"])
def test_a_size_that_is_none_is_refused(recipe, size: str):
    with pytest.raises(UserError):
        devices.choose(recipe(), vram=size)


class FakeNvml(SimpleNamespace):
    """NVML with cards of 8 GiB; on each, this test's own process holds 1 GiB and another 3."""

    class NVMLError(Exception):
        pass

    uuids = ("GPU-aaaa1111",)

    def nvmlInit(self): ...
    def nvmlShutdown(self): ...
    def nvmlDeviceGetCount(self):
        return len(self.uuids)

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetUUID(self, handle):
        return self.uuids[handle]

    def nvmlDeviceGetName(self, handle):
        return b"Test GPU"

    def nvmlDeviceGetMemoryInfo(self, handle):
        return SimpleNamespace(total=8 * GIB, used=4 * GIB)

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        own = SimpleNamespace(pid=os.getpid(), usedGpuMemory=GIB)
        return [own, SimpleNamespace(pid=os.getppid(), usedGpuMemory=3 * GIB)]

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle):
        return [SimpleNamespace(pid=2**22 + 1, usedGpuMemory=None)]

    def nvmlSystemGetDriverVersion(self):
        return "999.1"


def raises(*_):
    raise FakeNvml.NVMLError("Unknown Error")


@pytest.fixture
def driver(monkeypatch):
    """Put a stand-in for the driver's library in its place; its calls can be replaced by name."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return lambda **calls: monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(**calls))


def test_a_gpu_found_is_taken_less_what_others_use_and_they_are_named(recipe, driver):
    driver()
    found = devices.choose(recipe("memory.weights=fp32"))
    parent = psutil.Process(os.getppid()).name()
    assert (found.kind, found.name, found.used_bytes, found.place) == ("cuda", "Test GPU", 4 * GIB, None)
    assert found.users == (f"process {os.getppid()} ({parent}): 3072 MiB", f"process {2**22 + 1}: memory not told")
    assert found.usable_bytes == 4 * GIB - devices.MARGIN_BYTES and nvml.ask().driver == "999.1"


@pytest.mark.parametrize(
    ("setting", "places"),
    [
        (None, ["GPU 0 of 3", "GPU 1 of 3", "GPU 2 of 3"]),
        ("1", ["GPU 1 of 3"]),
        ("2,0", ["GPU 2 of 3", "GPU 0 of 3"]),
        ("GPU-cc", ["GPU 2 of 3"]),
        ("GPU-bbbb2222, 0", ["GPU 1 of 3", "GPU 0 of 3"]),
        ("0,7,1", ["GPU 0 of 3"]),
        ("", []),
        ("-1", []),
        ("GPU-", []),
    ],
)
def test_of_several_gpus_those_are_taken_that_the_environment_leaves(driver, monkeypatch, setting, places):
    driver(uuids=("GPU-aaaa1111", "GPU-bbbb2222", "GPU-cccc3333"))
    if setting is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
    answer = nvml.ask()
    assert [gpu.place for gpu in answer.gpus] == places
    assert (answer.problem is None) == bool(places)
    assert places or "leaves none of the 3 GPUs" in answer.problem


def test_without_a_driver_fp32_is_held_against_this_machine_and_bf16_against_nothing(recipe, driver):
    driver(nvmlInit=raises)
    assert devices.choose(recipe("memory.weights=fp32")).kind == "cpu"
    assert devices.choose(recipe("memory.weights=bf16")) is None
    assert devices.gpus() == () and "no NVIDIA driver answers (Unknown Error)" in nvml.ask().problem


@pytest.mark.parametrize("call", ["nvmlDeviceGetCount", "nvmlDeviceGetMemoryInfo", "nvmlSystemGetDriverVersion"])
def test_a_driver_that_answers_with_errors_is_told_and_counts_as_none(driver, call: str):
    driver(**{call: raises})
    assert nvml.ask() == nvml.Answer((), None, "the NVIDIA driver answers with an error (Unknown Error)")


def test_a_refusal_names_who_uses_the_gpu(recipe, driver, tmp_path):
    recipe("data.micro_batch=4096")
    driver()
    with pytest.raises(RunError) as caught:
        fit.require(load(tmp_path / "small.yaml", ["data.micro_batch=4096"]))
    assert f"in use by process {os.getppid()}" in caught.value.expected and "3072 MiB" in caught.value.expected


def test_without_a_device_a_bf16_recipe_is_refused_for_the_reason(recipe, driver, tmp_path):
    recipe()
    driver(nvmlInit=raises)
    with pytest.raises(MachineError, match="no NVIDIA driver answers"):
        fit.require(load(tmp_path / "small.yaml", ["memory.weights=bf16"]))


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({"memory.max": "1000\n", "memory.current": "10\n"}, (1000, 10)),
        ({"memory.max": "max\n", "memory.current": "10\n"}, (None, 0)),
        ({"memory/memory.limit_in_bytes": "500", "memory/memory.usage_in_bytes": "5"}, (500, 5)),
        ({}, (None, 0)),
    ],
    ids=["v2", "v2 without a limit", "v1", "none"],
)
def test_a_containers_limit_is_seen(tmp_path, files: dict, limit: tuple):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert devices._container_limit(tmp_path) == limit
