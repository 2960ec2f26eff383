"""What the replies of a chat server say: a label, or probabilities of labels.

Replies are read strictly, never guessed: log probabilities count only if they are present, are probabilities, and
belong to the text of the reply, whatever the server was asked for.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onetrunk.judges.template import Opinion, is_mark
from onetrunk.servers.client import is_same_model
from onetrunk.servers.errors import CallError

# A label may be in quotes, brackets or bold type; a sentence around it is not a verdict.
BEFORE, AFTER = r"[\s\"'`*(\[<]*", r"[\s\"'`*)\]>.:]*"
VERDICT_WORDS = ("label", "verdict", "answer", "choice", "better", "winner", "score", "rating")
# How tokenizers write the space before a word.
SPACE_MARKS = "\u0120\u2581"
# With less probability on the labels their order says little about what the model wanted to write.
LEAST_LABEL_MASS = 0.5
# Rounding of the server: probabilities of a position may add up to a little more than 1.
ROUNDING = 0.02
LONGEST_EXCERPT = 60
# Characters of a thought that are kept.
LONGEST_THOUGHT = 4000
MORE_TOKENS = (
    "raise judge_verdict_tokens, or turn the model's reasoning off, such as by judge_extra_body"
    " {chat_template_kwargs: {enable_thinking: false}}"
)


@dataclass(frozen=True)
class Reply:
    """A reply of the expected form.

    Args:
        text: what the model wrote, without its hidden reasoning.
        is_whole: False if it was cut at the token limit.
        positions: per token of the reply (the token, {candidate: probability}); None without usable ones.
        thought: the hidden reasoning, wherever the server puts it.
        refusal: what the server sent instead of an answer, if it did.
    """

    text: str
    is_whole: bool
    positions: tuple[tuple[str, dict[str, float]], ...] | None
    thought: str = ""
    refusal: str | None = None

    @property
    def is_all_reasoning(self) -> bool:
        """Whether the token limit was reached before the reasoning ended."""
        return bool(self.thought) and not self.is_whole and not self.text.strip()


def checked_reply(output: Any, model: str) -> Reply:
    """Return the reply in a parsed body of `/chat/completions`; raises CallError for none, or of another model."""
    if not isinstance(output, Mapping):
        raise CallError(f"a body that is not a chat completion ({type(output).__name__})")
    if output.get("error"):
        raise CallError(f"an error in place of a reply ({str(output['error'])[:200]})")
    reported = output.get("model")
    if isinstance(reported, str) and reported and not is_same_model(model, reported):
        raise CallError(f"a reply from model {reported!r}, but {model!r} was asked")
    choices = output.get("choices")
    if not isinstance(choices, Sequence) or not choices or not isinstance(choices[0], Mapping):
        raise CallError("a reply without choices")
    message = choices[0].get("message")
    message = message if isinstance(message, Mapping) else {}
    text, ending = message.get("content"), choices[0].get("finish_reason")
    # The two names under which servers send reasoning apart from the text.
    thought = message.get("reasoning") or message.get("reasoning_content") or ""
    refusal = message.get("refusal") or ("its content filter" if ending == "content_filter" else None)
    if not isinstance(text, str):
        # A server sends no text if the reasoning fills the whole reply, or if it refuses to answer.
        if text is not None or not (thought or refusal):
            raise CallError("a reply without text")
        text = ""
    verdict = _after_thinking(text)
    # After reasoning the first token does not belong to the verdict.
    thought = str(thought) or text.removesuffix(verdict)
    positions = None if thought else _positions(choices[0].get("logprobs"), text)
    return Reply(verdict, ending != "length", positions, thought, None if refusal is None else str(refusal))


def read_label(text: str, labels: Sequence[str]) -> str | None:
    """Return the label that a reply consists of; None for any other reply.

    Accepts the label alone, and a word such as "Answer:" before it.
    """
    either = "|".join(map(re.escape, sorted(labels, key=len, reverse=True)))
    word = rf"(?i:{BEFORE}(?:final |my )?(?:{'|'.join(VERDICT_WORDS)})(?: is)?{BEFORE}[:=]{AFTER})?"
    match = re.fullmatch(rf"{word}{BEFORE}({either}){AFTER}", text)
    return match.group(1) if match else None


def label_probabilities(reply: Reply, labels: Sequence[str], label: str | None = None) -> dict[str, float] | None:
    """Return the probability of each label at the first token that is neither blank nor a mark; None without log
    probabilities.

    They do not add up to 1; the rest is the probability of everything else. A label that is not among the candidates
    is less probable than each of them and counts as 0.

    Args:
        label: the one that the reply is read as. Where its first token is another text, such as `**`, the token of the
            label counts; None is returned if it has none of its own.
    """
    for token, candidates in ((_bare(token), candidates) for token, candidates in reply.positions or ()):
        if not token or is_mark(token):
            continue
        if len(candidates) < 2:
            # The written token alone says nothing about the other labels.
            return None
        probabilities = dict.fromkeys(labels, 0.0)
        for candidate, probability in candidates.items():
            if _bare(candidate) in probabilities:
                probabilities[_bare(candidate)] += probability
        if label in (None, token) or sum(probabilities.values()) >= LEAST_LABEL_MASS:
            return probabilities
    return None


@dataclass(frozen=True)
class Vote:
    """One reply to one question.

    Args:
        label: None for a reply that is not a label.
        probabilities: per label, as from `label_probabilities`; None without log probabilities.
        reasoning: what the model wrote before.
        problem: why the reply is not a label; None if it is one.
    """

    label: str | None
    probabilities: dict[str, float] | None = None
    reasoning: str | None = None
    problem: str | None = None


def read_vote(reply: Reply, labels: Sequence[str]) -> Vote:
    """Return the vote that a reply is."""
    label = read_label(reply.text, labels)
    # The first token of an empty reply is its end, so its probabilities are no measurement; nor are those of other
    # words that the token limit ended, after which a label may come.
    probabilities = label_probabilities(reply, labels, label) if reply.text.strip() else None
    if probabilities and label is None and not reply.is_whole and sum(probabilities.values()) < LEAST_LABEL_MASS:
        probabilities = None
    thought = reply.thought.strip()
    return Vote(label, probabilities, thought[:LONGEST_THOUGHT] or None, _problem_of(reply) if label is None else None)


def opinion_of_probabilities(vote: Vote) -> Opinion:
    """Return the opinion of a reply with log probabilities, scaled to add up to 1.

    It is an abstention if the model would probably have written something else than a label.
    """
    mass = sum(vote.probabilities.values())
    details = {"method": "logprobs", "label_mass": round(min(mass, 1.0), 6)}
    if mass < LEAST_LABEL_MASS:
        return Opinion(None, f"the labels have {mass:.0%} of the probability", details)
    return Opinion({label: p / mass for label, p in vote.probabilities.items()}, vote.reasoning, details)


def opinion_of_votes(votes: Sequence[Vote], labels: Sequence[str]) -> Opinion:
    """Return the share of each label among the votes that are labels; no shares if fewer than half are labels.

    Unlike an abstention, no shares mean that nothing was measured: another reply may be a label.
    """
    counts = {label: sum(vote.label == label for vote in votes) for label in labels}
    read = sum(counts.values())
    details = {"method": "votes", "votes": {**counts, "unread": len(votes) - read}}
    if 2 * read < len(votes):
        problem = next(vote.problem for vote in votes if vote.label is None)
        return Opinion(None, f"{len(votes) - read} of {len(votes)} replies are not labels (one: {problem})", details)
    thoughts = [vote.reasoning for vote in votes if vote.reasoning]
    if len(thoughts) > 1:
        details["thoughts"] = thoughts[1:]
    return Opinion({label: n / read for label, n in counts.items()}, thoughts[0] if thoughts else None, details)


def _problem_of(reply: Reply) -> str:
    """Return why a reply is not a label, and what to change if that is known."""
    begins = json.dumps(reply.text.strip()[:LONGEST_EXCERPT], ensure_ascii=True)
    if reply.refusal is not None:
        return f"the server refused to answer: {json.dumps(reply.refusal[:LONGEST_EXCERPT], ensure_ascii=True)}"
    if reply.is_all_reasoning:
        return f"all its tokens went to the model's reasoning; {MORE_TOKENS}"
    if not reply.text.strip():
        return "it is empty"
    if not reply.is_whole:
        return f"it reached the token limit and begins {begins}; if the model reasons first, {MORE_TOKENS}"
    return f"it begins {begins}"


def _after_thinking(text: str) -> str:
    """Return the text after the reasoning that some models write into their reply; empty if it does not end."""
    _, ended, after = text.rpartition("</think>")
    return after if ended or not text.lstrip().startswith("<think>") else ""


def _positions(logprobs: Any, text: str) -> tuple[tuple[str, dict[str, float]], ...] | None:
    """Return the positions of a reply; None if they have another form or belong to another text."""
    try:
        positions = [(_token(entry), _candidates(entry["top_logprobs"])) for entry in logprobs["content"]]
    except (TypeError, KeyError, ValueError):
        return None
    return tuple(positions) if positions and _begins([token for token, _ in positions], text) else None


def _candidates(entries: Any) -> dict[str, float]:
    probabilities: dict[str, float] = {}
    for entry in entries:
        token, logprob = _token(entry), entry["logprob"]
        if not logprob <= ROUNDING:
            raise ValueError(f"{logprob} is not a log probability")
        # Two tokens may have the same text, such as bytes that are no text.
        probabilities[token] = probabilities.get(token, 0.0) + math.exp(logprob)
    if sum(probabilities.values()) > 1 + ROUNDING:
        raise ValueError("probabilities that add up to more than 1")
    return probabilities


def _token(entry: Any) -> str:
    if not isinstance(entry["token"], str):
        raise TypeError("a token that is not text")
    return entry["token"]


def _begins(tokens: Sequence[str], text: str) -> bool:
    """Return whether a text begins with the first of the tokens that is not a mark, which servers leave out of texts.

    If not, they are the tokens of something else, such as hidden reasoning.
    """
    first = next((_bare(token) for token in tokens if _bare(token) and not is_mark(_bare(token))), "")
    return text.lstrip().startswith(first)


def _bare(text: str) -> str:
    for mark in SPACE_MARKS:
        text = text.replace(mark, " ")
    return text.strip()
