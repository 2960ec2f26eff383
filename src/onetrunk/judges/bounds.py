"""How much of a server's answer is read: so many bytes, unpacked too, and so deep a JSON text. Knows no server.

A server that is broken or hostile may answer without an end, send a kilobyte that unpacks to a gigabyte, or nest JSON
until the parser's stack is full. Such an answer fails its call as any other bad one does.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import httpx2

from onetrunk.judges.retries import CallError

# 13,000 tokens with 20 candidates each have room; parsed, such an answer takes about ten times as much memory.
MAX_BYTES = 16 * 2**20
# Answers nest less than ten deep; Python's parser gives up at a thousand.
MAX_DEPTH = 100


class BoundedClient(httpx2.AsyncClient):
    """An HTTP client whose responses are read to their end, within MAX_BYTES and MAX_DEPTH, before they are returned.

    Raises:
        CallError: by every call whose answer is too long or too deep; the connection is closed then.
    """

    async def send(self, request: httpx2.Request, *, stream: bool = False, **options: Any) -> httpx2.Response:
        """Send a request, as AsyncClient does; its other methods come by here."""
        response = await super().send(request, stream=True, **options)
        if stream:
            return response
        try:
            body, problem = await _bounded_body(response)
        finally:
            await response.aclose()
        if problem:
            # Not raised where the parts are: an error keeps what its frames hold as long as it is kept.
            raise CallError(problem)
        # Unpacked already, so what says how it was packed is left out.
        packed = ("content-encoding", "content-length", "transfer-encoding")
        return httpx2.Response(
            response.status_code,
            headers=[(name, value) for name, value in response.headers.multi_items() if name.lower() not in packed],
            content=body,
            request=request,
            extensions=response.extensions,
        )


async def _bounded_body(response: httpx2.Response) -> tuple[bytes, str | None]:
    """Return the body, unpacked, or nothing and what is wrong with it."""
    parts, size = [], 0
    # Pieces of at most 1 MiB each, however much a packed one holds.
    async for part in response.aiter_bytes():
        size += len(part)
        if size > MAX_BYTES:
            return b"", f"an answer of more than {MAX_BYTES // 2**20} MiB"
        parts.append(part)
    body = b"".join(parts)
    return (b"", f"an answer that nests more than {MAX_DEPTH} deep") if nesting(body) > MAX_DEPTH else (body, None)


def nesting(body: bytes) -> int:
    """Return how deep the lists and objects of a JSON text nest; brackets inside its strings do not count."""
    outside = b"".join(body.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2])
    steps = (1 if bracket in b"[{" else -1 for bracket in outside if bracket in b"[]{}")
    return max(accumulate(steps, initial=0))
