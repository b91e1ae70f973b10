"""The course of a run, read from its events: one curve, whatever was done twice.

A step that comes again after a kill or a resume takes the place of all that came after it before. Of a very long run
every second, fourth ... step is kept, so that a million lines are read in about a second and need little memory; the
first and the last step always count. Lines that are no JSON are passed over.
"""

import bisect
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from training.runs.events import EVENTS_FILE, parse_line

UNLIMITED_STEPS = 10**9
"""A plan of so many steps has no end but the clock's."""
MAX_POINTS = 4096
_MAX_EVENTS = 1000
_BLOCK_BYTES = 8 << 20
_STEP = b'"event": "step"'


@dataclass
class Course:
    """What happened in a run: the kept steps' events in order, validations, and the newest of all other events."""

    steps: list[dict] = field(default_factory=list)
    validations: list[dict] = field(default_factory=list)
    others: deque[dict] = field(default_factory=lambda: deque(maxlen=_MAX_EVENTS))
    planned_steps: int | None = None
    since: float = 0.0  # when the run was begun or gone on with for the last time
    last_time: float | None = None

    @property
    def last(self) -> dict | None:
        """The event of the newest step."""
        return self.steps[-1] if self.steps else None

    @property
    def best(self) -> dict | None:
        """The newest validation that was the best so far."""
        return next((one for one in reversed(self.validations) if one.get("best")), None)

    def losses(self) -> list[float]:
        """The loss in nats a token of each kept step."""
        return [one["train/loss_nats"] for one in self.steps]

    def tokens_per_second(self, window: int = 20) -> float | None:
        """The mean speed of the last kept steps."""
        speeds = [one["speed/tokens_per_second"] for one in self.steps[-window:] if "speed/tokens_per_second" in one]
        return sum(speeds) / len(speeds) if speeds else None

    def seconds_left(self, window: int = 20) -> float | None:
        """Seconds to the planned end at the pace of the last kept steps of this sitting; None where it is not known."""
        tail = [step for step in self.steps[-window:] if step["time"] >= self.since]
        if self.planned_steps is None or len(tail) < 2 or tail[-1]["step"] <= tail[0]["step"]:
            return None
        pace = (tail[-1]["time"] - tail[0]["time"]) / (tail[-1]["step"] - tail[0]["step"])
        return max(0.0, pace * (self.planned_steps - tail[-1]["step"]))


def read(folder: Path) -> Course:
    """Read a run's course; an empty one where it has no events yet."""
    course, last_line, count, stride = Course(), None, 0, 1
    for line in _lines(folder / EVENTS_FILE):
        if _STEP not in line:
            _take_other(course, last_line)
            _take_other(course, line)
            last_line = None
            continue
        last_line = line
        if count % stride == 0:
            _take_step(course, line)
            last_line = None
            if len(course.steps) > MAX_POINTS:
                del course.steps[1::2]  # an odd number: the last one stays
                stride *= 2
        count += 1
    _take_other(course, last_line)
    return course


def _take_other(course: Course, line: bytes | None) -> None:
    """Take an event in that is always kept; a step right before one of these is."""
    event = parse_line(line) if line else None
    if event is None:
        return
    if event["event"] == "step":
        _add_step(course, event)
        return
    course.last_time = event.get("time", course.last_time)
    if event["event"] in ("start", "resume"):
        _rewind(course, event["step"] + 1)
        course.since = event.get("time", 0.0)
    total = event.get("total_steps")
    if isinstance(total, int):
        course.planned_steps = total
    if event["event"] != "validation":
        course.others.append(event)
    elif _is_number(event.get("eval/loss_nats")):
        course.validations.append(event)


def _take_step(course: Course, line: bytes) -> None:
    event = parse_line(line)
    if event is not None and event["event"] == "step":
        _add_step(course, event)


def _add_step(course: Course, event: dict) -> None:
    if _is_number(event.get("train/loss_nats")) and _is_number(event.get("time")):
        _rewind(course, event["step"])
        course.last_time = event["time"]
        course.steps.append(event)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _rewind(course: Course, step: int) -> None:
    """Forget everything from this step on: it is being done again."""
    for kept in (course.steps, course.validations):
        if kept and kept[-1]["step"] >= step:
            del kept[bisect.bisect_left(kept, step, key=lambda event: event["step"]) :]


def _lines(path: Path) -> Iterator[bytes]:
    """The whole lines of a file, and its last one, cut or not."""
    if not path.is_file():
        return
    with open(path, "rb") as file:
        rest = b""
        while block := file.read(_BLOCK_BYTES):
            *whole, rest = (rest + block).split(b"\n")
            yield from whole
        yield rest
