"""Votes on many questions: bought from a chat server, as many as each question needs, and none twice.

A question needs one reply where its log probabilities come back, else a number of votes. Knows no principle, no pair
and no verdict.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from huggingface_hub import AsyncInferenceClient

from onetrunk.judges.base import digest
from onetrunk.judges.calls import CallError, CallRun, Pace, RetryPolicy, ask_patiently
from onetrunk.judges.chat import (
    AN_HTML_PAGE,
    MORE_TOKENS,
    ChatServer,
    Opinion,
    Vote,
    is_same_model,
    opinion_of_probabilities,
    opinion_of_votes,
    read_vote,
)
from onetrunk.judges.template import sanitized
from onetrunk.types import Message

logger = logging.getLogger(__name__)

# OpenAI's and vLLM's greatest number of candidates; TGI takes 5 and refuses more.
TOP_LOGPROBS = (20, 5)
# A reply to it that is sampled at temperature 1 is hardly ever the same again and again.
OPEN_QUESTION = "Write ten words at random, in any order."
OPEN_TOKENS = 24
OPEN_REPLIES = 4


@dataclass(frozen=True)
class Abilities:
    """What a server was seen to do.

    Args:
        top_logprobs: candidates per token that it returns log probabilities of; 0: it returns none.
        samples: whether replies to the same question differ with the seed; True where it was not looked at.
    """

    top_logprobs: int
    samples: bool = True


@dataclass(frozen=True)
class Trial:
    """A question like those to come.

    Args:
        messages: what is asked.
        labels: that answer it.
        max_tokens: of the answer.
        method: auto, logprobs or votes (see `ServerJudge`).
        samples: votes that a question without log probabilities will get.
    """

    messages: list[Message]
    labels: Sequence[str]
    max_tokens: int
    method: str
    samples: int


async def probe(chat: ChatServer, client: AsyncInferenceClient, policy: RetryPolicy, trial: Trial) -> Abilities:
    """Return what the server can do.

    Args:
        chat: the server.
        client: a session of it.
        policy: waits and deadlines.
        trial: what is asked.

    Raises:
        RuntimeError: one sentence: no server, no API, another model, a key that is not taken, no log probabilities
            where they are insisted on.
    """
    try:
        served = await ask_patiently(chat.served_models, policy)
    except CallError as error:
        raise RuntimeError(_sentence(chat, error)) from None
    for top_logprobs in (*(TOP_LOGPROBS if trial.method != "votes" else ()), 0):
        asked = {"max_tokens": trial.max_tokens, "seed": 1, "top_logprobs": top_logprobs}
        try:
            reply = await ask_patiently(partial(chat.reply, client, trial.messages, **asked), policy)
        except CallError as error:
            if error.kind == "refused" and top_logprobs and _has_model(chat.model, served):
                continue
            raise RuntimeError(_sentence(chat, error, served)) from None
        break
    if reply.is_all_reasoning:
        raise RuntimeError(
            f"{chat} cannot be used: all {trial.max_tokens} tokens of a reply went to the model's reasoning, and none"
            f" to its verdict; {MORE_TOKENS}"
        )
    vote = read_vote(reply, trial.labels)
    if vote.label is None:
        logger.warning("%s answers a simple question with a reply that is no verdict: %s", chat, vote.problem)
    if top_logprobs and vote.probabilities is not None:
        return Abilities(top_logprobs)
    if trial.method == "logprobs":
        cause = "reasons before its verdict, which then has no" if reply.thought else "returns no"
        raise RuntimeError(
            f"{chat} {cause} log probabilities of the labels though it is asked for them; set the method to auto or"
            f" votes, which samples verdicts{', or turn the reasoning off' if reply.thought else ''}"
        )
    return Abilities(0, samples=trial.samples == 1 or await _does_sample(chat, client, policy))


async def _does_sample(chat: ChatServer, client: AsyncInferenceClient, policy: RetryPolicy) -> bool:
    messages: list[Message] = [{"role": "user", "content": OPEN_QUESTION}]
    texts: set[str] = set()
    for number in range(OPEN_REPLIES):
        asked = {"max_tokens": OPEN_TOKENS, "seed": int(digest(["check", number])[:7], 16)}
        try:
            reply = await ask_patiently(partial(chat.reply, client, messages, **asked), policy)
        except CallError as error:
            raise RuntimeError(_sentence(chat, error)) from None
        texts.add(reply.thought + reply.text)
        if len(texts) > 1:
            return True
    logger.warning(
        "%s answers an open question %d times in the same words, though asked for temperature 1 and another seed each"
        " time: it does not sample, so each question gets one vote, and labels are 0 or 1; turn sampling on in the"
        " server (transformers serve: do_sample in the model's generation_config.json)",
        chat,
        OPEN_REPLIES,
    )
    return False


def _has_model(model: str, served: list[str] | None) -> bool:
    return served is None or any(is_same_model(model, name) for name in served)


def _sentence(chat: ChatServer, error: CallError, served: list[str] | None = None) -> str:
    reason = str(error)
    if reason == AN_HTML_PAGE:
        return f"{chat} answers {reason}; give the address of its API, which often ends in /v1"
    if reason.startswith("a redirect"):
        return f"{chat} answers {reason}; give that address, if you trust it"
    if served is not None and error.kind != "again" and not _has_model(chat.model, served):
        names = ", ".join(served[:10]) or "none"
        return f"{chat} does not serve the model {chat.model!r} ({reason}); it lists {names}: set judge_model"
    if reason.startswith("a reply of model"):
        return f"{chat} answers with {reason}; set judge_model to the model that is meant"
    if reason.startswith("the connection failed") or reason.startswith("no answer"):
        return f"{chat} does not answer: {reason}; start it, or correct its address"
    return f"{chat} cannot be used: {reason}"


REASON_FIRST = "\n\nFirst explain in a few sentences what speaks for and against; give no verdict yet."
VERDICT_NOW = "Now give your verdict: {labels}, and nothing else."


@dataclass(frozen=True)
class ChatQuestion:
    """What is asked, and the labels that answer it; equal questions have equal keys."""

    messages: list[Message]
    labels: tuple[str, ...]

    @property
    def key(self) -> str:
        return digest(self.messages)


class Poll:
    """Buys votes, and keeps those of a question that is not decided yet: the next run asks for the missing ones alone.

    Args:
        chat: the server.
        policy: when to call again and when to stop.
        pace: how many calls at once.
        samples: votes for a question without log probabilities.
        reasoning_tokens: longest reasoning before each vote; 0 for none.
        verdict_tokens: longest reply that is a vote, with the reasoning that a model does on its own.
        control: a question that the server has answered, to tell a server that is down from questions that hang.
    """

    def __init__(
        self,
        chat: ChatServer,
        policy: RetryPolicy,
        pace: Pace,
        samples: int,
        reasoning_tokens: int,
        verdict_tokens: int,
        control: list[Message],
    ):
        self.chat, self.policy, self.pace = chat, policy, pace
        self.samples, self.reasoning_tokens, self.verdict_tokens = samples, reasoning_tokens, verdict_tokens
        self.control = control
        # Words that no text may bring along beside those of the general rule (see `ServerJudge.marks`).
        self.marks: tuple[str, ...] = ()
        self._votes: dict[str, dict[int, Vote]] = {}
        self._reasoning: dict[tuple[str, int], str] = {}

    async def ask(
        self,
        questions: Sequence[ChatQuestion],
        abilities: Abilities,
        finish: Callable[[int, Opinion | CallError], None],
    ) -> None:
        """Decide every question; `finish(index, opinion or error)` once for each, as soon as it is decided.

        Raises:
            ServerUnavailable: the server was given up; the questions left are told to nobody.
        """
        # A question that is there twice is asked once.
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
            # Where log probabilities are expected votes are bought one by one: a reply without them is a vote, and
            # the next one may have them.
            for needed in range(1, num_votes + 1) if abilities.top_logprobs else (num_votes,):
                ballot = _Ballot(undecided, needed, num_votes, decide, self._votes)
                await self._buy(client, ballot, abilities.top_logprobs)
                undecided = ballot.undecided

    async def _buy(self, client: AsyncInferenceClient, ballot: _Ballot, top_logprobs: int) -> None:
        calls = ballot.begin()

        async def call(index: int) -> Vote:
            key, number = calls[index]
            return await self._vote(client, ballot.questions[key], number, top_logprobs)

        run = CallRun(
            str(self.chat),
            self.policy,
            self.pace,
            call,
            done=lambda index, outcome: ballot.take(*calls[index], outcome),
            key=lambda index: " ".join(map(str, calls[index])),
            control=lambda: self.chat.reply(client, self.control, max_tokens=self.verdict_tokens, seed=1),
        )
        await run.answer_all(len(calls))

    async def _vote(
        self, client: AsyncInferenceClient, question: ChatQuestion, number: int, top_logprobs: int
    ) -> Vote:
        """Buy one vote; reasoning that was bought for it before is used.

        Raises:
            CallError: no vote.
        """
        place = (question.key, number)
        # Another seed for every vote and every question, the same one when a call is repeated.
        seed = int(digest(place)[:7], 16)
        messages, reasoning = question.messages, None
        if self.reasoning_tokens:
            messages = _with_last(messages, REASON_FIRST)
            if place not in self._reasoning:
                reply = await self.chat.reply(client, messages, max_tokens=self.reasoning_tokens, seed=seed)
                # What the material made the model write comes before it once more: marks of turns are taken out.
                self._reasoning[place] = sanitized(reply.text, self.marks).strip()
            reasoning = self._reasoning[place]
            verdict_now = VERDICT_NOW.format(labels=" or ".join(question.labels))
            # Empty where the model thought and wrote nothing; templates refuse an empty message.
            said = [{"role": "assistant", "content": reasoning or "(no reasons)"}]
            messages = [*messages, *said, {"role": "user", "content": verdict_now}]
        reply = await self.chat.reply(
            client, messages, max_tokens=self.verdict_tokens, seed=seed, top_logprobs=top_logprobs
        )
        self._reasoning.pop(place, None)
        return read_vote(reply, question.labels, reasoning)


class _Ballot:
    """The votes that some questions lack, up to a number each; decides a question when its last vote is there.

    Args:
        questions: by their keys.
        needed: votes for each, in this ballot.
        num_votes: votes that decide a question without log probabilities.
        decide: told of a question that is decided, or that failed.
        votes: by key and number, those bought before; those bought now go in.
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
        self._left: dict[str, int] = {}
        self._errors: dict[str, CallError] = {}

    def begin(self) -> list[tuple[str, int]]:
        """Return the votes to buy, as (key, number); decide the questions that lack none."""
        calls = []
        for key in self.questions:
            numbers = [number for number in range(self.needed) if number not in self._votes.get(key, {})]
            calls += [(key, number) for number in numbers]
            self._left[key] = len(numbers)
            if not numbers:
                self._settle(key)
        return calls

    def take(self, key: str, number: int, outcome: Vote | CallError) -> None:
        """Take a vote that was bought, or the error in its place."""
        if isinstance(outcome, CallError):
            self._errors[key] = outcome
        else:
            self._votes.setdefault(key, {})[number] = outcome
        self._left[key] -= 1
        if not self._left[key]:
            self._settle(key)

    def _settle(self, key: str) -> None:
        votes = self._votes.get(key, {})
        told = [vote for vote in votes.values() if vote.probabilities is not None]
        if told:
            self._decide(key, opinion_of_probabilities(told[0]))
        elif key in self._errors:
            self._decide(key, self._errors[key])
        elif len(votes) < self.num_votes:
            self.undecided[key] = self.questions[key]
        else:
            in_order = [votes[number] for number in sorted(votes)]
            opinion = opinion_of_votes(in_order, self.questions[key].labels)
            if opinion.shares is None:
                # Those that were read count when the question is asked again.
                self._votes[key] = {number: vote for number, vote in votes.items() if vote.label is not None}
            self._decide(key, opinion if opinion.shares is not None else CallError(opinion.reason, "unread"))


def _with_last(messages: Sequence[Message], text: str) -> list[Message]:
    """Return messages with `text` at the end of the last one; two messages of a user in a row are refused by many."""
    last = {**messages[-1], "content": messages[-1]["content"] + text}
    return [*messages[:-1], last]
