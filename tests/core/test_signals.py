"""Signals that ask a program to stop: who hears them in a block, who after it, and what they become."""

import os
import signal

import pytest

from training.core import signals
from training.core.errors import Terminated


def test_a_block_hears_them_and_the_handlers_before_come_back():
    """Also after an error; one that `nohup` had ignored stays so in the block."""
    heard = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    old = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with pytest.raises(ValueError), signals.handled(lambda number, _: heard.append(number)):
            for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
                os.kill(os.getpid(), number)
            raise ValueError
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, old)
    assert heard == [signal.SIGINT, signal.SIGTERM]
    assert {number: signal.getsignal(number) for number in before} == before


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_becomes_an_exception_that_knows_it(name: str):
    interrupt = signals.interruption(name, "saved")
    assert isinstance(interrupt, Terminated) == (name != "SIGINT")
    assert (signals.name_of(interrupt), str(interrupt)) == (name, "saved")
