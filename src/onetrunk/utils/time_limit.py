"""A limit of time for expressions and templates that others wrote, which may have no end."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator

LONGEST_S = 60.0


@contextlib.contextmanager
def time_limit(subject: str) -> Iterator[None]:
    """Raise a ValueError that names `subject` if the block takes longer than `LONGEST_S`.

    Regular expressions and templates check for signals while they run. There is no limit outside the main thread,
    which alone gets signals, and none while a timer runs that ends sooner.
    """
    begin, (remaining, interval) = time.monotonic(), signal.getitimer(signal.ITIMER_REAL)
    if threading.current_thread() is not threading.main_thread() or 0 < remaining < LONGEST_S:
        yield
        return

    raised: list[ValueError] = []

    def stop(*_: object) -> None:
        raised.append(ValueError(f"{subject} takes more than {LONGEST_S:g} seconds; look for a loop without an end"))
        raise raised[0]

    handler = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, LONGEST_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler or signal.SIG_DFL)
        if remaining:
            signal.setitimer(signal.ITIMER_REAL, max(remaining - (time.monotonic() - begin), 1e-6), interval)
    if raised:  # The block has caught it.
        raise raised[0]
