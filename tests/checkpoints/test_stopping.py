"""Which signals ask twice: Ctrl-C at once, SIGTERM only some time after the first signal."""

import os
import signal

import pytest

from onetrunk.checkpoints import stopping
from onetrunk.checkpoints.stopping import StopSignals


@pytest.fixture
def clock(monkeypatch):
    """The seconds that `stopping` sees; pytest's own handlers stay out of the way."""
    now = [0.0]
    monkeypatch.setattr(stopping.time, "monotonic", lambda: now[0])
    return now


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.fixture
def signals(clock):
    """Signals, in a process that SIGTERM would end as it ends a stage: by an exception."""

    def terminate(number, frame):
        raise InterruptedError

    # In the background of a shell SIGINT is ignored.
    handlers = {signal.SIGTERM: terminate, signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    yield StopSignals()
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_sigterm_within_30_seconds_of_the_first_signal_is_the_same_request(signals, clock, first):
    with signals.listening():
        send(first)
        for second in (0.0, 0.1, 29.9):
            clock[0] = second
            send(signal.SIGTERM)
        assert signals.received == signal.Signals(first).name


def test_a_sigterm_after_30_seconds_stops_at_once(signals, clock):
    with signals.listening():
        send(signal.SIGTERM)
        clock[0] = 30.0
        with pytest.raises(InterruptedError):
            send(signal.SIGTERM)


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_that_is_ctrl_c_stops_at_once(signals, first):
    with signals.listening():
        send(first)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
