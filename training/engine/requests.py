"""How a run is asked to stop: by a signal, or by a file named `pause` or `cancel` in its folder.

The first SIGINT, SIGTERM or SIGHUP, and a `pause` file, save and stop after the step; a second signal stops at once.
`cancel` stops after the step and saves nothing. A request is used up by the stop that it asked for.
"""

import contextlib
import logging
import signal
from collections.abc import Iterator
from pathlib import Path

from training.core import signals
from training.engine import torchrun

PAUSE, CANCEL = "pause", "cancel"
_logger = logging.getLogger(__name__)


class Requests:
    """The requests to one run."""

    def __init__(self, folder: Path):
        self._folder = folder
        self.signal: str | None = None

    def pending(self) -> str | None:
        """`cancel` or `pause`, where somebody asked for it."""
        if (self._folder / CANCEL).exists():
            return CANCEL
        return PAUSE if self.signal or (self._folder / PAUSE).exists() else None

    def clear(self) -> None:
        """Take away the files of requests that are done, or older than this start."""
        for name in (PAUSE, CANCEL):
            (self._folder / name).unlink(missing_ok=True)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Take the first signal as a request; the next one, of whichever kind, acts at once."""
        before = signals.handlers()

        def request(number: int, _frame: object) -> None:
            self.signal = signal.Signals(number).name
            for each, handler in before.items():
                signal.signal(each, handler)
            if torchrun.is_here():  # else the supervisor has said so
                _logger.warning("%s: the run stops after this step, saved; once more: without saving", self.signal)

        with signals.handled(request):
            yield
