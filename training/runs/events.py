"""`events.jsonl`: what a run did, one JSON object a line, written as it happens.

Metric names carry their units (`train/loss_nats`). The file only grows; a last line that a crash cut short is
ignored by the reader and closed by the next writer.
"""

import json
import time
from collections.abc import Iterator
from pathlib import Path

EVENTS_FILE = "events.jsonl"


class EventLog:
    """Appends to a run's events; each line is flushed at once."""

    def __init__(self, folder: Path):
        self._file = open(folder / EVENTS_FILE, "a+b")  # noqa: SIM115 (open for the run's whole life)
        self._close_cut_line()

    def _close_cut_line(self) -> None:
        if self._file.seek(0, 2) == 0:
            return
        self._file.seek(-1, 2)
        if self._file.read(1) != b"\n":
            self._file.write(b"\n")

    def write(self, event: str, step: int, **values: object) -> None:
        """Append one event with the wall clock's time; values must be JSON without NaN."""
        line = {"time": round(time.time(), 3), "event": event, "step": step, **values}
        self._file.write(json.dumps(line, ensure_ascii=False, allow_nan=False).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def parse_line(line: bytes | str) -> dict | None:
    """An event of one line; None for a line that is none (cut short by a crash, or damaged)."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if isinstance(value, dict) and isinstance(value.get("event"), str) and isinstance(value.get("step"), int):
        return value
    return None


def read_events(folder: Path, event: str | None = None) -> Iterator[dict]:
    """The events of a run in order, all or those of one name."""
    path = folder / EVENTS_FILE
    if not path.is_file():
        return
    with open(path, "rb") as file:
        for line in file:
            value = parse_line(line)
            if value is not None and event in (None, value["event"]):
                yield value
