"""Two stages that overlap: products are made in a thread, and consumed here, the maker a bounded way ahead.

The consumer keeps the calling thread: judges run an event loop, and checks of others set signals, which only the main
thread may. The maker waits where `max_waiting` products stand before the consumer: memory does not grow with the
input, which may be a stream. Whichever stage fails, the other ends and the error is the caller's. Knows nothing of
prompts, judges or files; what outlives a kill is the ledger's.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import TypeVar

T = TypeVar("T")
POLL_S = 0.05
# A maker that does not look at the flag is left behind after that.
JOIN_S = 5.0


class Stopped(Exception):
    """Raised in the maker's thread by `StopFlag.check` once its products are no longer wanted."""


class StopFlag:
    """Tells a maker, between two of its own steps, that its work is no longer wanted."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        """Let every `check` from now on raise."""
        self._event.set()

    def check(self) -> None:
        """Raise Stopped after `set`."""
        if self._event.is_set():
            raise Stopped


def chunked(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield lists of `size` items, the last one shorter; reads no further than it yields."""
    iterator = iter(items)
    while chunk := list(islice(iterator, size)):
        yield chunk


def overlapped(
    products: Iterable[T], consume: Callable[[T], None], *, max_waiting: int = 2, stop: StopFlag | None = None
) -> None:
    """Call `consume` for every product, in order; the next ones are made at the same time.

    Args:
        products: read one at a time, in a thread of its own: a generator does the making.
        consume: called in this thread.
        max_waiting: products that may wait for the consumer; at least 1.
        stop: is set when this thread ends early (an error, Ctrl-C), so that a long product can look at it.

    Raises:
        Exception: the first error of either stage, as it was. What was made before an error is consumed first.
    """
    waiting: queue.Queue[tuple[T] | None] = queue.Queue(max_waiting)
    failures: list[BaseException] = []
    stop = stop or StopFlag()

    def work() -> None:
        try:
            for product in products:
                _hand_over(waiting, (product,), stop)
            _hand_over(waiting, None, stop)
        except Stopped:
            pass
        except BaseException as error:  # It belongs to the caller, who waits at the other end.
            failures.append(error)
            with contextlib.suppress(Stopped):
                _hand_over(waiting, None, stop)

    # A daemon: an interrupted run must not wait for a maker that does not look at the flag.
    thread = threading.Thread(target=work, name="feedback", daemon=True)
    thread.start()
    try:
        while (product := waiting.get()) is not None:
            consume(*product)
    finally:
        stop.set()
        thread.join(JOIN_S)
    if failures:
        raise failures[0]


def _hand_over(waiting: queue.Queue, product: object, stop: StopFlag) -> None:
    while True:
        stop.check()
        with contextlib.suppress(queue.Full):
            waiting.put(product, timeout=POLL_S)
            return
