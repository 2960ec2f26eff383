"""The server of the tests: real sockets and HTTP on 127.0.0.1, in a thread, and what can go wrong with a connection.

Its routes are functions; judges, vLLM and the Hub are subclasses with theirs. Which calls fail is derived from (fault,
question, how often it was asked): the same in every run, whatever the timing.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import socket
import struct
import threading
import time
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable
from email.utils import formatdate
from fnmatch import fnmatchcase
from typing import Any, Self

# What a route returns: status and JSON value, or how to answer.
Answer = tuple[int, Any] | Callable[["Stub", asyncio.StreamWriter], Awaitable[None]]
Route = Callable[[Any], Answer]


def draw(*parts: Any) -> float:
    """Return a number in [0, 1) that depends on the parts alone."""
    number = hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).digest()[:8]
    return int.from_bytes(number, "big") / 2**64


class Stub:
    """Listens while it is entered; `kill` and `restart` stop and start it again, at the same port.

    Args:
        routes: pattern of a path -> function of a body (JSON, else bytes). The first that fits answers; 404 else.
        fault: of `faults` or `wrong`, shown by the routes while `faulty`, in a share `rate` of the calls; None: well.
        free: further routes, without faults and not counted.
        key: bearer token that it insists on.
    """

    # Named faults: in place of the answer, and functions that change the answer to a body.
    faults: dict[str, Callable[[Stub, asyncio.StreamWriter], Awaitable[None]]]
    wrong: dict[str, Callable[[Any, Any], None]] = {}

    def __init__(
        self,
        routes: dict[str, Route] | None = None,
        fault: str | None = None,
        rate: float = 1.0,
        *,
        free: dict[str, Route] | None = None,
        key: str | None = None,
        latency_s: float = 0.0,
        redirect_to: str = "http://127.0.0.1:9/",
    ):
        self.routes, self.free, self.fault, self.rate = routes or {}, free or {}, fault, rate
        self.key, self.latency_s, self.redirect_to = key, latency_s, redirect_to
        self.faulty = True
        # Whether a body is one on which its fault shows, and what of it decides how often.
        self.fails_on: Callable[[Any], bool] = lambda _body: True
        self.drawn_from: Callable[[Any], Any] = lambda body: body
        # By question, which is a body as JSON.
        self.asked: Counter[str] = Counter()
        self.sold: Counter[str] = Counter()
        self.num_faults = self.num_open = self.most_open = 0
        self.calls: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.bodies: list[Any] = []
        self.port = 0
        self.is_alive = False
        self._writers: set[asyncio.StreamWriter] = set()

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.restart()
        self.root = self.url = f"http://127.0.0.1:{self.port}"
        return self

    def __exit__(self, *_error: Any) -> None:
        if self._loop.is_running():
            self.kill()
            self._loop.call_soon_threadsafe(self._loop.stop)

    def kill(self) -> None:
        """Close the port and every connection."""
        self._call(self.die())

    def restart(self) -> None:
        self._call(self.listen())

    def _call(self, coroutine: Any) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

    async def listen(self) -> None:
        self.is_alive = True
        self._server = await asyncio.start_server(self._connection, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def die(self) -> None:
        # A connection may have been accepted already whose handler has not begun.
        self.is_alive = False
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while self.is_alive and not writer.is_closing() and (line := await reader.readline()):
                method, path, _ = line.decode().split(" ")
                headers = {}
                while (line := (await reader.readline()).decode().strip()) != "":
                    name, _, value = line.partition(":")
                    headers[name.lower()] = value.strip()
                body = await _body(reader, headers)
                if self.is_alive:
                    await self._count(f"{method} {path}", headers, body, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _count(self, call: str, headers: dict[str, str], body: Any, writer: asyncio.StreamWriter) -> None:
        self.calls.append(call)
        self.headers.append(headers)
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            answer = self.answer(call.split(" ")[1], headers.get("authorization", ""), body)
            # Counted first: whoever has the answer may look into the book at once.
            await asyncio.sleep(self.latency_s)
            await (answer(self, writer) if callable(answer) else send(writer, *answer))
        finally:
            self.num_open -= 1

    def answer(self, path: str, authorization: str, body: Any) -> Answer:
        if self.key is not None and authorization != f"Bearer {self.key}" and path not in ("/health", "/version"):
            return 401, {"error": f"Unauthorized: {authorization}"}
        for pattern, route in (self.free | self.routes).items():
            if fnmatchcase(path, pattern):
                return self._sell(route, body) if pattern in self.routes else route(body)
        return 404, {"detail": "Not Found"}

    def _sell(self, route: Route, body: Any) -> Answer:
        self.bodies.append(body)
        question = json.dumps(body, sort_keys=True, default=str)
        self.asked[question] += 1
        is_due = self.fault and self.faulty and self.fails_on(body)
        drawn = json.dumps(self.drawn_from(body), sort_keys=True, default=str)
        fails = bool(is_due and draw(self.fault, drawn, self.asked[question]) < self.rate)
        self.num_faults += fails
        if fails and self.fault in self.faults:
            return self.faults[self.fault]
        answer = route(body)
        if fails:
            self.wrong[self.fault](answer[1], body)
        if not callable(answer) and answer[0] == 200:
            self.sold[question] += 1
        return answer


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> Any:
    body = b""
    if "chunked" in headers.get("transfer-encoding", ""):
        while size := int((await reader.readline()).split(b";")[0], 16):
            body += await reader.readexactly(size)
            await reader.readline()
        await reader.readline()
    else:
        body = await reader.readexactly(int(headers.get("content-length", 0)))
    kind = headers.get("content-type", "")
    return json.loads(body) if body and "json" in kind and "ndjson" not in kind else body


async def send(
    writer: asyncio.StreamWriter, status: int, body: Any, headers: dict[str, str] | None = None, length: int = 0
) -> None:
    """Send a response; `length` bytes more are announced than come."""
    is_text = isinstance(body, str)
    payload = body.encode() if is_text else json.dumps(body).encode()
    lines = {
        "Content-Type": "text/html" if is_text and "<" in body else "application/json",
        "Content-Length": str(len(payload) + length),
        "Date": formatdate(usegmt=True),
        **(headers or {}),
    }
    head = f"HTTP/1.1 {status} x\r\n" + "".join(f"{k}: {v}\r\n" for k, v in lines.items()) + "\r\n"
    writer.write(head.encode() + payload)
    await writer.drain()


HTML = "<!DOCTYPE html><html><body>Bad gateway</body></html>"


def says(status: int, body: Any, headers: Callable[[Stub], dict[str, str]] = lambda _stub: {}) -> Any:
    """Return a fault: an answer with headers, which may depend on the server."""
    return lambda stub, writer: send(writer, status, body, headers(stub))


async def _hang(stub: Stub, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(3600)


async def _trickle(stub: Stub, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100000\r\n\r\n")
    while True:
        writer.write(b" ")
        await writer.drain()
        await asyncio.sleep(0.02)


async def _reset(stub: Stub, writer: asyncio.StreamWriter) -> None:
    # Linger 0: the connection ends with RST instead of FIN.
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def _cut_body(stub: Stub, writer: asyncio.StreamWriter) -> None:
    await send(writer, 200, {"choices": []}, length=50)
    writer.close()


async def _endless(stub: Stub, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n")
    while not writer.is_closing():
        writer.write(b"100000\r\n" + b" " * 2**20 + b"\r\n")
        await writer.drain()


async def _gzip_bomb(stub: Stub, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Encoding: gzip\r\n")
    writer.write(b"Content-Length: %d\r\n\r\n" % len(bomb()) + bomb())
    await writer.drain()


@functools.cache
def bomb() -> bytes:
    """Return 256 MiB of spaces, packed."""
    packer = zlib.compressobj(1, wbits=zlib.MAX_WBITS | 16)
    return b"".join(packer.compress(b" " * 2**20) for _ in range(256)) + packer.flush()


FAULTY: dict[str, Callable[[Stub, asyncio.StreamWriter], Awaitable[None]]] = {
    "429": says(429, {"error": {"message": "slow down"}}),
    "500": says(500, {"error": {"message": "CUDA error"}}),
    "502_html": says(502, HTML),
    "hang": _hang,
    "trickle": _trickle,
    "reset": _reset,
    "cut_body": _cut_body,
    "truncated_json": says(200, '{"id": "x", "choices": [{"index": 0, "mess'),
    "no_text": says(200, {"choices": [{"message": {"role": "assistant", "content": None}}], "model": "judge-1"}),
    "html_in_200": says(200, HTML),
    "redirect": says(307, {}, lambda stub: {"Location": stub.redirect_to}),
    "endless": _endless,
    "gzip_bomb": _gzip_bomb,
}
Stub.faults = FAULTY


def wait_until(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait until something holds; AssertionError after so many seconds."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it does not come true"
        time.sleep(0.02)
