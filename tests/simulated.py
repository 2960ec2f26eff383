"""An event loop whose clock moves on at once: hours of waits take milliseconds, and every run is the same."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class _JumpingSelector(selectors.SelectSelector):
    """A selector that adds the time it should wait to a clock."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout:
            self.now += timeout
        return super().select(0)


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop in simulated time, from 0 seconds on."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def simulate(work: Coroutine[Any, Any, Any]) -> tuple[Any, float]:
    """Run a coroutine; return its result and the simulated seconds that it took."""
    loop = SimulatedLoop()
    try:
        return loop.run_until_complete(work), loop.time()
    finally:
        loop.close()


# How long a rejection takes.
REJECTION_S = 0.01


class Slots:
    """A simulated server that answers some calls at a time.

    Args:
        number: calls that it answers at once.
        latency_s: of an answer.
        queues: whether other calls wait; if not, they are rejected with HTTP 429.
        retry_after_s: what it asks for then.
    """

    def __init__(self, number: int, latency_s: float = 0.5, queues: bool = False, retry_after_s: float | None = None):
        self.number, self.latency_s, self.queues, self.retry_after_s = number, latency_s, queues, retry_after_s
        self.is_down = False
        self.answered: list[int] = []
        self.rejected = self.open = 0
        self._slots = asyncio.Semaphore(number)

    async def call(self, index: int) -> int:
        """Return the index."""
        from onetrunk.utils.calls import CallError

        if self.is_down:
            raise CallError("the connection failed")
        if not self.queues and self.open >= self.number:
            self.rejected += 1
            await asyncio.sleep(REJECTION_S)
            raise CallError("HTTP 429", overloaded=True, retry_after_s=self.retry_after_s)
        self.open += 1
        try:
            async with self._slots:
                await asyncio.sleep(self.latency_s)
        finally:
            self.open -= 1
        if self.is_down:
            raise CallError("the connection failed")
        self.answered.append(index)
        return index
