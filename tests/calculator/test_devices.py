"""Devices by name, by size, as found; and what their absence means."""

import sys
from types import SimpleNamespace

import pytest

from training.calculator import devices
from training.core.errors import UserError

GIB = 1 << 30


def test_a_gpu_by_name_or_size(recipe):
    assert devices.choose(recipe(), gpu="rtx 3080 10gb").total_bytes == 10 * GIB
    assert devices.choose(recipe(), gpu="NVIDIA GeForce RTX 3090").total_bytes == 24 * GIB
    sized = devices.choose(recipe(), vram="10GiB")
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
    """NVML with one card of 8 GiB, of which a process holds 3."""

    class NVMLError(Exception):
        pass

    def nvmlInit(self): ...
    def nvmlShutdown(self): ...
    def nvmlDeviceGetCount(self):
        return 1

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetName(self, handle):
        return "Test GPU"

    def nvmlDeviceGetMemoryInfo(self, handle):
        return SimpleNamespace(total=8 * GIB, used=3 * GIB)

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        return [SimpleNamespace(pid=42, usedGpuMemory=3 * GIB)]

    def nvmlSystemGetDriverVersion(self):
        return "999.1"


def test_a_gpu_found_is_taken_less_what_others_use(recipe, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    found = devices.choose(recipe("memory.weights=fp32"))
    assert (found.kind, found.used_bytes, found.users) == ("cuda", 3 * GIB, ("process 42: 3072 MiB",))
    assert found.usable_bytes == 5 * GIB - devices.MARGIN_BYTES and devices.driver() == "999.1"


def test_without_a_driver_fp32_is_held_against_this_machine_and_bf16_against_nothing(recipe, monkeypatch):
    absent = FakeNvml(nvmlInit=lambda: (_ for _ in ()).throw(FakeNvml.NVMLError()))
    monkeypatch.setitem(sys.modules, "pynvml", absent)
    assert devices.choose(recipe("memory.weights=fp32")).kind == "cpu"
    assert devices.choose(recipe("memory.weights=bf16")) is None
    assert devices.gpus() == () and devices.driver() is None


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
