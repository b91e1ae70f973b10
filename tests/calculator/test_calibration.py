"""Records of a GPU, the estimates that read them, and the meter that they are made with."""

import json
import threading

import pytest

from tests.calculator.counts import Counts
from training.calculator import calibration, devices
from training.calculator.calibration import Comparison
from training.calculator.formula import estimate
from training.calculator.gpu_meter import GpuMeter, Reading
from training.core.errors import IntegrityError

MIB = 1 << 20


def record(**changes: object) -> dict:
    return {
        "schema": 1, "kind": calibration.KIND, "gpu": {"name": "NVIDIA GeForce RTX 3080", "total_bytes": 10240 * MIB},
        "torch": calibration.torch_version(), "driver": "570.1", "context_bytes": 333 * MIB, "workspace_bytes": 5 * MIB,
        **changes,
    }  # fmt: skip


@pytest.mark.parametrize("gpu", ["NVIDIA GeForce RTX 3080", "RTX 3080 10GB"])
def test_later_estimates_use_the_record_and_say_so(recipe, gpu: str):
    before = estimate(recipe(), on_cpu=False, gpu=gpu)
    calibration.write(record())
    after = estimate(recipe(), on_cpu=False, gpu=gpu)
    assert before.overhead[1].num_bytes == 1024 * MIB and after.overhead[1].num_bytes == 333 * MIB
    workspaces = {term.name: term.num_bytes for term in after.ranking[0].terms}["workspaces"]
    assert workspaces == 2 * 5 * MIB
    assert any("measured here on NVIDIA GeForce RTX 3080, driver 570.1" in line for line in after.assumptions)
    other = estimate(recipe(), on_cpu=False, gpu="RTX 3090 24GB")
    assert other.overhead[1].num_bytes == 1001 * MIB


def test_a_record_that_is_written_again_is_read_again(recipe):
    for size in (100, 200):
        calibration.write(record(context_bytes=size * MIB))
        assert calibration.find("RTX 3080 10GB").context_bytes == size * MIB


def test_a_record_of_another_torch_is_not_read(recipe, monkeypatch):
    calibration.write(record())
    monkeypatch.setattr(calibration, "torch_version", lambda: "9.9.0")
    assert calibration.find("RTX 3080 10GB") is None


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"kind": "cpu-calibration"}, "kind 'cpu-calibration'"),
        ({"schema": 2}, "schema 2"),
        ({"gpu": {"name": ""}}, "no name"),
        ({"driver": None}, "driver is not told"),
        ({"context_bytes": -1}, "context_bytes is -1"),
        ({"context_bytes": True}, "context_bytes is True"),
        ({"workspace_bytes": "5"}, "workspace_bytes is '5'"),
        ({"torch": "1.0"}, "with torch 1.0"),
        ({"gpu": {"name": "NVIDIA A100"}}, "the record of NVIDIA A100"),
    ],
)
def test_a_record_that_is_not_one_is_told_once_with_the_way_out(changes: dict, part: str):
    path = calibration.place("NVIDIA GeForce RTX 3080")
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(record() | changes))
    with pytest.raises(IntegrityError) as caught:
        calibration.find("RTX 3080 10GB")
    assert part in caught.value.found and caught.value.where == str(path)
    assert "make train-calibrate" in caught.value.expected


def test_a_cut_record_is_told(recipe):
    calibration.write(record())
    path = calibration.place("NVIDIA GeForce RTX 3080")
    path.write_text(path.read_text()[:50])
    with pytest.raises(IntegrityError):
        estimate(recipe(), on_cpu=False, gpu="RTX 3080 10GB")
    assert estimate(recipe(), on_cpu=True).peak.device_bytes > 0


@pytest.mark.parametrize(
    ("measured", "estimated", "under", "over", "passes"),
    [
        (100, 109, 0.10, 0.10, True), (100, 111, 0.10, 0.10, False), (100, 91, 0.10, 0.10, True),
        (100, 89, 0.10, 0.10, False), (100, 100, 0, None, True), (100, 99, 0, None, False), (100, 900, 0, None, True),
        (0, 0, 0.01, 0.01, True), (0, 1, 0.01, 0.01, False),
    ],
)  # fmt: skip
def test_a_comparison_passes_within_its_limits(measured, estimated, under, over, passes):
    assert Comparison("x", measured, estimated, under, over).passes is passes


def test_a_meter_takes_each_blocks_own_peaks_and_the_context_beside_them():
    counts, idle, context = Counts(), 700, 50
    meter = GpuMeter(counts, lambda: idle + context + counts.reserved, idle)
    for peak in (100, 300, 200):
        with meter.phase("forward"):
            counts.use(peak, 2 * peak)
            counts.use(10, 400)
    with meter.phase("backward"):
        counts.use(20, 400)
    assert meter.readings == {"forward": Reading(300, 600, 450), "backward": Reading(20, 400, 450)}
    assert meter.contexts == {"forward": 50, "backward": 50} and meter.peak == Reading(300, 600, 450)
    assert counts.synchronized == 8
    assert meter.grown(lambda: counts.use(25, 400)) == 5


def test_a_meter_sees_what_the_device_used_only_in_between():
    used, was_read = {"bytes": 1000}, threading.Event()

    def read() -> int:
        if used["bytes"] == 9000:
            was_read.set()
        return used["bytes"]

    meter = GpuMeter(Counts(), read, 400)
    with meter.phase("x"):
        used["bytes"] = 9000
        assert was_read.wait(10)
        used["bytes"] = 2000
    assert meter.readings["x"].device_bytes == 9000 - 400 and meter.contexts["x"] == 2000 - 400


def test_this_machines_name_of_a_gpu_is_a_files_name():
    assert (
        calibration.place("NVIDIA H100 80GB HBM3").name == f"nvidia-h100-80gb-hbm3-{calibration.torch_version()}.json"
    )
    assert devices.is_same("H100 80GB", "H100")
