"""Swaps cut off by signals at any moment: the old model is served at the end, by the server's own word."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.serving.room import Room
from tests.serving.storm import rounds
from training.llamacpp.client import Client
from training.llamacpp.server import ServerProcess, find
from training.serving import control, evaluate, swap
from training.serving.local import LocalRuntime
from training.serving.service import Service, open_service


def num_servers(room: Room) -> int:
    """Servers that serve one of this test's models; a leftover of any start would be counted."""
    import psutil

    lines = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    return sum("training.llamacpp.server_main" in line and str(room.data) in line for line in lines)


def storm(room: Room, seed: int, count: int) -> None:
    rounds(room, seed=seed, count=count, longest_seconds=1.6, num_servers=lambda: num_servers(room))


def test_after_signals_at_random_moments_the_old_model_is_served(room: Room):
    storm(room, seed=1, count=3)


@pytest.mark.slow
def test_after_many_signals_at_random_moments_the_old_model_is_served(room: Room):
    storm(room, seed=2, count=int(os.environ.get("TRAINYARD_SWAPS", "30")))


@pytest.mark.parametrize("numbers", [[signal.SIGINT], [signal.SIGTERM, signal.SIGTERM, signal.SIGINT]], ids=str)
def test_signals_while_a_prompt_is_asked_are_followed_by_the_restore(
    room: Room, monkeypatch: pytest.MonkeyPatch, numbers: list[signal.Signals]
):
    room.start()
    restore = swap.restore

    def restore_under_fire(*args: object, **settings: object) -> dict:
        for number in numbers[1:]:
            os.kill(os.getpid(), number)
        return restore(*args, **settings)

    monkeypatch.setattr(evaluate.prompts, "ask", lambda *_: os.kill(os.getpid(), numbers[0]) or time.sleep(5))
    monkeypatch.setattr(swap, "restore", restore_under_fire)
    evaluation = room.evaluate()
    assert evaluation.document["verdict"] == "INTERRUPTED" and evaluation.document["exit_code"] == 130
    assert evaluation.document["error"]["kind"] == numbers[0].name
    assert evaluation.document["restore"]["proved"] and room.serves() == "old-F16"


def cut_off(room: Room, monkeypatch: pytest.MonkeyPatch, target: object, name: str, *, after: bool) -> None:
    """Run a swap that ends, as if by SIGKILL, right before or after a call; what it has made is left as it is."""

    class PowerCut(Exception):
        pass

    call = getattr(target, name)

    def cut(*args: object, **settings: object) -> object:
        if after:
            call(*args, **settings)
        raise PowerCut

    with monkeypatch.context() as patch:
        patch.setattr(target, name, cut)
        patch.setattr(swap, "restore", lambda *_, **__: {"seconds": 0.0, "health_wait": 0.0})
        with pytest.raises(PowerCut):
            room.evaluate()
    assert open_service(room.name).journal() is not None


MOMENTS = [
    (swap, "_swap_in", False),  # the journal is written
    (LocalRuntime, "start", False),  # the old server is stopped
    (LocalRuntime, "start", True),  # the new one runs, and nobody has written down which process it is
    pytest.param(LocalRuntime, "stop", True, marks=pytest.mark.slow),
    pytest.param(swap, "_swap_in", True, marks=pytest.mark.slow),
    pytest.param(LocalRuntime, "wait_healthy", True, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("target", "name", "after"), MOMENTS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_a_swap_cut_off_at_each_step_is_put_right(
    room: Room, monkeypatch: pytest.MonkeyPatch, target: object, name: str, after: bool
):
    room.start()
    if name == "wait_healthy":  # that of the new server, not the look at the old one
        monkeypatch.setattr(Service, "state", _state_without_waiting)
    cut_off(room, monkeypatch, target, name, after=after)
    assert control.status(room.name)["unfinished"]
    control.restore(room.name)
    assert room.serves() == "old-F16" and num_servers(room) == 1 and open_service(room.name).journal() is None


@pytest.mark.parametrize(("target", "name", "after"), [(LocalRuntime, "start", False), (LocalRuntime, "start", True)])
def test_a_stopped_service_is_stopped_again_after_a_cut(
    room: Room, monkeypatch: pytest.MonkeyPatch, target: object, name: str, after: bool
):
    cut_off(room, monkeypatch, target, name, after=after)
    control.restore(room.name)
    assert room.serves() is None and num_servers(room) == 0 and open_service(room.name).runtime.record() is None


def _state_without_waiting(self: Service, **_: object) -> dict:
    record = self.runtime.record()
    loaded = Client(self.runtime.url(record)).model_info()
    return {"running": True, "healthy": True, "record": record, "loaded": loaded}


def test_the_next_evaluation_finishes_the_restore_first(room: Room, monkeypatch: pytest.MonkeyPatch):
    room.start()
    cut_off(room, monkeypatch, swap, "_swap_in", after=True)
    evaluation = room.evaluate()
    assert evaluation.error is None and evaluation.document["restored_first"]["proved"]
    assert evaluation.document["previous"]["loaded"]["path"].endswith("old-F16.gguf") and room.serves() == "old-F16"


def test_a_restore_that_is_cut_off_can_be_begun_again(room: Room, monkeypatch: pytest.MonkeyPatch):
    room.start()
    cut_off(room, monkeypatch, swap, "_swap_in", after=True)
    with monkeypatch.context() as patch:
        patch.setattr(swap, "_prove", lambda *_: os.kill(os.getpid(), 0) or _cut())
        with pytest.raises(KeyboardInterrupt):
            control.restore(room.name)
    assert control.status(room.name)["unfinished"] and num_servers(room) == 1
    assert control.restore(room.name)["restore"]["proved"]
    assert room.serves() == "old-F16" and num_servers(room) == 1


def _cut() -> None:
    raise KeyboardInterrupt


def test_stopping_ends_what_an_unfinished_swap_has_left(room: Room, monkeypatch: pytest.MonkeyPatch):
    room.start()
    cut_off(room, monkeypatch, swap, "_swap_in", after=True)
    control.stop(room.name)
    assert num_servers(room) == 0 and room.serves() is None
    assert control.status(room.name) == {
        "service": room.name, "running": False, "healthy": False, "record": None, "loaded": None, "unfinished": False,
        "holder": None,
    }  # fmt: skip


def test_a_start_killed_before_it_wrote_down_its_process_is_found_by_its_token(
    room: Room, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    service = open_service(room.name)
    record = room.start()["record"]
    service.runtime.leave(record | {"process": None})
    assert find(record["token"]) == [record["process"]]
    assert control.status(room.name)["healthy"]
    control.stop(room.name)
    assert num_servers(room) == 0


def test_a_crashed_service_counts_as_stopped_and_its_record_stays(room: Room):
    record = room.start()["record"]
    ServerProcess(record["process"], room.port, Path(record["log"])).stop()
    assert not control.status(room.name)["running"] and control.status(room.name)["record"] == record
    evaluation = room.evaluate()
    assert evaluation.error is None and evaluation.document["restore"]["state"] == "stopped"
    assert control.status(room.name)["record"] == record
