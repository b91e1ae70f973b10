"""Progress on long work: a bar on a terminal, plain lines anywhere else (never a carriage return)."""

import sys
import time

from tqdm import tqdm

from training.core.log import say
from training.core.units import format_seconds


class Progress:
    """Progress of one piece of work, used as a context manager.

    Args:
        label: what is being done, in a word or two.
        total: how many units it will be, or None when that is not known.
        unit: the unit's name; `B` is shown with binary prefixes.
        line_every_seconds: how often a plain line comes where there is no terminal; 0 for one at each advance.
        done: units that were done before.
    """

    def __init__(
        self, label: str, total: int | None, unit: str = "it", line_every_seconds: float = 10.0, done: int = 0
    ):
        self.label, self.total, self.unit, self.line_every_seconds = label, total, unit, line_every_seconds
        self._begun_at = self._done = self._told = done
        self._note = ""
        self._bar: tqdm | None = None
        self._started = self._last_line = time.monotonic()

    def __enter__(self) -> "Progress":
        if sys.stderr is not None and sys.stderr.isatty():
            self._bar = tqdm(
                total=self.total, initial=self._done, desc=self.label, unit=self.unit, unit_scale=True,
                unit_divisor=1024 if self.unit == "B" else 1000, dynamic_ncols=True, leave=False,
            )  # fmt: skip
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
        elif self._told != self._done and self._last_line > self._started:
            say(self.line())  # what began to be told is told to its end

    def advance(self, count: int, note: str = "") -> None:
        """Say that `count` more units are done, with the figures of the moment in `note`."""
        self._done += count
        self._note = note or self._note
        if self._bar is not None:
            self._bar.total = self.total
            self._bar.set_postfix_str(self._note, refresh=False)
            self._bar.update(count)
        elif time.monotonic() - self._last_line >= self.line_every_seconds:
            self._last_line, self._told = time.monotonic(), self._done
            say(self.line())

    def write(self, text: str) -> None:
        """Print a line above the bar."""
        if self._bar is not None:
            self._bar.write(text, file=sys.stderr)
        else:
            say(text)

    def line(self) -> str:
        """The state as one plain line."""
        share = f" of {self.total} ({100 * self._done / self.total:.0f} %)" if self.total else ""
        note = f"  {self._note}" if self._note else ""
        return f"{self.label}: {self._done}{share} {self.unit}{note}{self._left()}"

    def _left(self) -> str:
        """The time left at the speed so far, where the end is known and not reached."""
        made = self._done - self._begun_at
        if not (self.total and made > 0 and self._done < self.total):
            return ""
        each = (time.monotonic() - self._started) / made
        return f"  {format_seconds(each * (self.total - self._done))} left"
