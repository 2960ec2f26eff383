"""A server on 127.0.0.1 for tests: real sockets and HTTP in a thread, and what can go wrong with a connection.

Which calls fail is derived from (kind, question, how often it was asked): the same in every run, whatever the timing.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import socket
import struct
import threading
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from email.utils import formatdate
from typing import Any, Self


def draw(*parts: Any) -> float:
    """Return a number in [0, 1) that depends on the parts alone."""
    number = hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).digest()[:8]
    return int.from_bytes(number, "big") / 2**64


class StubHTTP(ABC):
    """Listens while it is entered; `kill` and `restart` stop and start it again, at the same port."""

    # Where redirects lead.
    redirect_to = "http://127.0.0.1:9/"

    def __init__(self) -> None:
        self.port = 0
        self._is_alive = False
        self._writers: set[asyncio.StreamWriter] = set()

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._call(self._listen())
        self.root = self.url = f"http://127.0.0.1:{self.port}"
        return self

    def __exit__(self, *_error: Any) -> None:
        if self._loop.is_running():
            self._call(self._die())
            self._loop.call_soon_threadsafe(self._loop.stop)

    def kill(self) -> None:
        """Close the port and every connection."""
        self._call(self._die())

    def restart(self) -> None:
        """Listen again, at the same port."""
        self._call(self._listen())

    def _call(self, coroutine: Any) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

    async def _listen(self) -> None:
        self._is_alive = True
        self._server = await asyncio.start_server(self._connection, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _die(self) -> None:
        # A connection may have been accepted already whose handler has not begun.
        self._is_alive = False
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while self._is_alive and (line := await reader.readline()):
                method, path, _ = line.decode().split(" ")
                headers = {}
                while (line := (await reader.readline()).decode().strip()) != "":
                    name, _, value = line.partition(":")
                    headers[name.lower()] = value.strip()
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                if not self._is_alive:
                    return
                await self._answer(method, path, headers, json.loads(body) if body else None, writer)
                if writer.is_closing():
                    return
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    @abstractmethod
    async def _answer(
        self, method: str, path: str, headers: dict[str, str], body: Any, writer: asyncio.StreamWriter
    ) -> None: ...


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


def _status(status: int, body: Any, headers: Callable[[StubHTTP], dict[str, str]] = lambda _stub: {}) -> Any:
    async def answer(stub: StubHTTP, writer: asyncio.StreamWriter, body_asked: Any) -> None:
        del body_asked
        await send(writer, status, body, headers(stub))

    return answer


async def _hang(stub: StubHTTP, writer: asyncio.StreamWriter, body: Any) -> None:
    await asyncio.sleep(3600)


async def _trickle(stub: StubHTTP, writer: asyncio.StreamWriter, body: Any) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100000\r\n\r\n")
    while True:
        writer.write(b" ")
        await writer.drain()
        await asyncio.sleep(0.02)


async def _reset(stub: StubHTTP, writer: asyncio.StreamWriter, body: Any) -> None:
    # Linger 0: the connection ends with RST instead of FIN.
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def _cut_body(stub: StubHTTP, writer: asyncio.StreamWriter, body: Any) -> None:
    await send(writer, 200, {"choices": []}, length=50)
    writer.close()


async def _endless(stub: StubHTTP, writer: asyncio.StreamWriter, body: Any) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n")
    while not writer.is_closing():
        writer.write(b"100000\r\n" + b" " * 2**20 + b"\r\n")
        await writer.drain()


async def _gzip_bomb(stub: StubHTTP, writer: asyncio.StreamWriter, body: Any) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Encoding: gzip\r\n")
    writer.write(b"Content-Length: %d\r\n\r\n" % len(bomb()) + bomb())
    await writer.drain()


@functools.cache
def bomb() -> bytes:
    """Return 256 MiB of spaces, packed."""
    packer = zlib.compressobj(1, wbits=zlib.MAX_WBITS | 16)
    return b"".join(packer.compress(b" " * 2**20) for _ in range(256)) + packer.flush()


FAULTY = {
    "429": _status(429, {"error": {"message": "slow down"}}),
    "500": _status(500, {"error": {"message": "CUDA error"}}),
    "502_html": _status(502, HTML),
    "hang": _hang,
    "trickle": _trickle,
    "reset": _reset,
    "cut_body": _cut_body,
    "truncated_json": _status(200, '{"id": "x", "choices": [{"index": 0, "mess'),
    "no_text": _status(200, {"choices": [{"message": {"role": "assistant", "content": None}}], "model": "judge-1"}),
    "html_in_200": _status(200, HTML),
    "redirect": _status(307, {}, lambda stub: {"Location": stub.redirect_to}),
    "endless": _endless,
    "gzip_bomb": _gzip_bomb,
}
