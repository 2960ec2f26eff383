"""A judge on any server with OpenAI's chat protocol: vLLM, TGI, transformers serve, or a hosted one.

If the server returns log probabilities of the labels, one call gives a probability; otherwise votes, sampled at
temperature 1, estimate it. Each reply is checked for log probabilities, because a server may leave them out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from onetrunk.judges.base import Answer, Pair, Principle, Rating, Verdict, digest, model_name
from onetrunk.judges.calls import CallError, Pace, RetryPolicy, run_async
from onetrunk.judges.chat import ChatServer, Opinion
from onetrunk.judges.template import (
    LABELS,
    MAX_CHARACTERS,
    PLACES,
    RATINGS,
    REASON_FIRST,
    VERDICT_NOW,
    VERDICT_TOKENS,
    Marks,
    Query,
    ShownMarks,
    mean_rating,
    nonce_of,
    pairwise_messages,
    rating_messages,
    turns_of_places,
)
from onetrunk.judges.votes import Abilities, ChatQuestion, Poll
from onetrunk.types import Prompt


class ServerJudge:
    """A judge by HTTP (see `Judge`).

    A verdict takes one call with log probabilities, and `samples` calls without; with reasoning, twice as many. Calls
    run concurrently, are retried after temporary errors, and slow down when the server is overloaded. A question
    without an answer gets a verdict with an error, never a label. When the server is given up (`ServerUnavailable`),
    `done` has received every verdict until then.

    Args:
        url: of the API, such as "http://127.0.0.1:8000/v1".
        model: its name on the server; replies of any other model are rejected.
        api_key_env: environment variable that holds the key; None sends no credentials.
        max_concurrency: most calls in flight.
        timeout_s: deadline of one call.
        samples: votes for a question without log probabilities.
        reasoning_tokens: longest reasoning before each verdict; 0 for none.
        method: "auto" uses log probabilities if a reply has them; "votes" never asks for them; "logprobs" rejects a
            server without them.
        allow_http: allows plain http also to hosts outside this machine and private networks.
        policy: waits, numbers of calls and deadlines; None for RetryPolicy's defaults, with `timeout_s`.
        verdict_tokens: longest reply; a model that reasons by itself needs room for that too.
        extra_body: more entries for the body of every call, such as {"chat_template_kwargs": {...}}.
        tokenizer: of the model on the server: its control tokens, and what its chat template writes, are removed from
            the judged texts. None: the marks that a vLLM server shows of its template. The general rule of
            `template.py` applies in either case.

    Raises:
        ValueError: a setting out of its range, a URL that may not be called, a variable that is not set.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        api_key_env: str | None = None,
        max_concurrency: int = 8,
        timeout_s: float = 60.0,
        samples: int = 5,
        reasoning_tokens: int = 0,
        method: Literal["auto", "logprobs", "votes"] = "auto",
        allow_http: bool = False,
        policy: RetryPolicy | None = None,
        verdict_tokens: int = VERDICT_TOKENS,
        extra_body: dict[str, Any] | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ):
        if method not in ("auto", "logprobs", "votes"):
            raise ValueError(f"method is {method!r}; expected auto, logprobs or votes")
        if samples < 1 or reasoning_tokens < 0 or verdict_tokens < 1:
            raise ValueError(
                f"samples is {samples}, reasoning_tokens {reasoning_tokens} and verdict_tokens {verdict_tokens};"
                " expected at least 1, 0 and 1"
            )
        self.chat = ChatServer(url, model, api_key_env, allow_http, extra_body)
        self.samples, self.reasoning_tokens, self.method = samples, reasoning_tokens, method
        self.policy = policy or replace(RetryPolicy(), call_timeout_s=timeout_s)
        self.name = model_name(model)
        # Without the address: a server that moves is the same judge. Without verdict_tokens: a reply that was cut is
        # no answer, so more tokens change no answer.
        self.identity: dict[str, Any] = {
            "kind": "server",
            "model": model,
            "method": method,
            "samples": samples,
            "reasoning_tokens": reasoning_tokens,
            "template": _template_digest(),
        }
        if extra_body:
            # Only if there is one, so that ledgers of earlier versions stay valid.
            self.identity["extra_body"] = extra_body
        self._knows_tokenizer = tokenizer is not None
        self.marks: ShownMarks = ShownMarks() if tokenizer is None else Marks(tokenizer)
        if tokenizer is not None:
            self.identity["marks"] = digest(self.marks.words)[:16]
        self._abilities: Abilities | None = None
        pace = Pace(max_concurrency)
        self._poll = Poll(self.chat, self.policy, pace, samples, reasoning_tokens, verdict_tokens, _trial())

    def check(self) -> Abilities:
        """Ask a small question and return what the server can do. Runs once, before the first comparison at latest.

        Raises:
            ValueError: an address that may not be called.
            RuntimeError: no server, no API, another model, a key that is not accepted.
        """
        if self._abilities is None:
            self.chat.check_host()
            self._abilities = run_async(self._poll.probe(self.method))
            if not self._knows_tokenizer:
                self.marks = run_async(self._shown_marks())
        return self._abilities

    def compare(
        self, pairs: Sequence[Pair], principle: Principle, done: Callable[[int, Verdict], None] | None = None
    ) -> list[Verdict]:
        """Return a verdict per pair (see `Judge`); raises ServerUnavailable when the server is given up."""

        def verdict(outcome: Opinion | CallError) -> Verdict:
            if isinstance(outcome, CallError):
                return Verdict(None, error=str(outcome), error_kind=outcome.error_kind)
            first = None if outcome.shares is None else outcome.shares[LABELS[0]]
            return Verdict(first, outcome.reason, details=outcome.details)

        return self._ask(len(pairs), lambda i: self.marks.pairwise(pairs[i], principle), LABELS, verdict, done)

    def rate(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[str],
        principle: Principle,
        done: Callable[[int, Rating], None] | None = None,
        stopped: Sequence[bool] | None = None,
    ) -> list[Rating]:
        """Return a rating per completion: the mean of RATINGS, from 0 to 1; raises as `compare`."""

        def rating(outcome: Opinion | CallError) -> Rating:
            if isinstance(outcome, CallError):
                return Rating(None, error=str(outcome), error_kind=outcome.error_kind)
            shares = outcome.shares
            score = None if shares is None else mean_rating([shares[label] for label in RATINGS])
            return Rating(score, outcome.reason, details=outcome.details)

        rows = list(zip(prompts, completions, strict=True))
        return self._ask(len(rows), lambda i: self.marks.rating(*rows[i], principle), RATINGS, rating, done)

    def _ask(
        self,
        num_questions: int,
        query: Callable[[int], Query],
        labels: tuple[str, ...],
        answer: Callable[[Opinion | CallError], Answer],
        done: Callable[[int, Answer], None] | None,
    ) -> list[Answer]:
        if not num_questions:
            return []
        # First: the check finds the marks, which the questions need.
        abilities = self.check()
        questions = [ChatQuestion(query(i).messages(MAX_CHARACTERS), labels) for i in range(num_questions)]
        answers: dict[int, Answer] = {}

        def finish(index: int, outcome: Opinion | CallError) -> None:
            answers[index] = answer(outcome)
            if done is not None:
                done(index, answers[index])

        run_async(self._poll.ask(questions, abilities, self.marks.words, finish))
        return [answers[index] for index in range(num_questions)]

    async def _shown_marks(self) -> ShownMarks:
        try:
            async with asyncio.timeout(self.policy.call_timeout_s):
                rendered = [await self.chat.rendered(turns) for turns in turns_of_places()]
        except TimeoutError:
            rendered = []
        # A text without the places is no rendering of these turns.
        return ShownMarks(shown for shown in rendered if shown is not None and all(p in shown[0] for p in PLACES[:3]))


def _trial() -> ChatQuestion:
    pair, principle = Pair("Say hello.", "Hello!", "No."), Principle("Which completion does what it is asked?")
    return ChatQuestion(pairwise_messages(pair, principle, nonce_of(pair, principle)), LABELS)


def _template_digest() -> str:
    """Return a hash of the wording of the questions."""
    pair, principle = Pair("prompt", "first", "second"), Principle("principle")
    questions = [pairwise_messages(pair, principle, "nonce"), rating_messages("prompt", "first", principle, "nonce")]
    return digest([questions, LABELS, RATINGS, REASON_FIRST, VERDICT_NOW])[:16]
