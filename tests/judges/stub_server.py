"""A judge server on 127.0.0.1 with faults, and a book of what it sold."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

from tests.servers.stub_http import FAULTY, StubHTTP, draw, send

THOUGHT_TOKENS = 100
USAGE = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}


class StubServer(StubHTTP):
    """Answers `/v1/models` and `/v1/chat/completions`; other paths by `routes`.

    Args:
        model: its only model.
        fault: of FAULTY, or "other_model", "no_logprobs"; None for a server that is well.
        rate: share of the calls that go wrong while `faulty`.
        logprobs: whether it returns log probabilities when asked.
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
        logprobs: bool = True,
        redirect_to: str = "http://127.0.0.1:9/",
        key: str | None = None,
        bias: float = 0.0,
        latency_s: float = 0.0,
        thinks: str | None = None,
        repeats_headers: bool = False,
        routes: dict[str, Callable[[Any], tuple[int, Any]]] | None = None,
    ):
        super().__init__()
        self.model, self.fault, self.rate = model, fault, rate
        self.logprobs, self.redirect_to, self.key, self.bias = logprobs, redirect_to, key, bias
        self.latency_s, self.thinks, self.repeats_headers = latency_s, thinks, repeats_headers
        self.routes = routes or {}
        self.faulty = True
        # Of a body: the reply in place of the usual one, or None.
        self.replies_instead: Callable[[Any], Any] = lambda _body: None
        # Of a body: the status of its answer.
        self.status_instead: Callable[[Any], int] = lambda _body: 200
        # Of a body: what the reply reports as its usage.
        self.usage_of: Callable[[Any], Any] = lambda _body: USAGE
        # Whether a body is one on which its fault shows.
        self.fails_on: Callable[[Any], bool] = lambda _body: True
        self.asked: Counter[str] = Counter()
        self.sold: Counter[str] = Counter()
        self.num_faults = self.num_open = self.most_open = 0
        self.headers: list[dict[str, str]] = []
        self.bodies: list[Any] = []

    def __enter__(self) -> StubServer:
        super().__enter__()
        self.url = f"{self.root}/v1"
        return self

    async def _answer(
        self, method: str, path: str, headers: dict[str, str], body: Any, writer: asyncio.StreamWriter
    ) -> None:
        self.headers.append(headers)
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            await self._route(method, path, headers, body, writer)
        finally:
            self.num_open -= 1

    async def _route(
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
            is_due = self.fault and self.faulty and self.fails_on(body)
            fails = is_due and draw(self.fault, question, self.asked[question]) < self.rate
            self.num_faults += bool(fails)
            if fails and self.fault == "other_model":
                await send(writer, 200, completion("another-model", "A"))
                return
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
        seed = body.get("seed")
        if self.thinks and body.get("chat_template_kwargs", {}).get("enable_thinking", True):
            return 200, self._think(body, seed)
        p = first_probability(body["messages"], self.bias)
        label = "A" if draw("label", body["messages"], seed) < p else "B"
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
