"""Rows spread over several vLLM servers: the least loaded one gets the next row; a server that is down is waited for.

`CallRun` of `utils/calls.py` decides about one server that may refuse a question. Here every row must be answered, by
whichever server is up, and a server may lose its adapters by a restart, so the decisions are others: a server that
fails is asked for its health; if it is well, the failure counts for the row, else the row is asked again elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TypeVar

import httpx2

from onetrunk.rollouts.adapters import Published
from onetrunk.rollouts.server import AdapterMissing, Completed, Request, ServedBase, VLLMServer
from onetrunk.utils.calls import CallError, RetryPolicy, run_async, within

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class ServerPolicy:
    """Deadlines and numbers of calls.

    Args:
        timeout_s: of one completion, from its request to the last byte; longer than the longest completion takes.
        first_timeout_s: of a completion by a server that has not answered one since it started, which may compile.
        control_timeout_s: of loading an adapter and all other calls.
        wait_s: how long to wait until a server is up, at the start and after it has failed.
        max_calls: failed calls of one row, on servers that are well, before the rollout fails.
        max_concurrency: rows in flight per server.
        probe_s: between two questions whether a server is up again.

    Raises:
        ValueError: a setting out of its range.
    """

    timeout_s: float = 600.0
    first_timeout_s: float = 900.0
    control_timeout_s: float = 120.0
    wait_s: float = 240.0
    max_calls: int = 5
    max_concurrency: int = 256
    probe_s: float = 1.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name.endswith("_s") and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} is {value}; give a number of seconds above 0")
            if name.startswith("max_") and value < 1:
                raise ValueError(f"{name} is {value}; set it to 1 or more")


@dataclass
class Connection:
    """A server and the client of one round of calls; `failed_at`: when its last mend ended, for calls that overlap."""

    server: VLLMServer
    client: httpx2.AsyncClient
    mending: asyncio.Lock = field(default_factory=asyncio.Lock)
    mended_at: float = -math.inf


class ServerPool:
    """One or several vLLM servers of the same base model.

    Args:
        servers: at least one.
        policy: deadlines and numbers of calls.
        poll: called twice a second while waiting; may raise to give the work up.
    """

    def __init__(self, servers: Sequence[VLLMServer], policy: ServerPolicy, poll: Callable[[], None] | None = None):
        self.servers, self.policy, self.poll = list(servers), policy, poll

    def complete(
        self, requests: Sequence[Request], adapter: Published | None, done: Callable[[int, Completed], None]
    ) -> None:
        """Ask for every row; `done` is called once per row, as soon as it is there.

        Args:
            requests: the rows, all for the same adapter.
            adapter: loaded again by a server that has lost it; None: the base model.

        Raises:
            RuntimeError: no server is up within `wait_s`, or a row failed `max_calls` times.
        """

        async def run(connections: list[Connection]) -> None:
            await _Rows(self, connections, adapter, done).answer(requests)

        self._run(run)

    def on_each(self, call: Callable[[Connection], Awaitable[T]]) -> dict[VLLMServer, T]:
        """Return what `call` returns for each server that is up; waits until at least one is.

        Raises:
            RuntimeError: no server is up within `wait_s`.
            CallError: a server that is well rejects the call.
        """
        results: dict[VLLMServer, T] = {}

        async def run(connections: list[Connection]) -> None:
            deadline = _now() + self.policy.wait_s
            while True:
                outcomes = await asyncio.gather(*(self._attempt(connection, call) for connection in connections))
                for connection, outcome in zip(connections, outcomes, strict=True):
                    if not isinstance(outcome, CallError):
                        results[connection.server] = outcome
                if results:
                    return
                if _now() > deadline:
                    raise self.unavailable(connections, outcomes[0])
                await asyncio.sleep(self.policy.probe_s)

        self._run(run)
        return results

    async def _attempt(self, connection: Connection, call: Callable[[Connection], Awaitable[T]]) -> T | CallError:
        """Return the result of a call, or the error of a server that is down."""
        server, failures = connection.server, 0
        while True:
            try:
                result = await within(self.policy.control_timeout_s, lambda: call(connection))
            except CallError as error:
                if error.kind == "again" and not await self.is_well(connection):
                    server.is_up = False
                    return error
                failures += 1
                if error.kind != "again" or failures >= self.policy.max_calls:
                    raise
            else:
                server.is_up = True
                return result
            await asyncio.sleep(self.policy.probe_s)

    def wait(self) -> None:
        """Wait until every server is up; RuntimeError after `wait_s`, naming those that are not."""

        async def until_up(connection: Connection) -> None:
            deadline, is_told = _now() + self.policy.wait_s, False
            while not await self._is_healthy(connection):
                if _now() > deadline:
                    raise self.unavailable([connection], None)
                if not is_told:
                    logger.warning("waiting up to %.0f s for the %s", self.policy.wait_s, connection.server)
                    is_told = True
                await asyncio.sleep(self.policy.probe_s)
            connection.server.is_up = True

        async def run(connections: list[Connection]) -> None:
            await asyncio.gather(*(until_up(connection) for connection in connections))

        self._run(run)

    async def is_well(self, connection: Connection) -> bool:
        """Return whether a server is up and serves the base model that it served at the start.

        Raises:
            RuntimeError: it serves another one.
        """
        if not await self._is_healthy(connection):
            return False
        server = connection.server
        try:
            base, _ = await within(self.policy.control_timeout_s, lambda: server.models(connection.client))
        except CallError:
            return False
        if server.base is not None and base != server.base:
            raise RuntimeError(
                f"{server} was restarted with another model: {_shown(base)}, and it was {_shown(server.base)};"
                " restart it with the same one, then resume"
            )
        return True

    async def _is_healthy(self, connection: Connection) -> bool:
        seconds = min(30.0, self.policy.control_timeout_s)
        try:
            return await within(seconds, lambda: connection.server.is_healthy(connection.client))
        except CallError:
            return False

    def unavailable(self, connections: Sequence[Connection], error: CallError | None) -> RuntimeError:
        """Return the error for servers that have been waited for in vain."""
        names = ", ".join(str(connection.server) for connection in connections)
        # The error of a call names its server already.
        reason = f" ({str(error).removeprefix(f'{connections[0].server}: ')})" if error is not None else ""
        return RuntimeError(
            f"{names}: not ready after {self.policy.wait_s:.0f} s{reason}; start it (onetrunk serve MODEL --port ...),"
            " or correct its address"
        )

    def _run(self, work: Callable[[list[Connection]], Awaitable[None]]) -> None:
        async def run() -> None:
            async with AsyncExitStack() as stack:
                connections = [
                    Connection(server, await stack.enter_async_context(server.client(self.policy.max_concurrency + 2)))
                    for server in self.servers
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


class _Rows:
    """One rollout: its rows, the servers that are up, and those that are waited for."""

    def __init__(
        self,
        pool: ServerPool,
        connections: Sequence[Connection],
        adapter: Published | None,
        done: Callable[[int, Completed], None],
    ):
        self.pool, self.policy, self.adapter, self.done = pool, pool.policy, adapter, done
        self.connections = list(connections)
        self._limit = asyncio.Semaphore(self.policy.max_concurrency * len(self.connections))
        self._has_changed = asyncio.Event()
        self._revivals: dict[int, asyncio.Task[None]] = {}
        self._last: CallError | None = None
        # Since when no server is up; None while one is.
        self._all_down_at: float | None = None
        # Doubling waits with jitter, as for judges.
        self._delays = RetryPolicy(first_delay_s=min(1.0, self.policy.probe_s), max_delay_s=10.0)

    async def answer(self, requests: Sequence[Request]) -> None:
        rows = [asyncio.create_task(self._row(index, request)) for index, request in enumerate(requests)]
        try:
            for connection in self.connections:
                if not connection.server.is_up:
                    self._wait_for(connection)
            await asyncio.gather(*rows)
        finally:
            for task in (*rows, *self._revivals.values()):
                task.cancel()
            await asyncio.gather(*rows, *self._revivals.values(), return_exceptions=True)

    async def _row(self, index: int, request: Request) -> None:
        """Ask until there is an answer. Only failures of servers that are well count."""
        failures = 0
        async with self._limit:
            while True:
                connection = await self._least_loaded()
                began = _now()
                try:
                    completed = await self._ask(connection, request)
                except CallError as error:
                    if error.kind in ("refused", "stop"):
                        raise self._failed(connection, index, error) from None
                    self._last, failed = error, error
                else:
                    self.done(index, completed)
                    return
                if not await self._mend(connection, failed, began):
                    continue
                failures += 1
                if failures >= self.policy.max_calls:
                    raise self._failed(connection, index, failed, failures)
                await asyncio.sleep(self._delays.delay_s(index, failures, failed.retry_after_s))

    async def _ask(self, connection: Connection, request: Request) -> Completed:
        server = connection.server
        seconds = self.policy.timeout_s if server.is_warm else self.policy.first_timeout_s
        server.in_flight += 1
        try:
            completed = await within(seconds, lambda: server.complete(connection.client, request))
        finally:
            server.in_flight -= 1
        server.is_warm = True
        return completed

    async def _least_loaded(self) -> Connection:
        while True:
            up = [connection for connection in self.connections if connection.server.is_up]
            if up:
                return min(up, key=lambda connection: connection.server.in_flight)
            for task in self._revivals.values():
                if task.done():
                    task.result()  # Raises if the wait was in vain.
            self._has_changed.clear()
            await self._has_changed.wait()

    async def _mend(self, connection: Connection, error: CallError, began: float) -> bool:
        """Return whether the server is well, after loading an adapter that it has lost; else begin to wait for it."""
        async with connection.mending:
            server = connection.server
            if connection.mended_at >= began:  # Another row's failure in the same time has been looked into.
                return server.is_up
            is_well = await self.pool.is_well(connection)
            if is_well and isinstance(error, AdapterMissing):
                is_well = await self._load(connection)
            connection.mended_at = _now()
            if not is_well and server.is_up:
                logger.warning("%s does not answer (%s); waiting for it to be up again", server, error)
                self._wait_for(connection)
            return is_well

    async def _load(self, connection: Connection) -> bool:
        """Load the adapter; False if the server dies meanwhile."""
        if self.adapter is None:
            return True
        server, adapter = connection.server, self.adapter
        logger.warning("%s has lost the adapter %s: loading it again", server, adapter.name)
        try:
            await within(
                self.policy.control_timeout_s,
                lambda: server.load(connection.client, adapter.name, adapter.folder),
            )
        except CallError as error:
            if error.kind in ("refused", "stop"):
                raise RuntimeError(f"{server} does not load the adapter {adapter.name} again: {error}") from None
            return False
        return True

    def _wait_for(self, connection: Connection) -> None:
        """Count a server as down, and begin to ask for its health."""
        connection.server.is_up = False
        if self._all_down_at is None and not any(other.server.is_up for other in self.connections):
            self._all_down_at = _now()
        before = self._revivals.get(id(connection))
        if before is not None and not before.done():
            return
        task = asyncio.create_task(self._until_up(connection))
        task.add_done_callback(lambda _task: self._has_changed.set())
        self._revivals[id(connection)] = task

    async def _until_up(self, connection: Connection) -> None:
        server = connection.server
        while not (await self.pool.is_well(connection) and await self._load_if_missing(connection)):
            if self._all_down_at is not None and _now() - self._all_down_at > self.policy.wait_s:
                raise self.pool.unavailable(self.connections, self._last)
            await asyncio.sleep(self.policy.probe_s)
        logger.warning("%s is up again", server)
        server.is_up, server.is_warm, self._all_down_at = True, False, None

    async def _load_if_missing(self, connection: Connection) -> bool:
        if self.adapter is None:
            return True
        try:
            _, loaded = await connection.server.models(connection.client)
        except CallError:
            return False
        return self.adapter.name in loaded or await self._load(connection)

    def _failed(self, connection: Connection, index: int, error: CallError, failures: int = 1) -> RuntimeError:
        times = f", {failures} times" if failures > 1 else ""
        return RuntimeError(f"{connection.server} gives row {index} no completion{times}: {error}")


def _shown(base: ServedBase) -> str:
    return f"{base.name!r} from {base.root} with {base.max_length} positions"


def _now() -> float:
    return asyncio.get_running_loop().time()
