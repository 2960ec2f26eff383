"""A judge server on 127.0.0.1 with faults: real sockets and HTTP in a thread, and a book of what it sold.

Which calls fail is derived from (kind, question, how often it was asked): the same in every run, whatever the timing.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import math
import socket
import struct
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable
from email.utils import formatdate
from typing import Any

# What goes wrong, and whether the client still gets an answer that it has to pay for.
NOT_SOLD = (
    "429_seconds",
    "429_date",
    "429",
    "500",
    "502_html",
    "503_html",
    "hang",
    "trickle",
    "reset",
    "cut_body",
    "truncated_json",
    "empty_choices",
    "no_text",
    "error_in_200",
    "html_in_200",
    "redirect",
    "other_model",
)
THOUGHT_TOKENS = 100
USAGE = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
SOLD = ("fenced", "wrong_label", "no_logprobs")
FAULTS = NOT_SOLD + SOLD
# Answers that are read in part; each costs many megabytes.
OUT_OF_BOUNDS = ("endless", "gzip_bomb", "too_deep")


def draw(*parts: Any) -> float:
    """Return a number in [0, 1) that depends on the parts alone."""
    number = hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).digest()[:8]
    return int.from_bytes(number, "big") / 2**64


class StubServer:
    """Answers `/v1/models` and `/v1/chat/completions`; other paths by `routes`.

    Args:
        model: its only model.
        fault: one of FAULTS; None for a server that is well.
        rate: share of the calls that go wrong while `faulty`.
        logprobs: whether it returns log probabilities when asked; "top5" refuses more than 5 candidates.
        samples: False answers the same whatever the seed.
        redirect_to: where redirects lead.
        key: bearer token that it insists on.
        bias: added to the probability of the first label.
        latency_s: how long an answer takes.
        thinks: where its model's reasoning comes back, which takes THOUGHT_TOKENS and is turned off by the template's
            enable_thinking: "reasoning", "reasoning_content", or "inline" for the text itself; None: it has none.
        repeats_headers: whether the reasoning ends with the headers of a call.
        routes: path -> function(body) -> (status, JSON value), for servers of other kinds.
    """

    def __init__(
        self,
        model: str = "judge-1",
        fault: str | None = None,
        rate: float = 1.0,
        *,
        logprobs: bool | str = True,
        samples: bool = True,
        redirect_to: str = "http://127.0.0.1:9/",
        key: str | None = None,
        bias: float = 0.0,
        latency_s: float = 0.0,
        thinks: str | None = None,
        repeats_headers: bool = False,
        routes: dict[str, Callable[[Any], tuple[int, Any]]] | None = None,
    ):
        self.model, self.fault, self.rate = model, fault, rate
        self.logprobs, self.samples, self.redirect_to, self.key, self.bias = logprobs, samples, redirect_to, key, bias
        self.latency_s, self.thinks, self.repeats_headers = latency_s, thinks, repeats_headers
        self.routes = routes or {}
        self.faulty = True
        # Of a body: the reply in place of the usual one, or None.
        self.replies_instead: Callable[[Any], Any] = lambda _body: None
        # Of a body: the status of its answer.
        self.status_instead: Callable[[Any], int] = lambda _body: 200
        # Of a body: what the reply reports as its usage.
        self.usage_of: Callable[[Any], Any] = lambda _body: USAGE
        # Whether a body is one on which it hangs, or on which alone its fault shows.
        self.hangs_on: Callable[[Any], bool] = lambda _body: False
        self.fails_on: Callable[[Any], bool] = lambda _body: True
        self.heals_after = math.inf
        self.asked: Counter[str] = Counter()
        self.sold: Counter[str] = Counter()
        self.num_faults = self.num_open = self.most_open = 0
        self.headers: list[dict[str, str]] = []
        self.bodies: list[Any] = []

    def __enter__(self) -> StubServer:
        self._loop = asyncio.new_event_loop()
        ready = threading.Event()
        threading.Thread(target=self._serve, args=(ready,), daemon=True).start()
        ready.wait()
        self.root = f"http://127.0.0.1:{self.port}"
        self.url = f"{self.root}/v1"
        return self

    def __exit__(self, *_error: Any) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)

    def _serve(self, ready: threading.Event) -> None:
        async def serve() -> None:
            self._stop = asyncio.Event()
            server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
            self.port = server.sockets[0].getsockname()[1]
            ready.set()
            await self._stop.wait()
            server.close()
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()

        self._loop.run_until_complete(serve())
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                method, path, _ = line.decode().split(" ")
                headers = {}
                while (line := (await reader.readline()).decode().strip()) != "":
                    name, _, value = line.partition(":")
                    headers[name.lower()] = value.strip()
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                self.headers.append(headers)
                self.num_open += 1
                self.most_open = max(self.most_open, self.num_open)
                try:
                    await self._answer(method, path, headers, json.loads(body) if body else None, writer)
                finally:
                    self.num_open -= 1
                if writer.is_closing():
                    return
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _answer(
        self, method: str, path: str, headers: dict[str, str], body: Any, writer: asyncio.StreamWriter
    ) -> None:
        if self.key is not None and headers.get("authorization") != f"Bearer {self.key}":
            said = f"no such key: {headers.get('authorization', '')}"
            await send(writer, 401, {"error": {"message": said}})
        elif path == "/v1/models" and method == "GET":
            await send(writer, 200, {"data": [{"id": self.model}]})
        elif path == "/v1/chat/completions" or path in self.routes:
            self.bodies.append(body)
            question = json.dumps(body, sort_keys=True)
            self.asked[question] += 1
            if self.hangs_on(body):
                await _hang(self, writer, body)
            is_due = self.fault and self.faulty and self.fails_on(body)
            fails = is_due and draw(self.fault, question, self.asked[question]) < self.rate
            self.num_faults += bool(fails)
            if self.num_faults == self.heals_after:
                self.faulty = False
            if fails and self.fault in FAULTY:
                await FAULTY[self.fault](self, writer, body)
                return
            status, answer = self.routes[path](body) if path in self.routes else self._complete(body, fails)
            if status == 200 and isinstance(answer, dict) and "usage" in answer:
                answer = answer | {"usage": self.usage_of(body)}
            # Counted first: whoever has the answer may look into the book at once.
            self.sold[question] += status == 200
            await asyncio.sleep(self.latency_s)
            await send(writer, status, answer)
        else:
            await send(writer, 404, {"detail": "Not Found"})

    def _complete(self, body: Any, fails: Any) -> tuple[int, Any]:
        status = self.status_instead(body)
        if status != 200:
            return status, {"error": {"message": "this prompt is blocked"}}
        instead = self.replies_instead(body)
        if instead is not None:
            return 200, instead
        if body["model"] != self.model:
            return 404, {"error": {"message": f"The model `{body['model']}` does not exist."}}
        if self.logprobs == "top5" and body.get("top_logprobs", 0) > 5:
            return 422, {"error": "top_logprobs must be at most 5"}
        seed = body.get("seed") if self.samples else None
        if self.thinks and body.get("chat_template_kwargs", {}).get("enable_thinking", True):
            return 200, self._think(body, seed)
        if "random" in body["messages"][-1]["content"]:
            return 200, completion(self.model, f"words {draw('open', seed)}")
        p = first_probability(body["messages"], self.bias)
        label = "A" if draw("label", body["messages"], seed) < p else "B"
        if fails and self.fault == "wrong_label":
            return 200, completion(self.model, "Both are fine.", [candidates("Both", {"Both": 0.9, "A": 0.01})])
        if fails and self.fault == "fenced":
            return 200, completion(self.model, f'```json\n{{"verdict": "{label}"}}\n```')
        asked = body.get("logprobs") and self.logprobs and not fails
        shares = {"A": 0.9 * p, "B": 0.9 * (1 - p), " A": 0.08 * p, " B": 0.08 * (1 - p), "The": 0.01}
        return 200, completion(self.model, label, [candidates(label, shares)] if asked else None)

    def _think(self, body: Any, seed: Any) -> Any:
        """Return a reply of a model that reasons first, in the forms of vLLM with a parser for reasoning and without.

        The log probabilities are those of all its tokens, the reasoning's first.
        """
        thought = f"A and B, let me see {draw('thought', body['messages'], seed)}"
        thought += f" {self.headers[-1]}" if self.repeats_headers else ""
        is_whole = body["max_tokens"] > THOUGHT_TOKENS
        label = "A" if draw("label", body["messages"], seed) < first_probability(body["messages"], self.bias) else "B"
        positions = [candidates("A", {"A": 0.99, "B": 0.001})] if body.get("logprobs") else None
        if self.thinks == "inline":
            text = f"<think>{thought}</think>\n\n{label}" if is_whole else f"<think>{thought}"
            reply = completion(self.model, text, positions)
        else:
            reply = completion(self.model, label if is_whole else None, positions)
            reply["choices"][0]["message"][self.thinks] = thought
        reply["choices"][0]["finish_reason"] = "stop" if is_whole else "length"
        return reply


def first_probability(messages: Any, bias: float = 0.0) -> float:
    """Return what this server believes: the probability of the first label, from the messages alone."""
    return min(0.95, max(0.05, draw("belief", messages) + bias))


def candidates(token: str, shares: dict[str, float]) -> dict[str, Any]:
    """Return the log probabilities of one position, as OpenAI's API gives them."""
    top = [{"token": t, "logprob": math.log(p)} for t, p in shares.items()]
    return {"token": token, "logprob": math.log(shares[token]), "top_logprobs": top}


def completion(model: str, text: str | None, positions: list[Any] | None = None) -> dict[str, Any]:
    """Return the body of a chat completion."""
    logprobs = None if positions is None else {"content": positions}
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "finish_reason": "stop", "message": message, "logprobs": logprobs}
    return {"id": "x", "object": "chat.completion", "created": 0, "model": model, "choices": [choice], "usage": USAGE}


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


def _status(status: int, body: Any, headers: Callable[[StubServer], dict[str, str]] = lambda _stub: {}) -> Any:
    async def answer(stub: StubServer, writer: asyncio.StreamWriter, body_asked: Any) -> None:
        del body_asked
        await send(writer, status, body, headers(stub))

    return answer


async def _hang(stub: StubServer, writer: asyncio.StreamWriter, body: Any) -> None:
    await asyncio.sleep(3600)


async def _trickle(stub: StubServer, writer: asyncio.StreamWriter, body: Any) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100000\r\n\r\n")
    while True:
        writer.write(b" ")
        await writer.drain()
        await asyncio.sleep(0.02)


async def _reset(stub: StubServer, writer: asyncio.StreamWriter, body: Any) -> None:
    # Linger 0: the connection ends with RST instead of FIN.
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def _cut_body(stub: StubServer, writer: asyncio.StreamWriter, body: Any) -> None:
    await send(writer, 200, {"choices": []}, length=50)
    writer.close()


async def _endless(stub: StubServer, writer: asyncio.StreamWriter, body: Any) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n")
    while not writer.is_closing():
        writer.write(b"100000\r\n" + b" " * 2**20 + b"\r\n")
        await writer.drain()


async def _gzip_bomb(stub: StubServer, writer: asyncio.StreamWriter, body: Any) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Encoding: gzip\r\n")
    writer.write(b"Content-Length: %d\r\n\r\n" % len(bomb()) + bomb())
    await writer.drain()


@functools.cache
def bomb() -> bytes:
    """Return 256 MiB of spaces, packed."""
    packer = zlib.compressobj(1, wbits=zlib.MAX_WBITS | 16)
    return b"".join(packer.compress(b" " * 2**20) for _ in range(256)) + packer.flush()


FAULTY = {
    "429_seconds": _status(429, {"error": {"message": "slow down"}}, lambda _stub: {"Retry-After": "0.02"}),
    # A date has no parts of a second; the server's own clock says that it is now.
    "429_date": _status(429, {"error": "slow down"}, lambda _stub: {"Retry-After": formatdate(usegmt=True)}),
    "429_one_second": _status(429, {"error": "slow down"}, lambda _stub: {"Retry-After": "1"}),
    "429_next_second": _status(
        429, {"error": "slow down"}, lambda _stub: {"Retry-After": formatdate(int(time.time()) + 1, usegmt=True)}
    ),
    "429": _status(429, {"error": {"message": "slow down"}}),
    "500": _status(500, {"error": {"message": "CUDA error"}}),
    "502_html": _status(502, HTML),
    "503_html": _status(503, HTML),
    "hang": _hang,
    "trickle": _trickle,
    "reset": _reset,
    "cut_body": _cut_body,
    "truncated_json": _status(200, '{"id": "x", "choices": [{"index": 0, "mess'),
    "empty_choices": _status(200, {"choices": [], "model": "judge-1"}),
    "no_text": _status(200, {"choices": [{"message": {"role": "assistant", "content": None}}], "model": "judge-1"}),
    "error_in_200": _status(200, {"error": {"message": "upstream is gone"}}),
    "html_in_200": _status(200, HTML),
    "redirect": _status(307, {}, lambda stub: {"Location": stub.redirect_to}),
    "endless": _endless,
    "gzip_bomb": _gzip_bomb,
    "too_deep": _status(200, "[" * 100_000 + "]" * 100_000),
    "other_model": _status(200, completion("another-model", "A")),
}
