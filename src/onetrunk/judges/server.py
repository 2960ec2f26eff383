"""A judge on any server with OpenAI's chat protocol: vLLM, TGI, transformers serve, or a hosted one; or on several
servers of one model, which share the load.

If the server returns log probabilities of the labels, one reply decides a question; otherwise votes, sampled at
temperature 1, do. Each reply is checked for log probabilities, because a server may leave them out. No reply is bought
twice: the votes on a question that is not decided yet are kept, and the next run asks only for the missing ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import httpx2
from transformers import PreTrainedTokenizerBase

from onetrunk.judges.chat import (
    MORE_TOKENS,
    ChatServer,
    Reply,
    Vote,
    is_same_model,
    opinion_of_probabilities,
    opinion_of_votes,
    read_vote,
)
from onetrunk.judges.judge import Done, DoneEach, Items, Judge, Pair, Principle, Single, digest, model_name
from onetrunk.judges.template import (
    LABELS,
    MAX_CHARACTERS,
    PLACES,
    RATINGS,
    REASON_FIRST,
    VERDICT_NOW,
    VERDICT_TOKENS,
    Form,
    Marks,
    Opinion,
    ShownMarks,
    form_of,
    nonce_of,
    question_messages,
    sanitized,
    turns_of_places,
    with_reasons_asked,
    with_reasons_given,
)
from onetrunk.types import Message
from onetrunk.utils.calls import CallError, CallRun, EndOfCalls, Pace, RetryPolicy, ask_patiently, run_async
from onetrunk.utils.http import AN_HTML_PAGE, shown
from onetrunk.utils.replicas import Replicas

logger = logging.getLogger(__name__)

T = TypeVar("T")
# The most candidates that OpenAI and vLLM return; TGI takes 5 and rejects more.
TOP_LOGPROBS = (20, 5)
# Replies to it at temperature 1 are hardly ever the same.
OPEN_QUESTION = "Write ten words at random, in any order."
OPEN_TOKENS = 24
OPEN_REPLIES = 4


@dataclass(frozen=True)
class ChatQuestion:
    """A question, and the labels that answer it; equal questions have equal keys."""

    messages: list[Message]
    labels: tuple[str, ...]

    @property
    def key(self) -> str:
        return digest(self.messages)


@dataclass(frozen=True)
class Abilities:
    """What a server can do.

    Args:
        top_logprobs: candidates per token that it returns log probabilities of; 0: none.
        samples: whether replies to the same question differ with the seed; True if that was not tested.
    """

    top_logprobs: int
    samples: bool = True


# Called with the key of a question, and its opinion or error.
Decide = Callable[[str, Opinion | CallError], None]


class ServerJudge(Judge):
    """A judge by HTTP (see `Judge`).

    A verdict takes one call with log probabilities, and `samples` calls without; with reasoning, twice as many. Calls
    run concurrently, are retried after temporary errors, and slow down when the server is overloaded. A question
    without an answer gets a verdict with an error, never a label. When the server is given up (`ServerUnavailable`),
    `done` has received every verdict until then.

    Args:
        url: of the API, such as "http://127.0.0.1:8000/v1"; several of servers with the same model.
        model: its name on the server; replies of any other model are rejected.
        policy: waits, numbers of calls and deadlines.
        others: as the settings of these names in `JudgeConfig`.
        tokenizer: of the model on the server: its control tokens, and what its chat template writes, are removed from
            the judged texts. None: the marks that a vLLM server shows of its template. The general rule of
            `template.py` applies in either case.

    Raises:
        ValueError: a URL that may not be called, or a variable that is not set.
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
        reasoning_tokens: int = 0,
        reasoning_samples: int = 1,
        method: Literal["auto", "logprobs", "votes"] = "auto",
        allow_http: bool = False,
        policy: RetryPolicy | None = None,
        verdict_tokens: int = VERDICT_TOKENS,
        extra_body: dict[str, Any] | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ):
        urls = [url] if isinstance(url, str) else list(url)
        self.chats = [ChatServer(url, model, api_key_env, allow_http, extra_body) for url in urls]
        self.chat = self.chats[0]
        self.usage = self.chat.usage
        for chat in self.chats:
            chat.usage = self.usage
        self.samples, self.reasoning_tokens, self.verdict_tokens = samples, reasoning_tokens, verdict_tokens
        self.method, self.policy = method, policy or RetryPolicy()
        self.reasoning_samples = reasoning_samples
        self.name = model_name(model)
        # Without the address: a server that moves is the same judge. Without verdict_tokens: a reply that was cut is
        # no answer, so more tokens change no answer.
        self.identity: dict[str, Any] = {
            "kind": "server",
            "model": model,
            "method": method,
            "samples": samples,
            "reasoning_tokens": reasoning_tokens,
            "reasoning_samples": reasoning_samples,
            "extra_body": self.chat.extra_body,
            "template": _template_digest(),
        }
        self._knows_tokenizer = tokenizer is not None
        self.marks: ShownMarks = ShownMarks() if tokenizer is None else Marks(tokenizer)
        if tokenizer is not None:
            self.identity["marks"] = digest(self.marks.words)[:16]
        self._abilities: Abilities | None = None
        self._replicas = self._made_replicas(max_concurrency) if len(self.chats) > 1 else None
        self._pace: Pace | Replicas = self._replicas or Pace(max_concurrency)
        # A question like those to come. It tests the server, and tells later whether the server is down or a single
        # question hangs.
        pair, principle = Pair("Say hello.", "Hello!", "No."), Principle("Which completion does what it is asked?")
        self._trial = ChatQuestion(question_messages(pair, principle, nonce_of(pair, principle)), LABELS)
        # By question and number, until the question is decided.
        self._votes: dict[str, dict[int, Vote]] = {}
        self._reasoning: dict[tuple[str, int], str] = {}

    def _made_replicas(self, max_concurrency: int) -> Replicas:
        """Return the servers as replicas, each with a pace of its own."""
        names = [str(chat) for chat in self.chats]
        return Replicas(names, max_concurrency, self.policy, lambda number: self.chats[number].served_models())

    def check(self) -> Abilities:
        """Ask a small question and return what the server can do. Runs once, before the first comparison at latest.

        Raises:
            ValueError: an address that may not be called.
            RuntimeError: no server, no API, another model, a key that is not accepted, or no log probabilities
                although `method` requires them; EndOfCalls if the budget has no room for it.
        """
        if self._abilities is None:
            for chat in self.chats:
                chat.check_host()
            try:
                self._abilities = self._first_abilities()
            except CallError as error:
                raise RuntimeError(_problem(self.chat, error)) from None
            if not self._knows_tokenizer:
                self.marks = run_async(self._shown_marks())
        return self._abilities

    def _first_abilities(self) -> Abilities:
        """Return what the first server can do that answers; the others serve the same model, so they can too."""
        for number, chat in enumerate(self.chats):
            self.chat, is_last = chat, number == len(self.chats) - 1
            try:
                return run_async(self._probe())
            except (CallError, RuntimeError) as error:
                if is_last or isinstance(error, EndOfCalls):
                    raise
                logger.warning("%s; the other servers of the model take its questions", error)
        raise AssertionError("a judge has at least one server")

    async def _probe(self) -> Abilities:
        served = await ask_patiently(self.chat.served_models, self.policy)
        async with self.chat.session() as client:
            reply, top_logprobs = await self._trial_reply(client, served)
            if reply.is_all_reasoning:
                raise RuntimeError(
                    f"{self.chat} cannot be used: all {self.verdict_tokens} tokens of a reply went to the model's"
                    f" reasoning, and none to its verdict; {MORE_TOKENS}"
                )
            vote = read_vote(reply, LABELS)
            if vote.label is None:
                logger.warning(
                    "%s answers a simple question with a reply that is no verdict: %s", self.chat, vote.problem
                )
            if top_logprobs and vote.probabilities is not None:
                return Abilities(top_logprobs)
            if self.method == "logprobs":
                cause = "reasons before its verdict, which then has no" if reply.thought else "returns no"
                raise RuntimeError(
                    f"{self.chat} {cause} log probabilities of the labels though it is asked for them; set the method"
                    " to auto or votes, which samples verdicts"
                    f"{', or turn the reasoning off' if reply.thought else ''}"
                )
            return Abilities(0, samples=self.samples == 1 or await self._does_sample(client))

    async def _trial_reply(self, client: httpx2.AsyncClient, served: list[str] | None) -> tuple[Reply, int]:
        """Return a reply to the trial, and the number of candidates that the server took."""
        for top_logprobs in (0,) if self.method == "votes" else (*TOP_LOGPROBS, 0):
            try:
                reply = await ask_patiently(lambda n=top_logprobs: self._reply_to_trial(client, n), self.policy)
            except CallError as error:
                if error.kind == "refused" and top_logprobs and _has_model(self.chat.model, served):
                    continue
                raise RuntimeError(_problem(self.chat, error, served)) from None
            break
        return reply, top_logprobs

    def _reply_to_trial(
        self, client: httpx2.AsyncClient, top_logprobs: int = 0, chat: ChatServer | None = None
    ) -> Awaitable[Reply]:
        tokens = self.verdict_tokens
        return (chat or self.chat).reply(
            client, self._trial.messages, max_tokens=tokens, seed=1, top_logprobs=top_logprobs
        )

    async def _does_sample(self, client: httpx2.AsyncClient) -> bool:
        messages: list[Message] = [{"role": "user", "content": OPEN_QUESTION}]

        def call() -> Awaitable[Reply]:
            return self.chat.reply(client, messages, max_tokens=OPEN_TOKENS, seed=seed)

        texts: set[str] = set()
        for number in range(OPEN_REPLIES):
            seed = int(digest(["check", number])[:7], 16)
            reply = await ask_patiently(call, self.policy)
            texts.add(reply.thought + reply.text)
            if len(texts) > 1:
                return True
        logger.warning(
            "%s answers an open question %d times in the same words, though asked for temperature 1 and another seed"
            " each time: it does not sample, so each question gets one vote, and labels are 0 or 1; turn sampling on"
            " in the server (transformers serve: do_sample in the model's generation_config.json)",
            self.chat,
            OPEN_REPLIES,
        )
        return False

    async def _shown_marks(self) -> ShownMarks:
        try:
            async with asyncio.timeout(self.policy.call_timeout_s):
                rendered = [await self.chat.rendered(turns) for turns in turns_of_places()]
        except TimeoutError:
            rendered = []
        # A text without the places is no rendering of these turns.
        return ShownMarks(shown for shown in rendered if shown is not None and all(p in shown[0] for p in PLACES[:3]))

    def _answer(self, items: Items, principle: Principle, keep: Done) -> None:
        self._answer_each([(items, principle)], lambda _number, index, answer: keep(index, answer))

    def _answer_each(self, asked: Sequence[tuple[Items, Principle]], keep: DoneEach) -> None:
        """Ask all questions at once; raises ServerUnavailable when the server is given up."""
        # First: the check finds the marks, which the questions need.
        self.check()
        questions: dict[str, ChatQuestion] = {}
        places: dict[str, list[tuple[int, int, Form]]] = {}
        for number, (items, principle) in enumerate(asked):
            for index, item in enumerate(items):
                form = form_of(item)
                messages = self.marks.query(item, principle).messages(MAX_CHARACTERS)
                question = ChatQuestion(messages, form.labels)
                questions.setdefault(question.key, question)
                places.setdefault(question.key, []).append((number, index, form))

        def decide(key: str, outcome: Opinion | CallError) -> None:
            if not isinstance(outcome, CallError):
                self._votes.pop(key, None)
            for number, index, form in places[key]:
                if isinstance(outcome, CallError):
                    keep(number, index, form.kind(None, error=str(outcome), error_kind=outcome.error_kind))
                else:
                    keep(number, index, form.answer(outcome))

        if questions:
            run_async(self._decide(questions, decide))

    async def _decide(self, undecided: dict[str, ChatQuestion], decide: Decide) -> None:
        """Call `decide` once per question, as soon as it is decided or has failed."""
        abilities = self._abilities
        num_votes = max(self.samples, self.reasoning_samples) if abilities.samples else 1
        async with contextlib.AsyncExitStack() as stack:
            sessions = [chat.session(self._pace.max_concurrency) for chat in self.chats]
            clients = [await stack.enter_async_context(session) for session in sessions]
            # Where log probabilities are expected, further votes are bought one by one: a reply without them is a
            # vote, but the next one may have them.
            fewest = min(self.reasoning_samples, num_votes)
            for needed in range(fewest, num_votes + 1) if abilities.top_logprobs else (num_votes,):
                undecided = await self._buy(clients, undecided, needed, num_votes, decide)

    async def _buy(
        self,
        clients: Sequence[httpx2.AsyncClient],
        questions: dict[str, ChatQuestion],
        needed: int,
        num_votes: int,
        decide: Decide,
    ) -> dict[str, ChatQuestion]:
        """Buy the missing votes, up to `needed` per question; return the questions that need more."""
        calls = [
            (key, number) for key in questions for number in range(needed) if number not in self._votes.get(key, {})
        ]
        num_missing = Counter(key for key, _ in calls)
        errors: dict[str, CallError] = {}
        undecided: dict[str, ChatQuestion] = {}

        def settle(key: str) -> None:
            outcome = self._outcome(key, questions[key].labels, errors.get(key), num_votes)
            if outcome is None:
                undecided[key] = questions[key]
            else:
                decide(key, outcome)

        def done(index: int, outcome: Vote | CallError) -> None:
            key, number = calls[index]
            if isinstance(outcome, CallError):
                errors[key] = outcome
            else:
                self._votes.setdefault(key, {})[number] = outcome
            num_missing[key] -= 1
            if not num_missing[key]:
                settle(key)

        async def call(index: int) -> Vote:
            key, number = calls[index]
            return await self._on_a_server(lambda n: self._vote(self.chats[n], clients[n], questions[key], number))

        async def control() -> Reply:
            return await self._on_a_server(lambda n: self._reply_to_trial(clients[n], chat=self.chats[n]))

        for key in questions:
            if not num_missing[key]:
                settle(key)
        policy, name = self.policy, str(self.chat)
        if self._replicas is not None:
            # One question may be tried on each of them, with the deadline of a call each.
            policy = replace(policy, call_timeout_s=policy.call_timeout_s * (len(self.chats) + 1))
            name = f"judge servers {', '.join(shown(chat.url) for chat in self.chats)}"
        await CallRun(name, policy, self._pace, call, done, control=control).answer_all(len(calls))
        return undecided

    async def _on_a_server(self, work: Callable[[int], Awaitable[T]]) -> T:
        """Return what `work` returns for the only server, or for the one of several that is chosen."""
        return await (work(0) if self._replicas is None else self._replicas.call(work))

    def _outcome(
        self, key: str, labels: Sequence[str], error: CallError | None, num_votes: int
    ) -> Opinion | CallError | None:
        """Return what the votes on a question decide; None if it needs more."""
        votes = self._votes.get(key, {})
        measured = [vote for _, vote in sorted(votes.items()) if vote.probabilities is not None]
        if len(measured) >= self.reasoning_samples:
            return opinion_of_probabilities(measured[: self.reasoning_samples])
        if error is not None or len(votes) < num_votes:
            return error
        opinion = opinion_of_votes([votes[number] for number in sorted(votes)], labels)
        if opinion.shares is not None:
            return opinion
        # The votes that are labels count when the question is asked again.
        self._votes[key] = {number: vote for number, vote in votes.items() if vote.label is not None}
        return CallError(opinion.reason, "unread")

    async def _vote(self, chat: ChatServer, client: httpx2.AsyncClient, question: ChatQuestion, number: int) -> Vote:
        """Buy one vote, reusing the reasoning that was bought for it before."""
        place = (question.key, number)
        # A different seed for every vote and every question, and the same one for a retry.
        seed = int(digest(place)[:7], 16)
        messages, reasoning = question.messages, None
        if self.reasoning_tokens:
            if place not in self._reasoning:
                asked = with_reasons_asked(messages)
                reply = await chat.reply(client, asked, max_tokens=self.reasoning_tokens, seed=seed)
                # The reasoning becomes a part of the conversation and may quote what the model read, so it must hold
                # no marks either.
                self._reasoning[place] = sanitized(reply.text, self.marks.words).strip()
            reasoning = self._reasoning[place]
            messages = with_reasons_given(messages, reasoning, question.labels)
        reply = await chat.reply(
            client,
            messages,
            max_tokens=self.verdict_tokens,
            seed=seed,
            top_logprobs=self._abilities.top_logprobs,
        )
        self._reasoning.pop(place, None)
        return read_vote(reply, question.labels, reasoning)


def _has_model(model: str, served: list[str] | None) -> bool:
    return served is None or any(is_same_model(model, name) for name in served)


def _problem(chat: ChatServer, error: CallError, served: list[str] | None = None) -> str:
    """Return an error message that says what to change; `served`: names of the models that the server lists."""
    reason = str(error)
    if reason == AN_HTML_PAGE:
        return f"{chat} answers {reason}; give the address of its API, which often ends in /v1"
    if reason.startswith("a redirect"):
        return f"{chat} answers {reason}; give that address, if you trust it"
    if error.kind != "again" and not _has_model(chat.model, served):
        names = ", ".join(served[:10]) or "none"
        return f"{chat} does not serve the model {chat.model!r} ({reason}); it lists {names}: set judge_model"
    if reason.startswith("a reply of model"):
        return f"{chat} answers with {reason}; set judge_model to the model that is meant"
    if reason.startswith(("the connection failed", "no answer")):
        return f"{chat} does not answer: {reason}; start it, or correct its address"
    return f"{chat} cannot be used: {reason}"


def _template_digest() -> str:
    """Return a hash of the wording of the questions."""
    items = Pair("prompt", "first", "second"), Single("prompt", "first")
    questions = [question_messages(item, Principle("principle"), "nonce") for item in items]
    return digest([questions, LABELS, RATINGS, REASON_FIRST, VERDICT_NOW])[:16]
