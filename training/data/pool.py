"""Batches through worker processes and back in order, with few of them in flight, so that their number changes nothing.

Owns processes and order; what a worker does is made in it by a function of the caller's. A small input is done in this
process: starting others costs more. Workers never hear Ctrl-C, which is the main process's to hear, and end with it,
however it ends.
"""

import contextlib
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import resource_tracker
from typing import TypeVar

from training.core import process
from training.core.errors import RunError

_IN_FLIGHT_A_WORKER = 3
Batch, Result = TypeVar("Batch"), TypeVar("Result")
Work = Callable[[Iterable[Batch]], Iterator[Result]]


def count_for(num_bytes: int, alone_below_bytes: int) -> int:
    """Processes for an input of a size: 0 is none but this one."""
    return 0 if num_bytes < alone_below_bytes else len(os.sched_getaffinity(0))


@contextlib.contextmanager
def started(
    count: int, make: Callable[..., Callable[[Batch], Result]], *arguments: object, way_out: str
) -> Iterator[Work]:
    """Give a function of batches, which yields what each gives, in the order of the batches.

    Args:
        count: processes beside this one; they end with the block.
        make: of a module, and so are the arguments' types: called in each worker, it gives what does one batch.
        way_out: the command that needs less memory.

    The work raises what doing a batch raises, and RunError where a worker has died.
    """
    if count == 0:
        yield partial(map, make(*arguments))
        return
    resource_tracker.ensure_running()  # starting it later would let Ctrl-C through again
    context = multiprocessing.get_context("spawn")  # a fork would take the threads' locks along
    pool = ProcessPoolExecutor(count, context, _start, (os.getpid(), make, arguments))
    try:
        yield partial(_in_order, pool, count * _IN_FLIGHT_A_WORKER, way_out)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _in_order(pool: ProcessPoolExecutor, most: int, way_out: str, batches: Iterable[Batch]) -> Iterator[Result]:
    waiting: deque[Future[Result]] = deque()
    try:
        for batch in batches:
            waiting.append(_submitted(pool, batch))
            if len(waiting) >= most:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise RunError(
            "a worker process died", found="killed, or out of memory (dmesg tells)", expected="all of them alive",
            next_command=way_out,
        ) from None  # fmt: skip


def _submitted(pool: ProcessPoolExecutor, batch: Batch) -> Future[Result]:
    """Hand a batch out; processes are started by that, and what is blocked then they never hear."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return pool.submit(_do, batch)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# ---- in a process of its own

_done_by: Callable | None = None


def _start(parent: int, make: Callable, arguments: tuple) -> None:
    global _done_by
    process.end_with(parent)
    os.environ["RAYON_NUM_THREADS"] = "1"  # the processes are the threads
    _done_by = make(*arguments)


def _do(batch: Batch) -> Result:
    return _done_by(batch)
