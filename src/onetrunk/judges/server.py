"""A judge on any server with OpenAI's chat protocol: vLLM, TGI, transformers serve, or a hosted one; or on several
servers of one model, which share the questions.

If the server returns log probabilities of the labels, one reply decides a question; otherwise votes, sampled at
temperature 1, do. Each reply is checked for log probabilities, because a server may leave them out.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from onetrunk.judges.judge import Done, Judge, Pair, Principle, Question, Rating, Single, Verdict, model_name
from onetrunk.judges.replies import (
    MORE_TOKENS,
    Reply,
    Vote,
    checked_reply,
    label_probabilities,
    opinion_of_probabilities,
    opinion_of_votes,
    read_vote,
)
from onetrunk.judges.template import LABELS, RATINGS, VERDICT_TOKENS, Form, form_of, nonce_of, question_messages
from onetrunk.servers.client import Connection, Server, checked_url
from onetrunk.servers.errors import CallError
from onetrunk.servers.fleet import Fleet, RetryPolicy, run_async
from onetrunk.types import Message
from onetrunk.utils.files import digest

logger = logging.getLogger(__name__)

CHAT_PATH = "/chat/completions"
# The most candidates that OpenAI and vLLM return; TGI takes 5 and rejects more; 0: no log probabilities.
TOP_LOGPROBS = (20, 5, 0)
# More tokens than a chat template adds to a conversation, with its own system prompt.
TEMPLATE_TOKENS = 1024
# A call that reports as many tokens is not believed.
TOO_MANY_TOKENS = 10**9
# Calls of the check at startup.
CHECK_CALLS = 3


@dataclass
class ChatQuestion:
    """A question as a server reads it, its place among the questions of a run, and its votes."""

    place: int
    messages: list[Message]
    form: Form
    num_missing: int = 0
    votes: list[Vote] = field(default_factory=list)
    refused: list[CallError] = field(default_factory=list)  # Calls that count as votes without a label.
    error: CallError | None = None

    def answer(self, num_votes: int) -> Verdict | Rating | None:
        """Return what the votes decide; None if more are needed."""
        measured = next((vote for vote in self.votes if vote.probabilities is not None), None)
        if measured is not None:
            return self.form.answer(opinion_of_probabilities(measured))
        if self.refused and len(self.refused) == len(self.votes):
            self.error = self.error or self.refused[0]
        if self.error is None and len(self.votes) >= num_votes:
            opinion = opinion_of_votes(self.votes, self.form.labels)
            if opinion.shares is not None:
                return self.form.answer(opinion)
            self.error = CallError(opinion.reason, "unread")
        if self.error is None:
            return None
        return self.form.kind(None, error=str(self.error), error_kind=self.error.error_kind)


class ServerJudge(Judge):
    """A judge by HTTP (see `Judge`).

    A verdict takes one call with log probabilities, and `samples` calls without. Calls run concurrently and are
    retried after temporary errors. A question without an answer gets a verdict with an error, never a label. When the
    servers are given up (`ServerUnavailable`), `done` has received every verdict until then. `usage` counts calls, and
    tokens as the server reports them, or the most that a call may have used.

    Args:
        url: the address of the API, such as "http://127.0.0.1:8000/v1", or a list for servers of the same model.
        model: its name on the server; replies of any other model are rejected.
        policy: waits, numbers of calls and deadlines.
        api_key_env, max_concurrency, ...: the settings `judge_...` of `JudgeConfig`.

    Raises:
        ValueError: no URL, no model, or a variable that is not set.
    """

    is_remote = True

    def __init__(
        self,
        url: str | Sequence[str],
        model: str,
        *,
        api_key_env: str | None = None,
        max_concurrency: int = 8,
        samples: int = 5,
        policy: RetryPolicy | None = None,
        verdict_tokens: int = VERDICT_TOKENS,
        extra_body: dict[str, Any] | None = None,
    ):
        urls = [url] if isinstance(url, str) else list(url)
        self.servers = [Server(_api(url), "the judge's address", "judge server", api_key_env) for url in urls]
        if not model or not model.strip():
            raise ValueError(f"judge_model is not set; name the model that {self.servers[0]} should answer with")
        self.model, self.policy, self.max_concurrency = model, policy or RetryPolicy(), max_concurrency
        self.samples, self.verdict_tokens = samples, verdict_tokens
        self.extra_body = extra_body or {}
        self.name = model_name(model)
        # Without the address: a server that moves is the same judge. Without verdict_tokens: a reply that was cut is
        # not an answer, so more tokens change no answer.
        self.identity: dict[str, Any] = {
            "kind": "server",
            "model": model,
            "samples": samples,
            "extra_body": self.extra_body,
            "template": _template_digest(),
        }
        # Candidates per token that the servers return log probabilities of; 0: none; None: not known yet.
        self.top_logprobs: int | None = None

    def check(self) -> None:
        """Ask a small question, to see what the server can do. Runs once, before the first comparison at latest.

        Raises:
            RuntimeError: no server, no API, another model, a key that is not accepted, or no verdict for all the
                model's reasoning; EndOfCalls if the budget has no room for the question.
        """
        if self.top_logprobs is not None:
            return
        pair, principle = Pair("Say hello.", "Hello!", "No."), Principle("Which completion does what it is asked?")
        messages = question_messages(pair, principle, nonce_of(pair, principle))

        async def ask(top_logprobs: int) -> Reply:
            async with self._fleet(CHECK_CALLS) as fleet:
                return await fleet.call(lambda to: self._reply(to, messages, 1, top_logprobs))

        for top_logprobs in TOP_LOGPROBS:
            try:
                reply = run_async(ask(top_logprobs))
                break
            except CallError as error:
                if error.kind != "refused" or not top_logprobs:
                    raise RuntimeError(f"{error.server or self.servers[0]} cannot be used: {error}") from None
        if reply.is_all_reasoning:
            raise RuntimeError(
                f"{self.servers[0]} cannot be used: all {self.verdict_tokens} tokens of a reply went to the model's"
                f" reasoning, and none to its verdict; {MORE_TOKENS}"
            )
        vote = read_vote(reply, LABELS)
        if vote.label is None:
            logger.warning("%s answers a simple question without a verdict: %s", self.servers[0], vote.problem)
        self.top_logprobs = top_logprobs if label_probabilities(reply, LABELS, vote.label) is not None else 0

    def _answer_all(self, questions: Sequence[Question], keep: Done) -> None:
        """Ask all questions at once; raises ServerUnavailable when the servers are given up."""
        self.check()
        chats = [
            ChatQuestion(place, question_messages(item, principle, nonce_of(item, principle)), form_of(item))
            for place, (item, principle) in enumerate(questions)
        ]
        run_async(self._decide(chats, keep))

    async def _decide(self, chats: list[ChatQuestion], keep: Done) -> None:
        # Where log probabilities are expected, one reply decides; the other votes are bought if it has none.
        rounds = [range(1), range(1, self.samples)] if self.top_logprobs else [range(self.samples)]
        async with self._fleet(self.policy.max_calls) as fleet:
            for numbers in rounds:
                chats = await self._buy(fleet, chats, numbers, keep)

    async def _buy(
        self, fleet: Fleet, chats: Sequence[ChatQuestion], numbers: range, keep: Done
    ) -> list[ChatQuestion]:
        """Buy the votes of these numbers on each question, and keep what they decide.

        Returns:
            The questions that need more votes.
        """
        calls = [(chat, number) for chat in chats for number in numbers]
        for chat in chats:
            chat.num_missing = len(numbers)
        undecided: list[ChatQuestion] = []

        async def vote(to: Connection, index: int) -> Vote:
            chat, number = calls[index]
            # A different seed for every vote and every question, and the same one for a repeated call.
            seed = int(digest([digest(chat.messages), number])[:7], 16)
            return read_vote(await self._reply(to, chat.messages, seed, self.top_logprobs), chat.form.labels)

        def done(index: int, outcome: Vote | CallError) -> None:
            chat = calls[index][0]
            if isinstance(outcome, CallError) and outcome.error_kind == "refused":
                chat.refused.append(outcome)
                chat.votes.append(Vote(None, problem=str(outcome)))
            elif isinstance(outcome, CallError):
                chat.error = outcome
            else:
                chat.votes.append(outcome)
            chat.num_missing -= 1
            if chat.num_missing:
                return
            answer = chat.answer(self.samples)
            if answer is None:
                undecided.append(chat)
            else:
                keep(chat.place, answer)

        await fleet.answer_all(len(calls), vote, done)
        return undecided

    def _fleet(self, max_calls: int) -> Fleet:
        return Fleet(self.servers, replace(self.policy, max_calls=max_calls), self.max_concurrency)

    async def _reply(self, to: Connection, messages: list[Message], seed: int, top_logprobs: int | None) -> Reply:
        """Return a reply, sampled at temperature 1 from all tokens.

        Raises:
            CallError: no reply, or one of an unexpected form.
            EndOfCalls: the budget has no room for the call; nothing was sent.
        """
        body = {
            "model": self.model,
            "messages": messages,
            "max_tokens": self.verdict_tokens,
            "seed": seed,
            "temperature": 1.0,
            "top_p": 1.0,
            "stream": False,
        }
        logprobs = {"logprobs": True, "top_logprobs": top_logprobs} if top_logprobs else {}
        body = body | logprobs | self.extra_body
        most, usage = most_tokens(body), self.usage
        if usage.budget is not None:
            usage.budget(*most)
        usage.calls += 1
        is_settled = False
        try:
            output = await to.ask("POST", CHAT_PATH, body)
            # Counted first: a reply that cannot be used is paid for too.
            self._count_tokens(output, *most)
            is_settled = True
            return checked_reply(output, self.model)
        except BaseException as error:  # A deadline cancels the call.
            usage.failed_calls += 1
            is_settled = is_settled or not getattr(error, "may_be_paid", True)
            raise
        finally:
            # A call whose cost is not known keeps its reservation.
            if usage.budget is not None and is_settled:
                usage.release(*most)

    def _count_tokens(self, output: Any, most_prompt: int, most_completion: int) -> None:
        reported = output.get("usage") if isinstance(output, Mapping) else None
        reported = reported if isinstance(reported, Mapping) else {}
        prompt, completion = reported.get("prompt_tokens"), reported.get("completion_tokens")
        if not (_is_count(prompt) and prompt > 0 and _is_count(completion)):
            if not self.usage.estimated_calls:
                logger.warning("%s does not report the tokens of a call (usage); the most is counted", self.servers[0])
            self.usage.estimated_calls += 1
            prompt, completion = most_prompt, most_completion
        self.usage.prompt_tokens += prompt
        self.usage.completion_tokens += completion


def most_tokens(body: Mapping[str, Any]) -> tuple[int, int]:
    """Return the most tokens that a call with this body reads and writes: no token is shorter than a byte."""
    size = len(json.dumps(body, ensure_ascii=False).encode("utf-8", "surrogatepass"))
    limits = [body["max_tokens"], body.get("max_completion_tokens")]
    return size + TEMPLATE_TOKENS, max(limit for limit in limits if _is_count(limit))


def _is_count(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and 0 <= number < TOO_MANY_TOKENS


def _api(url: str) -> str:
    """Return the base of the API; an address without /v1 stands for its /v1."""
    url = checked_url(url, "the judge's address")
    base = url.removesuffix(CHAT_PATH)
    return base if base != url or base.endswith("/v1") else f"{base}/v1"


def _template_digest() -> str:
    """Return a hash of the wording of the questions."""
    items = Pair("prompt", "first", "second"), Single("prompt", "first")
    questions = [question_messages(item, Principle("principle"), "nonce") for item in items]
    return digest([questions, LABELS, RATINGS])[:16]
