"""Rows spread over several vLLM servers: the least loaded one gets the next row.

A call that fails is repeated while its server is well. A server that is not well, or that no longer has an adapter, is
lost: it gets no more calls, because its base is proved only when a run starts or resumes. Its rows go to the others;
without others the run ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx2

from onetrunk.rollouts.server import AdapterMissing, Completed, Request, VLLMServer
from onetrunk.utils.calls import CallError, RetryPolicy, run_async, within

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Longest wait for the answer of a health check.
HEALTH_S = 30.0


@dataclass(frozen=True)
class ServerPolicy:
    """Deadlines and numbers of calls.

    Args:
        timeout_s: of one row or other request, from its first call to the last byte of its answer, repetitions and
            waits that a server asks for included; longer than the longest completion takes.
        wait_s: how long to wait until a server is up, at the start.
        max_calls: failed calls of one request, on a server that is well.
        max_concurrency: rows in flight per server.
        probe_s: between two questions whether a server is up, and before the first repetition.

    Raises:
        ValueError: a setting out of its range.
    """

    timeout_s: float = 900.0
    wait_s: float = 600.0
    max_calls: int = 5
    max_concurrency: int = 256
    probe_s: float = 1.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name.endswith("_s") and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} is {value}; give a number of seconds above 0")
            if name.startswith("max_") and value < 1:
                raise ValueError(f"{name} is {value}; set it to 1 or more")


@dataclass(frozen=True)
class Connection:
    """A server and the client of one round of calls."""

    server: VLLMServer
    client: httpx2.AsyncClient


class ServerLost(Exception):
    """A server is not well, or has lost an adapter."""


class ServerPool:
    """One or several vLLM servers of the same base model.

    Args:
        servers: at least one.
        policy: deadlines and numbers of calls.
        poll: called twice a second while waiting; may raise to give the work up.
    """

    def __init__(self, servers: Sequence[VLLMServer], policy: ServerPolicy, poll: Callable[[], None] | None = None):
        self.servers, self.policy, self.poll = list(servers), policy, poll
        # Why the last server was lost.
        self._lost = ""

    @property
    def up(self) -> list[VLLMServer]:
        """The servers that are not lost."""
        return [server for server in self.servers if server.is_up]

    def wait(self) -> None:
        """Wait until every server is up; RuntimeError after `wait_s`, naming one that is not."""

        async def until_up(connection: Connection) -> None:
            deadline, is_told = _now() + self.policy.wait_s, False
            while not await self._is_healthy(connection):
                if _now() > deadline:
                    raise RuntimeError(
                        f"{connection.server}: not ready after {self.policy.wait_s:.0f} s (vllm_server_timeout); start"
                        " it (onetrunk serve MODEL --port ...), or correct its address"
                    )
                if not is_told:
                    logger.warning("waiting up to %.0f s for the %s", self.policy.wait_s, connection.server)
                    is_told = True
                await asyncio.sleep(self.policy.probe_s)
            connection.server.is_up = True

        self._run(self.servers, lambda connections: _all(map(until_up, connections)))

    def complete(self, requests: Sequence[Request], done: Callable[[int, Completed], None]) -> None:
        """Ask for every row; `done` is called once per row, as soon as it is there.

        Raises:
            RuntimeError: no server is left, or a row gets no valid answer.
        """
        limit = asyncio.Semaphore(self.policy.max_concurrency * len(self.up))

        async def row(connections: list[Connection], index: int, request: Request) -> None:
            async with limit:
                done(index, await self._completed(connections, index, request))

        self._run(self.up, lambda connections: _all(row(connections, *numbered) for numbered in enumerate(requests)))

    def on_each(self, call: Callable[[Connection], Awaitable[T]]) -> dict[VLLMServer, T]:
        """Return what `call` returns for each server that is up.

        Raises:
            RuntimeError: no server is left, or one rejects the call.
        """
        results: dict[VLLMServer, T] = {}

        async def one(connection: Connection) -> None:
            try:
                results[connection.server] = await self._ask(connection, lambda: call(connection))
            except ServerLost as error:
                self.lose(connection.server, str(error))
            except CallError as error:
                raise RuntimeError(f"{connection.server}: {error}") from None

        self._run(self.up, lambda connections: _all(map(one, connections)))
        return results

    def lose(self, server: VLLMServer, reason: str) -> None:
        """Give a server no more calls; RuntimeError if there is no other."""
        if server.is_up:
            server.is_up = False
            self._lost = (
                f"{server} is lost: {reason.rstrip('.')}. Its own log may say why; start it again, then run the same"
                " command again, a training with --resume auto"
            )
            if self.up:
                logger.warning("%s is lost until the next start: %s; the others go on", server, reason)
        if not self.up:
            raise RuntimeError(self._lost)

    async def _completed(self, connections: list[Connection], index: int, request: Request) -> Completed:
        while True:
            up = [connection for connection in connections if connection.server.is_up]
            if not up:
                raise RuntimeError(self._lost)
            connection = min(up, key=lambda connection: connection.server.in_flight)
            server = connection.server
            server.in_flight += 1
            try:
                return await self._ask(connection, lambda to=connection: to.server.complete(to.client, request))
            except ServerLost as error:
                self.lose(server, str(error))
            except CallError as error:
                raise RuntimeError(f"{server} gives row {index} no completion: {error}") from None
            finally:
                server.in_flight -= 1

    async def _ask(self, connection: Connection, call: Callable[[], Awaitable[T]]) -> T:
        """Return what a call returns, repeated while it fails and the server is well.

        Raises:
            ServerLost: the server is not well, or has lost an adapter.
            CallError: it rejects the call, fails too often, or takes too long.
        """
        policy, failures = self.policy, 0
        deadline = _now() + policy.timeout_s
        # Doubling waits with jitter, as for judges.
        delays = RetryPolicy(first_delay_s=min(1.0, policy.probe_s), max_delay_s=10.0)
        while True:
            try:
                return await within(deadline - _now(), call)
            except AdapterMissing as error:
                raise ServerLost(f"{error}, so it was started again, or another process has unloaded it") from None
            except CallError as error:
                if error.kind != "again":
                    raise
                failed = error
            if _now() >= deadline:
                last = "" if failed.timed_out else f" ({failed})"
                raise CallError(
                    f"no answer within {policy.timeout_s:g} s{last}; raise vllm_request_timeout if one takes longer"
                )
            asked_s = failed.retry_after_s
            if asked_s is not None and _now() + asked_s > deadline:
                raise CallError(
                    f"it asks to wait {asked_s:.0f} s (Retry-After), and vllm_request_timeout is"
                    f" {policy.timeout_s:g} s; start again when it has room, or raise the timeout ({failed})"
                )
            if asked_s is None:
                failures += 1
                if not await self._is_healthy(connection):
                    # vLLM writes "See stack trace (above)" into its answers.
                    raise ServerLost(str(failed).replace("(above)", "in its log"))
            if failures >= policy.max_calls:
                raise CallError(f"{failed} ({failures} times)")
            await asyncio.sleep(delays.delay_s(id(call), failures, asked_s))

    async def _is_healthy(self, connection: Connection) -> bool:
        try:
            return await within(HEALTH_S, lambda: connection.server.is_healthy(connection.client))
        except CallError:
            return False

    def _run(self, servers: list[VLLMServer], work: Callable[[list[Connection]], Awaitable[None]]) -> None:
        if not servers:
            raise RuntimeError(self._lost)

        async def run() -> None:
            async with AsyncExitStack() as stack:
                connections = [
                    Connection(server, await stack.enter_async_context(server.client(self.policy.max_concurrency + 2)))
                    for server in servers
                ]
                await self._polled(work(connections))

        run_async(run())

    async def _polled(self, work: Awaitable[None]) -> None:
        """Await work, and cancel it when `poll` raises."""
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait([task], timeout=0.5))[0]:
                if self.poll is not None:
                    self.poll()
            task.result()
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task


async def _all(calls: Iterable[Awaitable[Any]]) -> None:
    """Await all; when one raises an error, end the others and raise it."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _now() -> float:
    return asyncio.get_running_loop().time()
