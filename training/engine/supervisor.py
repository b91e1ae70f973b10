"""The engine in a process of its own, watched: what it says, how long it is silent, and what it died of.

Invariants: signals reach the engine once, through here (it has a process group of its own); it never outlives this
process. A main thread that is silent for longer than its stage allows has its stacks written to the run's `stacks.log`,
is ended, and is started again from the last checkpoint, at most `MAX_RESTARTS` times. torch is imported in the engine
alone.
"""

import contextlib
import dataclasses
import json
import logging
import os
import signal
import subprocess
import sys
import time

from training.core import errors, memory_kills, process, signals
from training.core.errors import RunError
from training.core.report import make_command
from training.core.units import format_bytes, format_seconds
from training.engine.pulse import Beat, Pulse
from training.runs.events import EventLog
from training.runs.folder import STACKS_FILE, RunFolder

ENGINE = (sys.executable, "-m", "training.engine.child")
MAX_RESTARTS = 2
_POLL_SECONDS = 1.0
_STACKS_SECONDS = 3.0
_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Limits:
    """How long the engine's main thread may be silent in a stage, in seconds.

    Args:
        times_longest: what has taken long may take this many times as long again, where that is more.
    """

    loading: float = 1800.0
    step: float = 900.0
    times_longest: float = 10.0

    def of(self, beat: Beat) -> float:
        """The limit that holds after a movement. A first step compiles and a validation is long: both as loading."""
        floor = self.step if beat.stage == "step" else self.loading
        return max(floor, self.times_longest * beat.longest_seconds)


@dataclasses.dataclass(frozen=True)
class End:
    """How an engine ended: its exit status, what it left, and what was seen of it."""

    status: int
    document: dict
    beat: Beat
    signalled: str | None
    silent_seconds: float | None
    memory: str


def train(run: RunFolder, descriptors: tuple[int, ...] = (), limits: Limits | None = None) -> dict:
    """Train a run to its end and return its summary; `descriptors` are the locks that the engine holds as well.

    Raises what the engine raised, KeyboardInterrupt where it was told to stop, RunError where it died or hung.
    """
    for restarts in range(MAX_RESTARTS + 1):
        end = _one_engine(run, descriptors, limits or Limits())
        if end.silent_seconds is None or end.signalled or restarts == MAX_RESTARTS:
            return _outcome(run, end)
        _note(run, end, restarts + 1)
    raise AssertionError("unreachable")


def _one_engine(run: RunFolder, descriptors: tuple[int, ...], limits: Limits) -> End:
    pulse, result = Pulse.create(), os.memfd_create("result")
    try:
        engine = _Engine(run, pulse, result, descriptors)
        return engine.watched(limits)
    finally:
        pulse.close()
        os.close(result)
        stacks = run.path / STACKS_FILE
        if stacks.is_file() and not stacks.stat().st_size:
            stacks.unlink()


class _Engine:
    """One process of the engine, from its start to its end."""

    def __init__(self, run: RunFolder, pulse: Pulse, result: int, descriptors: tuple[int, ...]):
        self.run, self.pulse, self.result = run, pulse, result
        self.signalled: str | None = None
        self._num_signals = 0
        self._kills, self._peak_bytes = memory_kills.count(), 0
        self._locks = descriptors
        self._process: subprocess.Popen | None = None

    def _start(self) -> None:
        page, result = self.pulse.descriptor, self.result
        self._process = subprocess.Popen(
            [*ENGINE, str(self.run.path), *map(str, (page, result, os.getpid()))],
            pass_fds=(page, result, *self._locks), process_group=0,
            stdin=subprocess.DEVNULL, stdout=sys.stderr if _has_stderr() else subprocess.DEVNULL,
        )  # fmt: skip
        if self.signalled:  # in the moment of its start
            self._process.send_signal(signal.Signals[self.signalled])

    def watched(self, limits: Limits) -> End:
        """Wait for the process's end, passing signals on, and end it where it is silent for too long."""
        silent = None
        with signals.handled(self._forward):
            self._start()
            watched_since = looked = time.monotonic()
            while not self._has_ended(_POLL_SECONDS):
                now = time.monotonic()
                if now - looked > 10 * _POLL_SECONDS:  # this process was itself stopped, perhaps both were
                    watched_since = now
                looked = now
                beat = self.pulse.last()
                self._peak_bytes = max(self._peak_bytes, process.peak_rss_bytes(self._process.pid))
                if (waited := now - max(beat.at, watched_since)) > limits.of(beat):
                    silent = waited
                    self._end_silent(beat, waited)
        return End(
            self._process.returncode, self._document(), self.pulse.last(), self.signalled, silent, self._memory()
        )

    def _has_ended(self, seconds: float) -> bool:
        try:
            self._process.wait(seconds)
            return True
        except subprocess.TimeoutExpired:
            return False

    def _end_silent(self, beat: Beat, seconds: float) -> None:
        """Have all stacks written down, then kill: what hangs does not save."""
        _logger.warning(
            "the engine has been silent for %s (%s, step %d); its stacks go to %s", format_seconds(seconds), beat.stage,
            beat.step, self.run.path / STACKS_FILE,
        )  # fmt: skip
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGUSR1)
        if not self._has_ended(_STACKS_SECONDS):
            self._process.kill()
            self._process.wait()

    def _forward(self, number: int, _frame: object) -> None:
        """Pass a signal on: the first lets the engine save, a second one stops it at once, a third one kills it."""
        self.signalled = signal.Signals(number).name
        self._num_signals += 1
        if self._process is not None:
            self._process.send_signal(number if self._num_signals < 3 else signal.SIGKILL)

    def _document(self) -> dict:
        try:
            return json.loads(os.pread(self.result, os.fstat(self.result).st_size, 0))
        except ValueError:
            return {}

    def _memory(self) -> str:
        """What is known of memory, for a death by SIGKILL."""
        held = f"it held {format_bytes(self._peak_bytes)} at the most"
        kills = memory_kills.count()
        if None in (kills, self._kills):
            return held
        if kills > self._kills:
            return f"the kernel has ended a process for want of memory since it began; {held}"
        return f"the kernel has ended nothing for want of memory; {held}"


def _has_stderr() -> bool:
    try:
        os.fstat(sys.stderr.fileno())
        return True
    except (AttributeError, OSError, ValueError):
        return False


def _note(run: RunFolder, end: End, number: int) -> None:
    """Write down that the engine was silent, and is started again."""
    log = EventLog(run.path)
    beat, seconds = end.beat, round(end.silent_seconds, 1)
    log.write("restart", beat.step, number=number, stage=beat.stage, silent_seconds=seconds)
    log.close()
    _logger.warning("starting the engine again from the last checkpoint (%d of %d)", number, MAX_RESTARTS)


def _outcome(run: RunFolder, end: End) -> dict:
    """The summary; or raise what came instead."""
    if "summary" in end.document:
        return end.document["summary"]
    raise _error(run, end)


def _error(run: RunFolder, end: End) -> BaseException:
    if name := end.document.get("interrupted") or (end.signalled if not end.document else None):
        what = end.document.get("what") or f"next: {make_command('resume', RUN=run.id)}"
        return signals.interruption(name, what)
    if "error" in end.document:
        return errors.from_json(end.document["error"])
    if "fault" in end.document:
        return RuntimeError(end.document["fault"])
    return _death(run, end)


def _death(run: RunFolder, end: End) -> RunError:
    """What is said of an engine that left no word."""
    again, stacks = make_command("resume", RUN=run.id), run.path / STACKS_FILE
    place = f"{end.beat.stage}, step {end.beat.step}"
    if end.silent_seconds is not None:
        return RunError(
            "the engine hangs", where=stacks, expected="a step within its time", next_command=again,
            found=f"{format_seconds(end.silent_seconds)} of silence ({place}), after {MAX_RESTARTS} restarts",
        )  # fmt: skip
    if end.status < 0:
        name = signal.Signals(-end.status).name
        memory = f"; {end.memory}" if name == "SIGKILL" else ""
        return RunError(
            f"the engine was ended by {name}", where=place if name == "SIGKILL" else stacks,
            found=f"no word of its own{memory}", expected="a run that ends by itself", next_command=again,
        )  # fmt: skip
    return RunError(
        "the engine ended without a word", where=place, found=f"exit status {end.status}; see what it said above",
        next_command=again,
    )  # fmt: skip
