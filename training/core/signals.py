"""The signals that ask a program to stop, and the exceptions that they become: SIGINT, SIGTERM and SIGHUP.

Invariant: what was ignored when it began (`nohup`) stays ignored. Only the main thread may set handlers.
"""

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType

from training.core.errors import Terminated

Handler = Callable[[int, FrameType | None], object]
_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def handlers() -> dict[int, Handler | int]:
    """What handles each of the signals now; one that is ignored is left out."""
    found = {number: signal.getsignal(number) for number in _STOPS}
    return {number: handler for number, handler in found.items() if handler is not signal.SIG_IGN}


@contextlib.contextmanager
def handled(handler: Handler) -> Iterator[None]:
    """Give the signals to a handler while the block runs, and back to those that had them when it ends."""
    before = handlers()
    for number in before:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def raise_terminated() -> None:
    """From now on let SIGTERM and SIGHUP raise Terminated, as SIGINT raises KeyboardInterrupt."""
    for number in handlers().keys() - {signal.SIGINT}:
        signal.signal(number, _raise)


def _raise(number: int, _: FrameType | None) -> None:
    raise interruption(signal.Signals(number).name)


def interruption(name: str, what: str = "") -> KeyboardInterrupt:
    """The exception that a signal becomes, by the signal's name."""
    return KeyboardInterrupt(what) if name == "SIGINT" else Terminated(what, signal_name=name)


def name_of(interrupt: KeyboardInterrupt) -> str:
    """The name of the signal that an exception came from."""
    return interrupt.signal_name if isinstance(interrupt, Terminated) else "SIGINT"
