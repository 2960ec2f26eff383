"""Before the work: is the server there, is it that model, and does it return what it is asked for? Verified by asking.

Some servers answer HTTP 200 and leave out what they do not know (transformers serve: log probabilities); some refuse a
number of candidates that others take; some do not sample. Knows no principle and no pair.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from huggingface_hub import AsyncInferenceClient

from onetrunk.judges.answers import MORE_TOKENS, is_same_model, read_vote
from onetrunk.judges.base import digest
from onetrunk.judges.calls import ask_patiently
from onetrunk.judges.chat import AN_HTML_PAGE, ChatServer
from onetrunk.judges.retries import CallError, RetryPolicy
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
