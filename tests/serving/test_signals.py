"""Signals put off: remembered, raised once where allowed, and never during a clean-up."""

import os
import signal
from collections.abc import Iterator

import pytest

from training.core.errors import Terminated
from training.serving.signals import Deferred


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    """A hang-up is ignored by whom `nohup` has started."""
    old = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, old)


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)
    signal.getsignal(number)  # lets the interpreter run the handler


def test_a_signal_is_put_off_and_raised_at_the_end():
    done = []
    with pytest.raises(KeyboardInterrupt), Deferred():
        send(signal.SIGINT)
        done.append("after")
    assert done == ["after"]


def test_it_raises_within_an_interruptible_part_and_the_second_does_not():
    done = []
    with Deferred() as signals:
        try:
            with signals.interruptible():
                send(signal.SIGTERM)
                done.append("not reached")
        except Terminated:
            send(signal.SIGTERM)
            send(signal.SIGINT)
            done.append("cleaned up")
    assert done == ["cleaned up"] and signals.pending == signal.SIGTERM


def test_one_that_came_before_raises_at_the_door():
    done = []
    with Deferred() as signals:
        send(signal.SIGHUP)
        with pytest.raises(Terminated), signals.interruptible():
            done.append("not reached")
    assert done == []


def test_the_handlers_before_are_back_and_ignored_signals_stay_ignored():
    before = signal.getsignal(signal.SIGINT)
    old = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Deferred() as signals:
            send(signal.SIGHUP)
            assert signals.pending is None and signal.getsignal(signal.SIGINT) != before
        assert signal.getsignal(signal.SIGINT) == before
    finally:
        signal.signal(signal.SIGHUP, old)


def test_an_error_is_not_hidden_by_a_signal():
    with pytest.raises(ValueError, match="the error"), Deferred():
        send(signal.SIGINT)
        raise ValueError("the error")
