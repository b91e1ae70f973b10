"""Encoding in several processes: batches go out in turn and come back in order, so that their number changes nothing.

Owns the processes. Each has one batch at a time, so memory is bounded by batches. They ignore Ctrl-C, which is the main
process's to hear, and end when its end of their pipe is gone, however that happened.
"""

import contextlib
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path

from training.core import files
from training.core.errors import RunError, TrainyardError
from training.data.supervised import Encoded, Encoder, TextEncoder
from training.data.supervision import Settings
from training.tokenizer.artifact import Tokenizer

SMALL_BYTES = 16 << 20
"""Below this much text the start of processes costs more than they save."""
_BATCH_BYTES, _BATCH_RECORDS = 1 << 20, 1024

Batch = tuple[int, list[bytes]]
Encode = Callable[[Iterable[bytes]], Iterator[Encoded]]


def count_for(text_bytes: int) -> int:
    """How many processes an amount of text is worth; 1 stays in this one."""
    return 1 if text_bytes < SMALL_BYTES else len(os.sched_getaffinity(0))


def batches(lines: Iterable[bytes]) -> Iterator[Batch]:
    """Group the lines of a split, each batch with the number of its first line."""
    start, batch, size = 0, [], 0
    for line in lines:
        batch.append(line)
        size += len(line)
        if size >= _BATCH_BYTES or len(batch) == _BATCH_RECORDS:
            yield start, batch
            start, batch, size = start + len(batch), [], 0
    if batch:
        yield start, batch


@contextlib.contextmanager
def started(tokenizer: Tokenizer, settings: Settings | None, text_bytes: int) -> Iterator[Encode]:
    """Give a function that turns the lines of a split into encoded batches, in order.

    Args:
        settings: of records with answers; None for texts.
        text_bytes: how much there is to encode in all, which decides the number of processes.

    The function raises what an encoder raises, and RunError where a process has died.
    """
    num_workers = count_for(text_bytes)
    if num_workers == 1:
        encoder = _encoder(tokenizer, settings)
        yield lambda lines: (_encode(encoder, batch) for batch in batches(lines))
        return
    with _workers(num_workers, (tokenizer.folder, tokenizer.manifest, settings)) as pipes:
        yield lambda lines: _in_turn(pipes, batches(lines))


def _in_turn(pipes: list[Connection], work: Iterable[Batch]) -> Iterator[Encoded]:
    free, waiting = deque(pipes), deque()
    for batch in work:
        results = []
        if not free:
            free.append(waiting.popleft())
            results.append(_receive(free[0]))
        _send(free[0], batch)
        waiting.append(free.popleft())
        yield from results
    while waiting:
        yield _receive(waiting.popleft())


def _encoder(tokenizer: Tokenizer, settings: Settings | None) -> Encoder | TextEncoder:
    return TextEncoder(tokenizer) if settings is None else Encoder(tokenizer, settings)


def _encode(encoder: Encoder | TextEncoder, batch: Batch) -> Encoded:
    start, lines = batch
    return encoder.batch([(start + number, files.parse_json(line)) for number, line in enumerate(lines)])


@contextlib.contextmanager
def _workers(count: int, what: tuple[Path, dict, Settings | None]) -> Iterator[list[Connection]]:
    context = multiprocessing.get_context("spawn")  # a fork would take the threads' locks along
    processes, pipes = [], []
    try:
        resource_tracker.ensure_running()  # starting it would unblock again
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # what is blocked now, they never hear
        try:
            for _ in range(count):
                ours, theirs = context.Pipe()
                process = context.Process(target=_work, args=(theirs, *what), daemon=True)
                process.start()
                theirs.close()
                processes.append(process)
                pipes.append(ours)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        yield pipes
    finally:
        for process in processes:
            process.kill()
            process.join()
        for pipe in pipes:
            pipe.close()


def _work(pipe: Connection, folder: Path, manifest: dict, settings: Settings | None) -> None:
    """Encode what comes until nobody sends any more; an error is sent as it is."""
    os.environ["RAYON_NUM_THREADS"] = "1"  # the processes are the threads
    encoder = _encoder(Tokenizer(folder, manifest), settings)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            batch = pipe.recv()
            try:
                result = _encode(encoder, batch)
            except TrainyardError as error:
                result = (type(error), vars(error))
            pipe.send(result)


def _send(pipe: Connection, batch: Batch) -> None:
    try:
        pipe.send(batch)
    except (BrokenPipeError, ConnectionResetError) as error:
        raise _died() from error


def _receive(pipe: Connection) -> Encoded:
    try:
        result = pipe.recv()
    except (EOFError, ConnectionResetError) as error:
        raise _died() from error
    if isinstance(result, Encoded):
        return result
    kind, values = result
    error = kind(values.pop("what"))
    vars(error).update(values)
    raise error


def _died() -> RunError:
    return RunError(
        "a process that encodes records has ended", found="no answer from it",
        expected="room for one batch of records a process: it was killed, or the memory is full",
        next_command="free some memory (free -h) and run the same command again",
    )  # fmt: skip
