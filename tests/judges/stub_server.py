"""A judge server on 127.0.0.1 with faults, and a book of what it sold."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tests.servers.stub import FAULTY, Stub, draw, says

THOUGHT_TOKENS = 100
USAGE = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}


def _without_logprobs(answer: Any, _body: Any) -> None:
    answer["choices"][0]["logprobs"] = None


class StubServer(Stub):
    """Answers `/v1/models` and `/v1/chat/completions`.

    Args:
        fault: of FAULTY, or "other_model", "no_logprobs"; `rate` and other settings as of Stub.
        logprobs: whether it returns log probabilities when asked.
        bias: added to the probability of the first label.
        thinks: where its model's reasoning comes back, which takes THOUGHT_TOKENS and is turned off by the template's
            enable_thinking: "reasoning", "reasoning_content", or "inline" for the text itself; None: it has none.
        repeats_headers: whether the reasoning ends with the headers of a call.
    """

    wrong = {"no_logprobs": _without_logprobs}

    def __init__(
        self,
        model: str = "judge-1",
        fault: str | None = None,
        rate: float = 1.0,
        *,
        logprobs: bool = True,
        bias: float = 0.0,
        thinks: str | None = None,
        repeats_headers: bool = False,
        **settings: Any,
    ):
        models = {"/v1/models": lambda _body: (200, {"data": [{"id": model}]})}
        super().__init__({"/v1/chat/completions": self._complete}, fault, rate, free=models, **settings)
        self.faults = FAULTY | {"other_model": says(200, completion("another-model", "A"))}
        self.model, self.logprobs, self.bias = model, logprobs, bias
        self.thinks, self.repeats_headers = thinks, repeats_headers
        # Of a body: the reply in place of the usual one, or None; the status; what it reports as its usage.
        self.replies_instead: Callable[[Any], Any] = lambda _body: None
        self.status_instead: Callable[[Any], int] = lambda _body: 200
        self.usage_of: Callable[[Any], Any] = lambda _body: USAGE

    def __enter__(self) -> StubServer:
        super().__enter__()
        self.url = f"{self.root}/v1"
        return self

    def _complete(self, body: Any) -> tuple[int, Any]:
        status = self.status_instead(body)
        if status != 200:
            return status, {"error": {"message": "this prompt is blocked"}}
        if body["model"] != self.model:
            return 404, {"error": {"message": f"The model `{body['model']}` does not exist."}}
        return 200, (self.replies_instead(body) or self._reply(body)) | {"usage": self.usage_of(body)}

    def _reply(self, body: Any) -> dict[str, Any]:
        p, seed = first_probability(body["messages"], self.bias), body.get("seed")
        label = "A" if draw("label", body["messages"], seed) < p else "B"
        if self.thinks and body.get("chat_template_kwargs", {}).get("enable_thinking", True):
            return self._think(body, label)
        shares = {"A": 0.9 * p, "B": 0.9 * (1 - p), " A": 0.08 * p, " B": 0.08 * (1 - p), "The": 0.01}
        asked = body.get("logprobs") and self.logprobs
        return completion(self.model, label, [candidates(label, shares)] if asked else None)

    def _think(self, body: Any, label: str) -> dict[str, Any]:
        """Return a reply of a model that reasons first, in the forms of vLLM with a parser for reasoning and without.

        The log probabilities are those of all its tokens, the reasoning's first.
        """
        thought = f"A and B, let me see {draw('thought', body['messages'], body.get('seed'))}"
        thought += f" {self.headers[-1]}" if self.repeats_headers else ""
        is_whole = body["max_tokens"] > THOUGHT_TOKENS
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
