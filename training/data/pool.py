"""Batches through worker processes and back in order, with few of them in flight.

Owns processes and order; what a worker does is `intake`'s. A small input is read in this process: starting others costs
more. Workers end with this process, however it ends.
"""

import contextlib
import multiprocessing
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from training.core.errors import RunError
from training.data import intake
from training.data.contamination import Evaluations
from training.data.intake import Batch, Taken
from training.data.settings import Settings

_ALONE_BELOW_BYTES = 4 << 20
_IN_FLIGHT_A_WORKER = 3


def default_workers(size_bytes: int) -> int:
    """Processes for an input of this size: 0 is none but this one."""
    return 0 if size_bytes < _ALONE_BELOW_BYTES else len(os.sched_getaffinity(0))


def taken(
    batches: Iterable[Batch], settings: Settings, evaluations: Evaluations | None, workers: int, with_less: str
) -> Iterator[Taken]:
    """Yield what each batch gives, in the order of the batches.

    Args:
        with_less: the command that needs less memory.

    Raises RunError where a worker died.
    """
    if workers == 0:
        yield from map(intake.Intake(settings, evaluations).take, batches)
        return
    with _pool(settings, evaluations, workers) as pool:
        waiting: deque[Future[Taken]] = deque()
        try:
            for batch in batches:
                waiting.append(pool.submit(intake.take, batch))
                if len(waiting) >= _IN_FLIGHT_A_WORKER * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool:
            raise RunError(
                "a worker process died", found="killed, or out of memory (dmesg tells)", expected="all of them alive",
                next_command=with_less,
            ) from None  # fmt: skip


@contextlib.contextmanager
def _pool(settings: Settings, evaluations: Evaluations | None, workers: int) -> Iterator[ProcessPoolExecutor]:
    """A pool that is ended at once where the block fails."""
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, intake.start, (settings, evaluations, os.getpid()))
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
