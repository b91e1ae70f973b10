"""The engine in processes of its own, watched: what they say, how long they are silent, and what they died of.

There is one process, or several that train one run together (`parallel`): they start and end together, and where the
first one is silent all are.

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
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from training.core import errors, memory_kills, process, signals
from training.core.errors import RunError
from training.core.report import make_command
from training.core.units import format_bytes, format_seconds
from training.engine import torchrun
from training.engine.pulse import Beat, Pulse
from training.runs.events import EventLog
from training.runs.folder import STACKS_FILE, RunFolder

ENGINE = (sys.executable, "-m", "training.engine.child")
MAX_RESTARTS = 2
_POLL_SECONDS = 1.0
_STACKS_SECONDS = 3.0
_FAREWELL_SECONDS = 30.0
"""What the others may take to end by themselves where one of several processes has ended too soon."""
_ON_SIGNAL = {
    1: "%s: the run stops after this step, saved; once more stops it without saving, a third time kills it",
    2: "%s again: the run stops without saving; once more kills it",
    3: "%s again: killed",
}
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
        """The limit that holds after a movement: a validation moves with each batch, a save with each file. A first
        step compiles and a file may be large: both as loading."""
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
    who: str


def train(run: RunFolder, descriptors: tuple[int, ...] = (), limits: Limits | None = None) -> dict:
    """Train a run to its end and return its summary; `descriptors` are the locks that the engine holds as well.

    How many processes train it stands in the run's record. Raises what the engine raised, KeyboardInterrupt where it
    was told to stop, RunError where it died or hung.
    """
    for restarts in range(MAX_RESTARTS + 1):
        end = _one_engine(run, descriptors, limits or Limits())
        if end.silent_seconds is None or end.signalled or restarts == MAX_RESTARTS:
            return _outcome(run, end)
        _note(run, end, restarts + 1)
    raise AssertionError("unreachable")


def _one_engine(run: RunFolder, descriptors: tuple[int, ...], limits: Limits) -> End:
    parallel = run.record().get("parallel") or {"ranks": 1}
    pulse, results = Pulse.create(), [os.memfd_create("result") for _ in range(parallel["ranks"])]
    try:
        with _meeting(parallel["ranks"]) as meeting:
            engine = _Engine(run, pulse, results, descriptors, meeting)
            return engine.watched(limits)
    finally:
        pulse.close()
        for result in results:
            os.close(result)
        stacks = run.path / STACKS_FILE
        if stacks.is_file() and not stacks.stat().st_size:
            stacks.unlink()


@contextlib.contextmanager
def _meeting(num_processes: int) -> Iterator[list[dict[str, str]]]:
    """What each process finds in its environment; several meet in a file, and speak over the loopback alone."""
    if num_processes == 1:
        yield [{}]
        return
    with tempfile.TemporaryDirectory(prefix="trainyard-") as folder:
        common = {
            "WORLD_SIZE": str(num_processes), "LOCAL_WORLD_SIZE": str(num_processes),
            torchrun.MEETING: (Path(folder) / "meeting").as_uri(), "GLOO_SOCKET_IFNAME": "lo",
        }  # fmt: skip
        yield [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_processes)]


class _Engine:
    """The engine's processes, from their start to their end."""

    def __init__(
        self, run: RunFolder, pulse: Pulse, results: list[int], descriptors: tuple[int, ...],
        meeting: list[dict[str, str]],
    ):  # fmt: skip
        self.run, self.pulse, self.results, self._meeting = run, pulse, results, meeting
        self.signalled: str | None = None
        self._num_signals = 0
        self._kills, self._peak_bytes = memory_kills.count(), 0
        self._locks = descriptors
        self._processes: list[subprocess.Popen] = []
        self._deserted_since: float | None = None
        self._first_ended: int | None = None

    def _start(self) -> None:
        page = self.pulse.descriptor
        for result, environment in zip(self.results, self._meeting, strict=True):
            one = subprocess.Popen(
                [*ENGINE, str(self.run.path), *map(str, (page, result, os.getpid()))], env=os.environ | environment,
                pass_fds=(page, result, *self._locks), process_group=0,
                stdin=subprocess.DEVNULL, stdout=sys.stderr if _has_stderr() else subprocess.DEVNULL,
            )  # fmt: skip
            self._processes.append(one)
        if self.signalled:  # in the moment of its start
            self._processes[0].send_signal(signal.Signals[self.signalled])

    def watched(self, limits: Limits) -> End:
        """Wait for the end of all, passing signals on, and end them where they are silent for too long."""
        silent = None
        with signals.handled(self._forward):
            self._start()
            watched_since = looked = time.monotonic()
            while not self._have_ended(_POLL_SECONDS):
                now = time.monotonic()
                if now - looked > 10 * _POLL_SECONDS:  # this process was itself stopped, perhaps both were
                    watched_since = now
                looked = now
                beat = self.pulse.last()
                peaks = (process.peak_rss_bytes(one.pid) for one in self._processes)
                self._peak_bytes = max(self._peak_bytes, *peaks)
                if (waited := now - max(beat.at, watched_since)) > limits.of(beat):
                    silent = waited
                    self._end_silent(beat, waited)
        told = self._told()
        return End(
            self._processes[told].returncode, self._document(told), self.pulse.last(), self.signalled, silent,
            self._memory(), self._who(told),
        )  # fmt: skip

    def _have_ended(self, seconds: float) -> bool:
        """Whether all have ended within a time; where one of several ends too soon, the others are ended."""
        deadline = time.monotonic() + seconds
        while running := [one for one in self._processes if one.poll() is None]:
            self._leave_no_one_behind(running)
            try:
                each = max(0.0, deadline - time.monotonic()) / len(running)
                running[0].wait(each if len(running) == 1 else min(each, 0.05))
            except subprocess.TimeoutExpired:
                if time.monotonic() >= deadline:
                    return False
        return True

    def _leave_no_one_behind(self, running: list[subprocess.Popen]) -> None:
        """Kill those that still run a while after one has ended that had not trained to the end."""
        if self._deserted_since is None:
            ended = [rank for rank, one in enumerate(self._processes) if one.poll() is not None]
            failed = [rank for rank in ended if "summary" not in self._document(rank)]
            if not failed:
                return
            self._deserted_since, self._first_ended = time.monotonic(), failed[0]
        if time.monotonic() - self._deserted_since > _FAREWELL_SECONDS:
            _logger.warning("process %d has ended; ending the others", self._first_ended)
            for one in running:
                one.kill()

    def _told(self) -> int:
        """The process whose end is told: one that died without a word, else one that says what was wrong, else the
        first; what another's death did to it says nothing."""
        if len(self._processes) == 1:
            return 0
        documents = [self._document(rank) for rank in range(len(self._processes))]
        if self._first_ended is not None and not documents[self._first_ended]:
            return self._first_ended
        for kind in ("error", "fault", "interrupted"):
            for rank, document in enumerate(documents):
                if kind in document:
                    return rank
        return 0

    def _who(self, rank: int) -> str:
        """Which one that is, where there are several."""
        return "" if len(self._processes) == 1 else f" by process {rank} of {len(self._processes)}"

    def _end_silent(self, beat: Beat, seconds: float) -> None:
        """Have all stacks written down, then kill: what hangs does not save."""
        _logger.warning(
            "the engine has been silent for %s (%s, step %d); its stacks go to %s", format_seconds(seconds), beat.stage,
            beat.step, self.run.path / STACKS_FILE,
        )  # fmt: skip
        for one in self._processes:
            with contextlib.suppress(ProcessLookupError):
                one.send_signal(signal.SIGUSR1)
        if not self._have_ended(_STACKS_SECONDS):
            for one in self._processes:
                one.kill()
            for one in self._processes:
                one.wait()

    def _forward(self, number: int, _frame: object) -> None:
        """Pass a signal on, and say at once what it does: the engine hears it when a call of torch's has ended.

        The first one goes to the first process, which tells the others. The second is sent as another signal, since
        two of one kind that wait to be heard count as one.
        """
        self.signalled = self.signalled or signal.Signals(number).name
        self._num_signals += 1
        first = signal.Signals[self.signalled]
        second = next((one for one in signals.handlers() if one != first), first)
        for one in self._processes[: 1 if self._num_signals == 1 else None]:
            one.send_signal((first, second, signal.SIGKILL)[min(self._num_signals, 3) - 1])
        _logger.warning(_ON_SIGNAL[min(self._num_signals, 3)], signal.Signals(number).name)

    def _document(self, rank: int) -> dict:
        result = self.results[rank]
        try:
            return json.loads(os.pread(result, os.fstat(result).st_size, 0))
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
    if "interrupted" in end.document or (end.signalled and not end.document):
        name = end.signalled or end.document["interrupted"]
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
            found=f"no word of its own{end.who}{memory}", expected="a run that ends by itself", next_command=again,
        )  # fmt: skip
    return RunError(
        "the engine ended without a word", where=place, found=f"exit status {end.status}; see what it said above",
        next_command=again,
    )  # fmt: skip
