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
