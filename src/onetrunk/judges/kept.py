"""A judge with a memory: labels of pairs and ratings of completions, of which no answer is asked for twice.

The memory is anything with `get` and `put` under sha256 keys, such as a ledger. An error is no answer: it is asked
for again. Knows judges; no file and no reward.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TypeVar

from onetrunk.judges.base import Judge, Pair, Principle, Rating, Verdict, digest, stopped_keyword
from onetrunk.judges.constitution import Constitution
from onetrunk.judges.verdicts import PairLabel, Question, judge_pairs, questions, verdict_key
from onetrunk.types import Prompt

T = TypeVar("T", Verdict, Rating)
# The reason under which earlier versions kept a member of an ensemble whose replies they could not read.
UNREAD_MEMBER = re.compile(r"^[\w.-]+: \d+ of \d+ replies are no label$", re.MULTILINE)


class Memory(Protocol):
    """Answers as JSON values under sha256 keys; `feedback.ledger.Ledger` is one that outlives the process."""

    def get(self, key: str) -> Any:
        """Return what is kept under a key, None for nothing."""
        ...

    def put(self, key: str, value: Any) -> Any:
        """Keep a value."""
        ...

    def replace(self, key: str, value: Any) -> Any:
        """Keep a value in place of the one that is kept under the key."""
        ...


class Forgetful:
    """A memory that keeps nothing."""

    def get(self, key: str) -> Any:
        """Return None."""
        return None

    def put(self, key: str, value: Any) -> Any:
        """Return the value."""
        return value

    def replace(self, key: str, value: Any) -> Any:
        """Return the value."""
        return value


@dataclass(frozen=True)
class RatingLabel:
    """What a judge says of a completion, all in all.

    Args:
        score: mean over principles, by weight, in [0, 1]; None where there is no answer to average.
        abstentions: principles by which the judge did not decide.
        errors: principles for which there is no answer yet.
        failure: why, of one of them.
    """

    score: float | None
    abstentions: int = 0
    errors: int = 0
    failure: str | None = None


def kept_answer(memory: Memory, key: str, kind: type[T]) -> T | None:
    """Return the answer that is kept under a key; None for a question that must be asked.

    Args:
        kind: Verdict or Rating.
    """
    value = memory.get(key)
    return None if value is None or _is_unread(value) else kind(**value)


def keep_answer(memory: Memory, key: str, answer: Verdict | Rating) -> None:
    """Keep an answer, and nothing where there is an error instead: that question is asked again."""
    if answer.error is not None:
        return
    value = asdict(answer)
    del value["error_kind"]
    if _is_unread(memory.get(key)):
        memory.replace(key, value)
    else:
        memory.put(key, value)


def kept_labels(
    judge: Judge, pairs: Sequence[Pair], constitution: Constitution, memory: Memory | None = None
) -> list[PairLabel]:
    """Return a label per pair, both orders asked; what the memory holds is not asked for.

    Args:
        judge: asked.
        pairs: n of them.
        constitution: its principles.
        memory: None: every question is asked.
    """
    # Not `or`: an empty ledger is false.
    memory = Forgetful() if memory is None else memory

    def key(question: Question) -> str:
        pair = pairs[question.pair]
        shown = pair.flipped() if question.flipped else pair
        return verdict_key(judge, constitution.principles[question.principle], shown)

    def keep(question: Question, verdict: Verdict) -> None:
        keep_answer(memory, key(question), verdict)

    found = {question: kept_answer(memory, key(question), Verdict) for question in questions(pairs, constitution)}
    known = {question: verdict for question, verdict in found.items() if verdict is not None}
    return judge_pairs(judge, pairs, constitution, on_verdict=keep, known=known)


def kept_ratings(
    judge: Judge,
    prompts: Sequence[Prompt],
    completions: Sequence[str],
    constitution: Constitution,
    memory: Memory | None = None,
    stopped: Sequence[bool] | None = None,
) -> list[RatingLabel]:
    """Return a rating per completion; what the memory holds is not asked for.

    Args:
        judge: asked.
        prompts: n of them.
        completions: n texts.
        constitution: its principles.
        memory: None: every question is asked.
        stopped: n booleans, False for a completion that was cut off; None: no completion was cut off.
    """
    # Not `or`: an empty ledger is false.
    memory = Forgetful() if memory is None else memory
    rows = list(zip(prompts, completions, stopped or [True] * len(prompts), strict=True))
    by_principle = [_ratings(judge, rows, p, memory) for p in constitution.principles]
    weights = [principle.weight for principle in constitution.principles]
    return [_rating_label(ratings, weights) for ratings in zip(*by_principle, strict=True)]


def rating_key(judge: Judge, principle: Principle, prompt: Prompt, completion: str, stopped: bool = True) -> str:
    """Return what a rating is kept under: everything that it depends on."""
    about: dict[str, Any] = {"prompt": prompt, "completion": completion, "principle": principle.key}
    if not stopped:
        about["stopped"] = False
    return digest({"rating": about, "judge": judge.identity})


def _ratings(
    judge: Judge, rows: Sequence[tuple[Prompt, str, bool]], principle: Principle, memory: Memory
) -> list[Rating]:
    keys = [rating_key(judge, principle, *row) for row in rows]
    found = {key: rating for key in keys if (rating := kept_answer(memory, key, Rating)) is not None}
    # The same text twice is one question.
    missing = {key: index for index, key in enumerate(keys) if key not in found}
    order = list(missing)

    def keep(index: int, rating: Rating) -> None:
        keep_answer(memory, order[index], rating)

    if missing:
        prompts, texts, stopped = (list(column) for column in zip(*(rows[i] for i in missing.values()), strict=True))
        found |= dict(zip(order, judge.rate(prompts, texts, principle, keep, **stopped_keyword(stopped)), strict=True))
    return [found[key] for key in keys]


def _is_unread(value: dict[str, Any] | None) -> bool:
    """Say whether a kept value holds replies that could not be read, which earlier versions took for an abstention."""
    if value is None:
        return False
    details = value.get("details", {})
    if None in details.get("members", {}).values():
        return UNREAD_MEMBER.search(value["reason"] or "") is not None
    # Votes measure no label mass: a judge that writes no label has not abstained.
    return details.get("method") == "votes" and value.get("probability", value.get("score")) is None


def _rating_label(ratings: Sequence[Rating], weights: Sequence[float]) -> RatingLabel:
    failures = [rating.error for rating in ratings if rating.error is not None]
    given = [(r.score, w) for r, w in zip(ratings, weights, strict=True) if r.error is None and r.score is not None]
    total = sum(weight for _, weight in given)
    score = sum(score * weight for score, weight in given) / total if given else None
    return RatingLabel(score, len(ratings) - len(failures) - len(given), len(failures), next(iter(failures), None))
