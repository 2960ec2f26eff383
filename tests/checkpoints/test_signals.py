"""Which signals stop a run at once: a second Ctrl-C only."""

import os
import signal

import pytest

from onetrunk.checkpoints.signals import StopSignals


@pytest.fixture
def signals():
    # In the background of a shell SIGINT is ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield StopSignals()
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_only_a_second_signal_that_is_ctrl_c_stops_at_once(signals, first):
    with signals.listening():
        for number in (first, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            os.kill(os.getpid(), number)
        assert signals.received == signal.Signals(first).name
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
