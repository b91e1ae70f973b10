"""B66: the memory of the server before is waited for, and what is missing is told."""

import time

import pytest

from tests.serving.room import Room
from training.calculator.devices import Device
from training.core.errors import MachineError
from training.serving import memory

GIB = 1 << 30
RECORD = {"device": "cuda", "memory_bytes": 6 * GIB, "model": "/models/m.gguf"}


def device(free_bytes: int) -> Device:
    return Device("the GPU's memory", "cuda", 10 * GIB, 10 * GIB - free_bytes, ("process 4711: 9000 MiB",))


def test_the_start_comes_after_the_rise(monkeypatch: pytest.MonkeyPatch):
    begun = time.monotonic()
    monkeypatch.setattr(memory, "available", lambda _: device((8 if time.monotonic() - begun > 0.5 else 1) * GIB))
    said = []
    assert 0.4 < memory.wait_released(RECORD, lambda *parts: said.append(parts)) < 1.5
    assert said[0][1] == "1.00 GiB of 6.00 GiB free"


def test_memory_that_never_comes_back_is_told_with_its_holder(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory, "available", lambda _: device(GIB))
    with pytest.raises(MachineError) as caught:
        memory.wait_released(RECORD, budget_seconds=0.2)
    assert "1.00 GiB free after 0.2 s; held by process 4711" in caught.value.found
    assert "6.00 GiB" in caught.value.expected and caught.value.next_command == "nvidia-smi"


def test_what_the_model_in_service_gives_back_counts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory, "available", lambda _: device(2 * GIB))
    memory.require_enough(RECORD, {"memory_bytes": 5 * GIB})
    with pytest.raises(MachineError, match="not enough of the GPU"):
        memory.require_enough(RECORD, None)


def test_without_the_memory_the_new_model_is_not_started_and_the_old_one_is_back(
    room: Room, monkeypatch: pytest.MonkeyPatch
):
    room.start()
    monkeypatch.setattr(memory, "require_enough", lambda *_: None)
    monkeypatch.setattr(memory.wait_released, "__defaults__", (None, 0.2))
    whole = memory.available
    looks = iter([device(0)] * 5)
    monkeypatch.setattr(memory, "available", lambda kind: next(looks, whole(kind)))
    evaluation = room.evaluate()
    assert isinstance(evaluation.error, MachineError) and "not enough" in evaluation.error.what
    assert "health_wait" not in evaluation.document["seconds"] and room.serves() == "old-F16"


def test_needed_is_the_file_and_the_context(room: Room):
    record = room.start()["record"]
    cache = 256 * 1 * 64 * 2 * 2  # tokens, layers, width, keys and values, bytes
    assert record["memory_bytes"] == room.model("old").stat().st_size + cache
