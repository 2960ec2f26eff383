"""Votes on questions, bought from a chat server: as many as each question needs, and none twice.

A question needs one reply if the server returns log probabilities, else a number of votes. `Poll.probe` finds out
before the work what the server can do.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from huggingface_hub import AsyncInferenceClient

from onetrunk.judges.base import digest
from onetrunk.judges.calls import CallError, CallRun, Pace, RetryPolicy, ask_patiently
from onetrunk.judges.chat import (
    AN_HTML_PAGE,
    MORE_TOKENS,
    ChatServer,
    Opinion,
    Reply,
    Vote,
    is_same_model,
    opinion_of_probabilities,
    opinion_of_votes,
    read_vote,
)
from onetrunk.judges.template import sanitized, with_reasons_asked, with_reasons_given
from onetrunk.types import Message

logger = logging.getLogger(__name__)

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


class Poll:
    """Buys votes, and keeps those of a question that is not decided yet: the next run asks only for the missing ones.

    Args:
        chat: the server.
        policy: when to retry and when to stop.
        pace: how many calls at once.
        samples: votes for a question without log probabilities.
        reasoning_tokens: longest reasoning before each vote; 0 for none.
        verdict_tokens: longest reply that is a vote, including the reasoning that a model does by itself.
        trial: a question like those to come. It tests the server, and tells later whether the server is down or a
            single question hangs.
    """

    def __init__(
        self,
        chat: ChatServer,
        policy: RetryPolicy,
        pace: Pace,
        samples: int,
        reasoning_tokens: int,
        verdict_tokens: int,
        trial: ChatQuestion,
    ):
        self.chat, self.policy, self.pace = chat, policy, pace
        self.samples, self.reasoning_tokens, self.verdict_tokens = samples, reasoning_tokens, verdict_tokens
        self.trial = trial
        self._votes: dict[str, dict[int, Vote]] = {}
        self._reasoning: dict[tuple[str, int], str] = {}

    async def probe(self, method: str) -> Abilities:
        """Return what the server can do.

        Args:
            method: auto, logprobs or votes (see `ServerJudge`).

        Raises:
            RuntimeError: no server, no API, another model, a key that is not accepted, or no log probabilities
                although `method` requires them.
        """
        try:
            served = await ask_patiently(self.chat.served_models, self.policy)
        except CallError as error:
            raise RuntimeError(_problem(self.chat, error)) from None
        async with self.chat.session(1) as client:
            reply, top_logprobs = await self._trial_reply(client, method, served)
            if reply.is_all_reasoning:
                raise RuntimeError(
                    f"{self.chat} cannot be used: all {self.verdict_tokens} tokens of a reply went to the model's"
                    f" reasoning, and none to its verdict; {MORE_TOKENS}"
                )
            vote = read_vote(reply, self.trial.labels)
            if vote.label is None:
                logger.warning(
                    "%s answers a simple question with a reply that is no verdict: %s", self.chat, vote.problem
                )
            if top_logprobs and vote.probabilities is not None:
                return Abilities(top_logprobs)
            if method == "logprobs":
                cause = "reasons before its verdict, which then has no" if reply.thought else "returns no"
                raise RuntimeError(
                    f"{self.chat} {cause} log probabilities of the labels though it is asked for them; set the method"
                    " to auto or votes, which samples verdicts"
                    f"{', or turn the reasoning off' if reply.thought else ''}"
                )
            return Abilities(0, samples=self.samples == 1 or await self._does_sample(client))

    async def _trial_reply(
        self, client: AsyncInferenceClient, method: str, served: list[str] | None
    ) -> tuple[Reply, int]:
        """Return a reply to the trial, and the number of candidates that the server took."""
        messages, max_tokens = self.trial.messages, self.verdict_tokens
        for top_logprobs in (0,) if method == "votes" else (*TOP_LOGPROBS, 0):
            try:
                reply = await self._patient_reply(client, messages, max_tokens, 1, top_logprobs)
            except CallError as error:
                if error.kind == "refused" and top_logprobs and _has_model(self.chat.model, served):
                    continue
                raise RuntimeError(_problem(self.chat, error, served)) from None
            break
        return reply, top_logprobs

    async def _does_sample(self, client: AsyncInferenceClient) -> bool:
        messages: list[Message] = [{"role": "user", "content": OPEN_QUESTION}]
        texts: set[str] = set()
        for number in range(OPEN_REPLIES):
            seed = int(digest(["check", number])[:7], 16)
            try:
                reply = await self._patient_reply(client, messages, OPEN_TOKENS, seed)
            except CallError as error:
                raise RuntimeError(_problem(self.chat, error)) from None
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

    async def _patient_reply(
        self, client: AsyncInferenceClient, messages: list[Message], max_tokens: int, seed: int, top_logprobs: int = 0
    ) -> Reply:
        def call() -> Awaitable[Reply]:
            return self.chat.reply(client, messages, max_tokens=max_tokens, seed=seed, top_logprobs=top_logprobs)

        return await ask_patiently(call, self.policy)

    async def ask(
        self,
        questions: Sequence[ChatQuestion],
        abilities: Abilities,
        marks: Sequence[str],
        finish: Callable[[int, Opinion | CallError], None],
    ) -> None:
        """Decide every question.

        Args:
            questions: n of them; equal ones are asked once.
            abilities: of the server, from `probe`.
            marks: words to remove from the model's reasoning, which may quote what it read.
            finish: called once per question, with its index, as soon as it is decided or has failed.

        Raises:
            ServerUnavailable: the server was given up; `finish` is not called for the questions left.
        """
        places: dict[str, list[int]] = {}
        for index, question in enumerate(questions):
            places.setdefault(question.key, []).append(index)

        def decide(key: str, outcome: Opinion | CallError) -> None:
            if isinstance(outcome, Opinion):
                self._votes.pop(key, None)
            for index in places[key]:
                finish(index, outcome)

        undecided = {key: questions[indexes[0]] for key, indexes in places.items()}
        num_votes = self.samples if abilities.samples else 1
        async with self.chat.session(self.pace.max_concurrency) as client:
            # Where log probabilities are expected, votes are bought one by one: a reply without them is a vote, but
            # the next one may have them.
            for needed in range(1, num_votes + 1) if abilities.top_logprobs else (num_votes,):
                ballot = _Ballot(undecided, needed, num_votes, decide, self._votes)
                await self._buy(client, ballot, abilities.top_logprobs, marks)
                undecided = ballot.undecided

    async def _buy(
        self, client: AsyncInferenceClient, ballot: _Ballot, top_logprobs: int, marks: Sequence[str]
    ) -> None:
        calls = ballot.begin()

        async def call(index: int) -> Vote:
            key, number = calls[index]
            return await self._vote(client, ballot.questions[key], number, top_logprobs, marks)

        run = CallRun(
            str(self.chat),
            self.policy,
            self.pace,
            call,
            done=lambda index, outcome: ballot.take(*calls[index], outcome),
            key=lambda index: " ".join(map(str, calls[index])),
            control=lambda: self.chat.reply(client, self.trial.messages, max_tokens=self.verdict_tokens, seed=1),
        )
        await run.answer_all(len(calls))

    async def _vote(
        self,
        client: AsyncInferenceClient,
        question: ChatQuestion,
        number: int,
        top_logprobs: int,
        marks: Sequence[str],
    ) -> Vote:
        """Buy one vote, reusing the reasoning that was bought for it before."""
        place = (question.key, number)
        # A different seed for every vote and every question, and the same one for a retry.
        seed = int(digest(place)[:7], 16)
        messages, reasoning = question.messages, None
        if self.reasoning_tokens:
            if place not in self._reasoning:
                reply = await self.chat.reply(
                    client, with_reasons_asked(messages), max_tokens=self.reasoning_tokens, seed=seed
                )
                # The reasoning becomes a part of the conversation, so it must hold no marks either.
                self._reasoning[place] = sanitized(reply.text, marks).strip()
            reasoning = self._reasoning[place]
            messages = with_reasons_given(messages, reasoning, question.labels)
        reply = await self.chat.reply(
            client, messages, max_tokens=self.verdict_tokens, seed=seed, top_logprobs=top_logprobs
        )
        self._reasoning.pop(place, None)
        return read_vote(reply, question.labels, reasoning)


class _Ballot:
    """The missing votes of some questions, up to a number each; decides a question when its last vote arrives.

    Args:
        questions: by their keys.
        needed: votes for each, in this ballot.
        num_votes: votes that decide a question without log probabilities.
        decide: called with the key of a question and its opinion or error.
        votes: by key and number, from earlier ballots; new ones are added.
    """

    def __init__(
        self,
        questions: dict[str, ChatQuestion],
        needed: int,
        num_votes: int,
        decide: Callable[[str, Opinion | CallError], None],
        votes: dict[str, dict[int, Vote]],
    ):
        self.questions, self.needed, self.num_votes = questions, needed, num_votes
        self.undecided: dict[str, ChatQuestion] = {}
        self._decide, self._votes = decide, votes
        self._num_missing: dict[str, int] = {}
        self._errors: dict[str, CallError] = {}

    def begin(self) -> list[tuple[str, int]]:
        """Return the votes to buy, as (key, number); decide the questions that have all of theirs."""
        calls = []
        for key in self.questions:
            numbers = [number for number in range(self.needed) if number not in self._votes.get(key, {})]
            calls += [(key, number) for number in numbers]
            self._num_missing[key] = len(numbers)
            if not numbers:
                self._settle(key)
        return calls

    def take(self, key: str, number: int, outcome: Vote | CallError) -> None:
        """Take a vote, or the error in its place."""
        if isinstance(outcome, CallError):
            self._errors[key] = outcome
        else:
            self._votes.setdefault(key, {})[number] = outcome
        self._num_missing[key] -= 1
        if not self._num_missing[key]:
            self._settle(key)

    def _settle(self, key: str) -> None:
        votes = self._votes.get(key, {})
        measured = [vote for vote in votes.values() if vote.probabilities is not None]
        if measured:
            self._decide(key, opinion_of_probabilities(measured[0]))
        elif key in self._errors:
            self._decide(key, self._errors[key])
        elif len(votes) < self.num_votes:
            self.undecided[key] = self.questions[key]
        else:
            in_order = [votes[number] for number in sorted(votes)]
            opinion = opinion_of_votes(in_order, self.questions[key].labels)
            if opinion.shares is None:
                # The votes that are labels count when the question is asked again.
                self._votes[key] = {number: vote for number, vote in votes.items() if vote.label is not None}
            self._decide(key, opinion if opinion.shares is not None else CallError(opinion.reason, "unread"))


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
