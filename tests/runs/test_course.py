"""The course of a run: one curve after kills and resumes, whatever the file has gone through, however long it is."""

import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from matplotlib.figure import Figure

from training.runs import course, picture
from training.runs.events import EventLog


def lines(*events: dict) -> str:
    return "".join(json.dumps(event) + "\n" for event in events)


def step(number: int, loss: float, at: float = 0.0, **others: object) -> dict:
    return {"time": at, "event": "step", "step": number, "train/loss_nats": loss, **others}


def validation(number: int, loss: float, best: bool = False) -> dict:
    return {"time": 0, "event": "validation", "step": number, "best": best, "eval/loss_nats": loss}


def read(folder: Path, text: str) -> course.Course:
    (folder / "events.jsonl").write_text(text)
    return course.read(folder)


def points(found: course.Course) -> list[tuple[int, float]]:
    return [(one["step"], one["train/loss_nats"]) for one in found.steps]


def test_a_picture_of_few_steps_has_marks_at_whole_steps_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: seen.append(self))
    found = read(
        tmp_path, lines(*(step(number, 9.0 - number) for number in range(1, 4)), validation(2, 7.0, best=True))
    )
    shown = SimpleNamespace(course=found, run=SimpleNamespace(id="few"))
    picture.draw([shown], tmp_path / "loss.png")
    [axes] = seen[0].axes
    assert len(axes.get_xticks()) >= 3 and all(tick == int(tick) for tick in axes.get_xticks())


def test_steps_that_are_done_again_take_the_place_of_all_that_came_after_them(tmp_path: Path):
    """A run of 5 steps, killed, goes on from its checkpoint of step 2 and is only at step 3 yet."""
    first = [step(number, 9.0 - number) for number in range(1, 6)]
    text = lines({"time": 0, "event": "start", "step": 0, "total_steps": 8}, *first[:4], validation(4, 3.0, best=True))
    text += lines(first[4], {"time": 0, "event": "resume", "step": 2}, step(3, 1.5))
    found = read(tmp_path, text)
    assert points(found) == [(1, 8.0), (2, 7.0), (3, 1.5)] and found.validations == [] and found.best is None
    assert found.planned_steps == 8 and found.last["step"] == 3
    assert [event["event"] for event in found.others] == ["start", "resume"]


def test_a_fresh_start_forgets_every_step(tmp_path: Path):
    start = {"time": 0, "event": "start", "step": 0}
    assert points(read(tmp_path, lines(start, step(1, 5.0), start, step(1, 4.0)))) == [(1, 4.0)]


@pytest.mark.parametrize(
    "damage",
    [
        b'{"time": 1, "event": "st', b"\0" * 4096, b'[1, "event"]', b'{"event": "step", "step": "7"}', b"\xff\xfe{",
        b'{"time": 1, "event": "step", "step": 3, "train/loss_nats": NaN}', b'{"event": "step", "step": 3}',
        b"[" * 99999,
    ],
)  # fmt: skip
def test_lines_that_are_none_are_passed_over(tmp_path: Path, damage: bytes):
    """B11's kind: a crash, a power cut or a full disk leaves anything in the last line or, later, in the middle."""
    for middle in (b"\n", b""):
        good = [lines(step(number, 4.0)).encode() for number in (1, 2)]
        (tmp_path / "events.jsonl").write_bytes(good[0] + damage + b"\n" + (good[1] if middle else b"") + damage)
        assert points(course.read(tmp_path)) == [(1, 4.0), (2, 4.0)][: 2 if middle else 1]


def test_no_events_and_a_folder_in_their_place_are_an_empty_course(tmp_path: Path):
    assert course.read(tmp_path).steps == []
    (tmp_path / "events.jsonl").mkdir()
    assert course.read(tmp_path).last is None and course.read(tmp_path).seconds_left() is None


def test_speed_and_time_left_are_those_of_the_last_steps(tmp_path: Path):
    slow = [step(number, 1.0, at=100.0 * number, **{"speed/tokens_per_second": 1.0}) for number in range(1, 31)]
    quick = [step(number, 1.0, at=3000 + 2.0 * (number - 30), **{"speed/tokens_per_second": 50.0})
             for number in range(31, 51)]  # fmt: skip
    found = read(tmp_path, lines({"time": 0, "event": "start", "step": 0, "total_steps": 100}, *slow, *quick))
    assert found.tokens_per_second() == 50.0 and found.seconds_left() == pytest.approx(100.0)
    found.since = 3035.0  # resumed after step 47: four hours of pause are nobody's pace
    found.steps[-4]["time"] -= 14_400
    assert found.seconds_left() == pytest.approx(100.0)
    found.planned_steps = None
    assert found.seconds_left() is None


def test_a_long_run_is_thinned_evenly_and_keeps_its_ends(tmp_path: Path):
    log = EventLog(tmp_path)
    for number in range(1, 20_002):
        log.write("step", number, **{"train/loss_nats": 1.0 / number})
    log.close()
    found = points(course.read(tmp_path))
    assert found[0] == (1, 1.0) and found[-1] == (20_001, 1.0 / 20_001)
    gaps = {later[0] - earlier[0] for earlier, later in itertools.pairwise(found)}
    assert len(found) <= course.MAX_POINTS + 1 and max(gaps) <= 8
