"""What runs of this machine peaked at, beside what had been estimated."""

import pytest

from training.calculator import history
from training.calculator.devices import Device
from training.core import files, paths
from training.runs.folder import RunFolder

CPU = Device("this machine's memory", "cpu", 8 << 30, 0)
GPU = Device("NVIDIA GeForce RTX 3080", "cuda", 10 << 30, 0)


def finished(name: str, **summary: object) -> RunFolder:
    run = RunFolder.create(name, {"name": name})
    files.write_json(run.path / "summary.json", {"device": "cpu", "device_name": "cpu", "peak_bytes": 1000, **summary})
    return run


def test_the_runs_of_a_device_are_its_record():
    finished("low", estimate_bytes=1007)
    finished("high", estimate_bytes=1040)
    finished("card", estimate_bytes=2000, device="cuda", device_name="NVIDIA GeForce RTX 3080")
    finished("other-card", estimate_bytes=3000, device="cuda", device_name="NVIDIA GeForce RTX 3090")
    record = history.of_device(CPU)
    assert {(past.estimate_bytes, past.peak_bytes) for past in record} == {(1007, 1000), (1040, 1000)}
    assert history.in_words(record) == "2 runs, estimate over peak +0.7 % to +4.0 %"
    (past,) = history.of_device(GPU)
    assert past.to_json() == {"run": past.run, "estimate_bytes": 2000, "peak_bytes": 1000, "difference": 1.0}
    assert history.in_words((past,)) == "1 run, estimate over peak +100.0 %"
    assert history.of_device(None) == () and len(history.of_device(Device("RTX 3090 24GB", "cuda", 1, 0))) == 1


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "null", '{"device": "cpu"}', '{"device": "cpu", "estimate_bytes": null, "peak_bytes": 5}',
        '{"device": "cpu", "estimate_bytes": 5, "peak_bytes": 0}',
        '{"device": 7, "estimate_bytes": 5, "peak_bytes": 5}',
        '{"device": "cpu", "estimate_bytes": true, "peak_bytes": true}',
    ],
)  # fmt: skip
def test_a_damaged_run_is_passed_over(text: str):
    good = finished("good", estimate_bytes=1100)
    damaged = RunFolder.create("damaged", {"name": "damaged"})
    (damaged.path / "summary.json").write_text(text)
    RunFolder.create("unfinished", {"name": "unfinished"})
    assert [past.run for past in history.of_device(CPU)] == [good.id]


def test_a_machine_without_runs_has_no_record(own_roots):
    assert not paths.roots().runs.exists() and history.of_device(CPU) == ()
