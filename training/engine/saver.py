"""Saving in the background: a thread writes a snapshot while training goes on; at most one is on its way.

An error of the thread is raised in the run at the next step, so a run does not go on with checkpoints that are none.
The copy takes host memory of the checkpoint's size; where there is not that much the run waits for the disk instead.
"""

import threading
from collections.abc import Callable

from training.calculator import devices
from training.core import timing
from training.engine.checkpoint import Snapshot

_MEMORY_LEFT_BYTES = 256 << 20
_LOOK_SECONDS = 1.0


class Saver:
    """Writes snapshots one after another.

    Args:
        write: writes one to the disk; called in another thread.
        in_background: whether training goes on meanwhile.
        on_part: called in the main thread, while it waits, as parts of a snapshot are done.
    """

    def __init__(
        self, write: Callable[[Snapshot], None], in_background: bool, on_part: Callable[[], None] = lambda: None
    ):
        self._write, self._in_background, self._on_part = write, in_background, on_part
        self._num_parts = 0
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.seconds = 0.0  # of the last write that is done

    def save(self, snapshot: Snapshot) -> None:
        """Write a snapshot; the one before must be done, see `wait`."""
        if not (self._in_background and _has_room(snapshot.num_bytes)):
            self._timed(snapshot)
            return
        # a daemon, so that a second interrupt need not wait for a disk that hangs: what is half written is never read
        self._thread = threading.Thread(target=self._run, args=(snapshot.copied(),), name="checkpoint", daemon=True)
        self._thread.start()

    def _run(self, snapshot: Snapshot) -> None:
        try:
            self._timed(snapshot)
        except BaseException as error:
            self._error = error

    def _timed(self, snapshot: Snapshot) -> None:
        self.seconds = timing.seconds(lambda: self._write(snapshot))

    def count_part(self) -> None:
        """Say that a part of the snapshot is written; `write` calls it, in whatever thread it runs."""
        self._num_parts += 1
        if threading.current_thread() is threading.main_thread():
            self._on_part()

    def check(self) -> None:
        """Raise what went wrong in the background since the last look."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def wait(self) -> None:
        """Wait until the disk has what was to be saved. Raises what went wrong."""
        if self._thread is not None:
            told = self._num_parts
            while self._thread.is_alive():
                self._thread.join(_LOOK_SECONDS)
                if told != self._num_parts:
                    told = self._num_parts
                    self._on_part()
            self._thread = None
        self.check()


def _has_room(num_bytes: int) -> bool:
    """Whether host memory can hold a copy and still leave something."""
    return devices.this_machine().available_bytes >= num_bytes + _MEMORY_LEFT_BYTES
