"""The interface of a judge: the questions it is asked and the answers it may give.

A judge answers for the ORDER in which it is shown two completions. `judges/verdicts.py` asks in both orders and turns
the answers into labels.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from onetrunk.judges.usage import Usage
from onetrunk.types import Message, Prompt
from onetrunk.utils.calls import ErrorKind


@dataclass(frozen=True)
class Principle:
    """One criterion by which completions are judged.

    Args:
        text: what is better, as a question or a command.
        weight: its share in a label, above 0.
        tags: short names; a rubric finds its check by them.
        marks: what each mark of a rating means, "1" to "5"; a judge that reads sees them when it rates.
    """

    text: str
    weight: float = 1.0
    tags: tuple[str, ...] = ()
    marks: tuple[tuple[str, str], ...] = ()

    @property
    def key(self) -> str:
        """Hash for ledger keys. It leaves out the weight, so that a new weight does not pay for new answers."""
        return digest([self.text, self.tags, self.marks])


@dataclass(frozen=True)
class Single:
    """A completion that is judged alone.

    `stopped` is False if it was cut off at a length limit; `reference` is an answer that is known to be good, if any.
    """

    prompt: Prompt
    text: str
    stopped: bool = True
    reference: str | None = None

    @property
    def completion(self) -> str | list[Message]:
        """The completion in the form of its prompt, as reward functions get it: text or conversation."""
        return self.text if isinstance(self.prompt, str) else [{"role": "assistant", "content": self.text}]


@dataclass(frozen=True)
class Pair:
    """Two completions of one prompt, in the order in which a judge is shown them.

    `first_stopped` and `second_stopped` are False for a completion that was cut off at a length limit; `reference` is
    an answer that is known to be good, if any.
    """

    prompt: Prompt
    first: str
    second: str
    first_stopped: bool = True
    second_stopped: bool = True
    reference: str | None = None

    def flipped(self) -> Pair:
        """Return the pair in the other order."""
        return Pair(self.prompt, self.second, self.first, self.second_stopped, self.first_stopped, self.reference)

    def singles(self) -> tuple[Single, Single]:
        """Return the completions as they are judged alone."""
        return (
            Single(self.prompt, self.first, self.first_stopped, self.reference),
            Single(self.prompt, self.second, self.second_stopped, self.reference),
        )


@dataclass(frozen=True)
class Verdict:
    """A judge's answer about one pair in one order, under one principle.

    Args:
        probability: that the completion shown first is the better one, in [0, 1]; None if the judge abstains or fails.
        reason: the judge's reasoning, or why it abstained.
        error: why there is no answer yet (server down, deadline). The question is asked again; never a label.
        details: votes, tokens, label mass and other values for a report, as JSON values.
        error_kind: the cause of `error`; has no meaning without one.
    """

    probability: float | None
    reason: str | None = None
    error: str | None = None
    details: dict[str, Any] = field(default_factory=dict)
    error_kind: ErrorKind = "server"

    @property
    def number(self) -> float | None:
        """The probability; a Rating's is its score."""
        return self.probability


@dataclass(frozen=True)
class Rating:
    """A judge's answer about one completion alone: a score in [0, 1]; the other fields as in Verdict."""

    score: float | None
    reason: str | None = None
    error: str | None = None
    details: dict[str, Any] = field(default_factory=dict)
    error_kind: ErrorKind = "server"

    @property
    def number(self) -> float | None:
        return self.score


Items = Sequence[Pair] | Sequence[Single]
# Called with the index of an item and its Verdict or Rating.
Done = Callable[[int, Any], None]
# Called with the number of a principle, the index of an item, and its Verdict or Rating.
DoneEach = Callable[[int, int, Any], None]


class Judge(ABC):
    """Compares pairs of completions, and rates single completions.

    Args:
        name: for reports and metrics, [A-Za-z0-9._-].
        identity: everything that an answer depends on besides the question (model and its revision or fingerprint,
            template, sampling), as JSON values. Ledgers use it in their keys.
        is_remote: whether it only waits for servers, and so may answer in a thread beside other work.
    """

    name: str
    identity: dict[str, Any]
    is_remote: bool = False

    @functools.cached_property
    def usage(self) -> Usage:
        """Counters of what this judge has used in this process."""
        return Usage()

    def compare(self, pairs: Sequence[Pair], principle: Principle, done: Done | None = None) -> list[Verdict]:
        """Return a verdict per pair and call `done(index, verdict)` for each as soon as it is known, in any order."""
        return self._in_order(pairs, principle, done)

    def rate(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[str],
        principle: Principle,
        done: Done | None = None,
        stopped: Sequence[bool] | None = None,
    ) -> list[Rating]:
        """Return a rating per completion; `done` as in `compare`, `stopped` as in `Single` (None: all are True)."""
        rows = zip(prompts, completions, stopped or [True] * len(prompts), strict=True)
        return self._in_order([Single(*row) for row in rows], principle, done)

    def answer_each(self, asked: Sequence[tuple[Items, Principle]], done: DoneEach | None = None) -> list[list[Any]]:
        """Return the answers about items under several principles, a list per principle.

        Args:
            asked: items with the principle to judge them by. A judge on a server is asked about all at once, without
                waiting for the answers under one principle before the next.
            done: called with the number of the principle, the index of the item and its answer, in any order.
        """
        answers: list[dict[int, Any]] = [{} for _ in asked]

        def keep(number: int, index: int, answer: Any) -> None:
            answers[number][index] = answer
            self.usage.questions += answer.error is None
            if done is not None:
                done(number, index, answer)

        started = time.perf_counter()
        try:
            if any(len(items) for items, _ in asked):
                if self.usage.budget is not None:
                    self.usage.budget()  # Raises if it is spent.
                self._answer_each(asked, keep)
        finally:
            self.usage.seconds += time.perf_counter() - started
        return [[found[i] for i in range(len(items))] for found, (items, _) in zip(answers, asked, strict=True)]

    def _in_order(self, items: Items, principle: Principle, done: Done | None) -> list[Any]:
        each = None if done is None else lambda _number, index, answer: done(index, answer)
        return self.answer_each([(items, principle)], each)[0]

    def _answer_each(self, asked: Sequence[tuple[Items, Principle]], keep: DoneEach) -> None:
        for number, (items, principle) in enumerate(asked):
            if items:
                self._answer(items, principle, functools.partial(keep, number))

    @abstractmethod
    def _answer(self, items: Items, principle: Principle, keep: Done) -> None:
        """Call `keep(index, answer)` once per item: a Verdict for a Pair, a Rating for a Single."""


class ScoringJudge(Judge):
    """A judge that scores each completion by itself; a verdict follows from two scores."""

    def _answer(self, items: Items, principle: Principle, keep: Done) -> None:
        if isinstance(items[0], Pair):
            firsts, seconds = zip(*(pair.singles() for pair in items), strict=True)
            scores = self._scores([*firsts, *seconds], principle)
            answers = map(self._verdict, scores[: len(items)], scores[len(items) :])
        else:
            answers = map(self._rating, self._scores(items, principle))
        for index, answer in enumerate(answers):
            keep(index, answer)

    @abstractmethod
    def _scores(self, rows: Sequence[Single], principle: Principle) -> list[Any]:
        """Return what `_verdict` and `_rating` need to know of each completion."""

    @abstractmethod
    def _verdict(self, first: Any, second: Any) -> Verdict: ...

    @abstractmethod
    def _rating(self, score: Any) -> Rating: ...


def ask(judge: Judge, items: Items, principle: Principle, done: Done | None = None) -> list[Any]:
    """Return the judge's answers about pairs, or about single completions."""
    if isinstance(items[0], Pair):
        return judge.compare(items, principle, done)
    if isinstance(judge, Judge):
        return judge.answer_each([(items, principle)], None if done is None else lambda _n, i, a: done(i, a))[0]
    # Passed only if needed: judges that read text may ignore it.
    stopped = {} if all(item.stopped for item in items) else {"stopped": [item.stopped for item in items]}
    return judge.rate([item.prompt for item in items], [item.text for item in items], principle, done, **stopped)


def ask_each(judge: Judge, asked: Sequence[tuple[Items, Principle]], done: DoneEach | None = None) -> list[list[Any]]:
    """Return `Judge.answer_each`; of a judge that has only `compare` and `rate`, principle by principle."""
    if isinstance(judge, Judge):
        return judge.answer_each(asked, done)
    return [
        ask(judge, items, principle, None if done is None else functools.partial(done, number)) if items else []
        for number, (items, principle) in enumerate(asked)
    ]


def logistic(x: float) -> float:
    """Return 1 / (1 + exp(-x)), so that logistic(x) and logistic(-x) add up to 1 exactly."""
    positive = 1 / (1 + math.exp(-abs(x)))
    return positive if x >= 0 else 1 - positive


def model_name(source: str) -> str:
    """Return the last part of a path or a Hub name, with only the characters that `Judge.name` may have."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", source.rstrip("/").rpartition("/")[2])[:96]


def digest(value: Any) -> str:
    """Return the sha256 of a JSON value, the same for equal values."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def prompt_key(prompt: Prompt) -> str:
    """Return the sha256 of a prompt's content."""
    return digest({"prompt": prompt})
