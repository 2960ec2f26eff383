"""A judge behind any server that speaks OpenAI's chat protocol: vLLM, TGI, transformers serve, or a hosted one.

Where the server returns log probabilities of the labels, one call gives a probability; where it does not, votes that
are sampled at temperature 1 estimate the same number. Which of the two is seen in every single reply, never assumed.
Knows nothing of orders, of labels of pairs, or of ledgers.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar

from transformers import PreTrainedTokenizerBase

from onetrunk.judges.base import Pair, Principle, Rating, Verdict, digest
from onetrunk.judges.calls import CallError, Pace, RetryPolicy, run_async
from onetrunk.judges.chat import VERDICT_TOKENS, ChatServer, Opinion
from onetrunk.judges.marks import PLACES, Marks, ShownMarks, turns_of_places
from onetrunk.judges.template import LABELS, RATINGS, nonce_of, pairwise_messages, rating_messages
from onetrunk.judges.votes import REASON_FIRST, VERDICT_NOW, Abilities, ChatQuestion, Poll, Trial, probe
from onetrunk.types import Message, Prompt

T = TypeVar("T")


class ServerJudge:
    """A judge by HTTP; see `judges/base.py` for what it may be asked.

    A verdict is one call where log probabilities come back, and `samples` calls where they do not; with reasoning each
    of them is two. Calls run at once, are asked again after errors that pass, and slow down when the server is
    overloaded. What could not be had is an error in its verdict, never a label; a server that stays away is given up
    with one sentence (`ServerUnavailable`), and every verdict until then has been handed to `done`.

    Args:
        url: of the API, such as "http://127.0.0.1:8000/v1".
        model: its name on the server; replies of any other are refused.
        api_key_env: environment variable that holds the key; None sends no credentials.
        max_concurrency: calls at once, at most.
        timeout_s: deadline of one call.
        samples: votes for a question where there are no log probabilities.
        reasoning_tokens: longest reasoning before each verdict; 0 for none.
        method: "auto" takes log probabilities where they come; "votes" never asks for them; "logprobs" refuses a
            server without them.
        allow_http: plain http also to hosts outside this machine and private networks.
        policy: waits, numbers of calls and deadlines; None for RetryPolicy's own, with `timeout_s`.
        verdict_tokens: longest reply; a model that reasons on its own needs room for that too.
        extra_body: further entries of the body of every call, such as {"chat_template_kwargs": {...}}.
        tokenizer: of the model on the server: its control tokens, and what its chat template writes, are taken out of
            what is judged. None: what a vLLM server shows of its template. In either case the general rule of
            `template.py` holds too.

    Raises:
        ValueError: a setting that is out of its range, a URL that may not be called, a variable that is not set.
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
        self.name = re.sub(r"[^A-Za-z0-9._-]+", "-", model.rstrip("/").rpartition("/")[2])[:96]
        # Not the address: a server that moves is still the same judge. Not what a server was seen to do either, nor
        # the length of a reply: one that is cut is asked again, and no answer.
        self.identity: dict[str, Any] = {
            "kind": "server",
            "model": model,
            "method": method,
            "samples": samples,
            "reasoning_tokens": reasoning_tokens,
            "template": _template_digest(),
        }
        if extra_body:
            # Left out where there is none: ledgers of earlier versions stay valid.
            self.identity["extra_body"] = extra_body
        self.marks: Marks | ShownMarks = ShownMarks() if tokenizer is None else Marks(tokenizer)
        if tokenizer is not None:
            self.identity["marks"] = digest(self.marks.words)[:16]
        self._abilities: Abilities | None = None
        self._trial = Trial(_trial_messages(), LABELS, verdict_tokens, method, samples)
        pace = Pace(max_concurrency)
        self._poll = Poll(
            self.chat, self.policy, pace, samples, reasoning_tokens, verdict_tokens, self._trial.messages
        )

    def check(self) -> Abilities:
        """Ask a small question and return what the server can do; done once, and by the first comparison at latest.

        Raises:
            ValueError: an address that may not be called.
            RuntimeError: no server, no API, another model, a key that is not taken: one sentence.
        """
        if self._abilities is None:
            self.chat.check_host()
            self._abilities = run_async(self._check())
            if isinstance(self.marks, ShownMarks):
                self.marks = run_async(self._shown_marks())
            self._poll.marks = self.marks.words
        return self._abilities

    def compare(
        self,
        pairs: Sequence[Pair],
        principle: Principle,
        done: Callable[[int, Verdict], None] | None = None,
    ) -> list[Verdict]:
        """Return a verdict per pair (see `Judge`).

        Raises:
            ServerUnavailable: the server was given up; what it had answered was handed to `done`.
            RuntimeError, ValueError: as in `check`.
        """
        verdicts: list[Verdict | None] = [None] * len(pairs)

        def finish(index: int, outcome: Opinion | CallError) -> None:
            if isinstance(outcome, CallError):
                verdicts[index] = Verdict(None, error=str(outcome), error_kind=outcome.error_kind)
            else:
                first = None if outcome.shares is None else outcome.shares[LABELS[0]]
                verdicts[index] = Verdict(first, outcome.reason, details=outcome.details)
            if done is not None:
                done(index, verdicts[index])

        self._ask([self._pair(pair, principle) for pair in self._checked(pairs)], finish)
        return verdicts

    def rate(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[str],
        principle: Principle,
        done: Callable[[int, Rating], None] | None = None,
        stopped: Sequence[bool] | None = None,
    ) -> list[Rating]:
        """Return a rating per completion: the mean of the marks, from 0 for the lowest to 1 for the highest.

        Raises:
            ServerUnavailable: as in `compare`.
        """
        ratings: list[Rating | None] = [None] * len(prompts)

        def finish(index: int, outcome: Opinion | CallError) -> None:
            if isinstance(outcome, CallError):
                ratings[index] = Rating(None, error=str(outcome), error_kind=outcome.error_kind)
            else:
                shares = outcome.shares
                mean = None if shares is None else sum(RATINGS.index(mark) * share for mark, share in shares.items())
                score = None if mean is None else mean / (len(RATINGS) - 1)
                ratings[index] = Rating(score, outcome.reason, details=outcome.details)
            if done is not None:
                done(index, ratings[index])

        asked = zip(prompts, completions, strict=True)
        self._ask([self._single(p, c, principle) for p, c in self._checked(list(asked))], finish)
        return ratings

    def _checked(self, asked: Sequence[T]) -> Sequence[T]:
        """Return what is asked, after the check: by then the marks are known."""
        if asked:
            self.check()
        return asked

    def _pair(self, pair: Pair, principle: Principle) -> ChatQuestion:
        shown = self.marks.cleaned_pair(pair)
        return ChatQuestion(pairwise_messages(shown, principle, nonce_of(pair, principle), self.marks.words), LABELS)

    def _single(self, prompt: Prompt, completion: str, principle: Principle) -> ChatQuestion:
        shown, nonce = self.marks.cleaned_prompt(prompt), nonce_of((prompt, completion), principle)
        messages = rating_messages(shown, self.marks.cleaned(completion), principle, nonce, self.marks.words)
        return ChatQuestion(messages, RATINGS)

    def _ask(self, questions: Sequence[ChatQuestion], finish: Callable[[int, Opinion | CallError], None]) -> None:
        if questions:
            run_async(self._poll.ask(questions, self.check(), finish))

    async def _check(self) -> Abilities:
        async with self.chat.session(1) as client:
            return await probe(self.chat, client, self.policy, self._trial)

    async def _shown_marks(self) -> ShownMarks:
        seconds = self.policy.call_timeout_s
        try:
            async with asyncio.timeout(seconds):
                rendered = [await self.chat.rendered(turns) for turns in turns_of_places()]
        except TimeoutError:
            rendered = []
        # Whatever else a server answers there is no template of these turns.
        return ShownMarks(shown for shown in rendered if shown is not None and all(p in shown[0] for p in PLACES[:3]))


def _trial_messages() -> list[Message]:
    """Return a small question that is like those to come."""
    pair, principle = Pair("Say hello.", "Hello!", "No."), Principle("Which completion does what it is asked?")
    return pairwise_messages(pair, principle, nonce_of(pair, principle))


def _template_digest() -> str:
    """Return what changes with the wording of the questions, and with nothing else."""
    pair, principle = Pair("prompt", "first", "second"), Principle("principle")
    asked = [pairwise_messages(pair, principle, "nonce"), rating_messages("prompt", "first", principle, "nonce")]
    return digest([asked, LABELS, RATINGS, REASON_FIRST, VERDICT_NOW])[:16]
