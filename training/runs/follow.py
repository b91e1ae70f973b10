"""Following a run: what it does, a line each, until nobody works on it any more."""

import time
from collections.abc import Callable

from training.runs import narration
from training.runs.events import EVENTS_FILE, parse_line
from training.runs.folder import RunFolder

_POLL_SECONDS = 0.5
_STEP_EVERY_SECONDS = 2.0


def until_it_stops(run: RunFolder, tell: Callable[[str], None]) -> None:
    """Tell each new event of a run, steps at most every two seconds, until its status says that it has stopped."""
    place = _size(run)
    told_at = 0.0
    while True:
        status = run.status()  # before the look at the file: nothing is written after it has changed
        lines, place = _new_lines(run, place)
        for event in filter(None, map(parse_line, lines)):
            if event["event"] != "step" or time.monotonic() - told_at >= _STEP_EVERY_SECONDS:
                tell(f"step {event['step']}: {narration.in_words(event)}")
                told_at = time.monotonic() if event["event"] == "step" else told_at
        if status not in ("queued", "waiting", "running"):
            return tell(f"{run.id}: {status}")
        time.sleep(_POLL_SECONDS)


def _size(run: RunFolder) -> int:
    path = run.path / EVENTS_FILE
    return path.stat().st_size if path.is_file() else 0


def _new_lines(run: RunFolder, place: int) -> tuple[list[bytes], int]:
    """The whole lines from a place in the file on, and the place behind them."""
    if _size(run) <= place:
        return [], place
    with open(run.path / EVENTS_FILE, "rb") as file:
        file.seek(place)
        whole, newline, _ = file.read().rpartition(b"\n")
    return whole.split(b"\n"), place + len(whole) + len(newline)
