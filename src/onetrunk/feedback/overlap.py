"""Overlap two stages: a thread produces, and the calling thread consumes, with a bounded queue between them.

The consumer keeps the main thread: judges run an event loop, and checks of users may set signal handlers. The thread
is a daemon, unlike those of `concurrent.futures`, whose executor would make an interrupted run wait for it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import TypeVar

T = TypeVar("T")
# How long an ending run waits for a producer that does not check the flag.
JOIN_S = 5.0


class Stopped(Exception):
    """Raised in the producer's thread by `StopFlag.check` once its products are no longer wanted."""


class StopFlag(threading.Event):
    """Tells a producer, between two of its steps, that its work is no longer wanted."""

    def check(self) -> None:
        """Raise Stopped if the flag is set."""
        if self.is_set():
            raise Stopped


def overlapped(
    products: Iterable[T], consume: Callable[[T], None], *, max_waiting: int = 2, stop: StopFlag | None = None
) -> None:
    """Call `consume` for every product, in order, while the next ones are produced.

    Args:
        products: iterated in a thread; usually a generator that does the work.
        consume: called in this thread.
        max_waiting: products that may wait for the consumer; at least 1.
        stop: set when this thread ends early (an error, Ctrl-C), so that a long step of the producer can end too.

    Raises:
        Exception: the first error of either stage, unchanged. Products from before an error are consumed first.
    """
    waiting: queue.SimpleQueue[tuple[T] | BaseException | None] = queue.SimpleQueue()
    room = threading.Semaphore(max_waiting)
    stop = stop or StopFlag()

    def produce() -> None:
        try:
            for product in products:
                waiting.put((product,))
                room.acquire()
                stop.check()
            waiting.put(None)
        except BaseException as error:
            waiting.put(error)

    thread = threading.Thread(target=produce, name="feedback", daemon=True)
    thread.start()
    try:
        while (entry := waiting.get()) is not None:
            if isinstance(entry, BaseException):
                raise entry
            room.release()
            consume(*entry)
    finally:
        stop.set()
        room.release()
        thread.join(JOIN_S)


def chunked(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield lists of `size` items, the last one shorter; reads no further than it yields."""
    iterator = iter(items)
    while chunk := list(islice(iterator, size)):
        yield chunk
