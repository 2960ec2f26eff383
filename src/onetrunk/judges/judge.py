"""The interface of a judge: the questions it is asked and the answers it may give.

A judge answers for the ORDER in which it is shown two completions. `judges/labels.py` asks in both orders and turns
the answers into labels.
"""

from __future__ import annotations

import functools
import math
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from onetrunk.servers.errors import ErrorKind
from onetrunk.types import Prompt
from onetrunk.utils.files import digest


@dataclass(frozen=True)
class Principle:
    """One criterion by which completions are judged.

    Args:
        text: what is better, as a question or a command.
        weight: its share in a label, above 0.
        tags: short names; a rubric finds its check by them.
    """

    text: str
    weight: float = 1.0
    tags: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Hash for ledger keys. It leaves out the weight, so that a new weight does not pay for new answers."""
        return digest([self.text, self.tags])


@dataclass(frozen=True)
class Single:
    """A completion that is judged alone.

    `stopped` is False if it was cut off at a length limit; `reference` is an answer that is known to be good, if any.
    """

    prompt: Prompt
    text: str
    stopped: bool = True
    reference: str | None = None


@dataclass(frozen=True)
class Pair:
    """Two completions of one prompt, in the order in which a judge is shown them; the other fields as in Single."""

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
class Answer:
    """A judge's answer to one question: a number in [0, 1], an abstention, or an error.

    Args:
        number: what was judged; None if the judge abstains or fails.
        reason: the judge's reasoning, or why it abstained.
        error: why there is no answer yet (server down, deadline). The question is asked again; never a label.
        details: votes, tokens, label mass and other values for a report, as JSON values.
        error_kind: the cause of `error`; has no meaning without one.
    """

    number: float | None
    reason: str | None = None
    error: str | None = None
    details: dict[str, Any] = field(default_factory=dict)
    error_kind: ErrorKind = "server"


class Verdict(Answer):
    """The answer about a pair in one order, under one principle."""

    @property
    def probability(self) -> float | None:
        """Probability that the completion shown first is the better one."""
        return self.number


class Rating(Answer):
    """The answer about one completion alone, under one principle."""

    @property
    def score(self) -> float | None:
        """The rating."""
        return self.number


Items = Sequence[Pair] | Sequence[Single]
Question = tuple[Pair | Single, Principle]
# Called with the index of a question, and its Verdict or Rating.
Done = Callable[[int, Any], None]


@dataclass
class Usage:
    """Counters of a judge.

    Args:
        unsettled_calls, unsettled_prompt_tokens, unsettled_completion_tokens: calls under a budget whose cost is not
            known (in flight, without an answer, or of a killed process), and the most tokens that they may have used.
        questions: answered by the judge, abstentions included; answers from a ledger are not counted.
        calls: sent to a server, failed ones included.
        failed_calls: calls without an answer of the expected form; most were repeated.
        estimated_calls: answered calls to a server that did not report their tokens, of which the most is counted.
        prompt_tokens, completion_tokens: read and written; of a server as it reports them.
        seconds: during which questions were being answered.
    """

    # First, because `astuple` reads in this order: a call that ends meanwhile is counted twice, and never left out.
    unsettled_calls: int = 0
    unsettled_prompt_tokens: int = 0
    unsettled_completion_tokens: int = 0
    questions: int = 0
    calls: int = 0
    failed_calls: int = 0
    estimated_calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0
    # Called with the most tokens of a call before it is sent, and without any before a question; it raises EndOfCalls
    # if the budget has no room for them. No counter, so without an annotation, which would make it a field.
    budget = None

    def hold(self, prompt_tokens: int, completion_tokens: int) -> None:
        """Count a call as unsettled, with the most tokens that it may use."""
        self.unsettled_calls += 1
        self.unsettled_prompt_tokens += prompt_tokens
        self.unsettled_completion_tokens += completion_tokens

    def release(self, prompt_tokens: int, completion_tokens: int) -> None:
        """Take `hold` back: the tokens of the call are counted, or it costs nothing."""
        self.unsettled_calls -= 1
        self.unsettled_prompt_tokens -= prompt_tokens
        self.unsettled_completion_tokens -= completion_tokens

    def add(self, other: Usage) -> None:
        """Add other counters to these."""
        for name, value in asdict(other).items():
            setattr(self, name, getattr(self, name) + value)

    def cost_usd(self, price: Sequence[float]) -> float:
        """Return the price in USD of the tokens, unsettled ones included.

        `price`: USD per million tokens read, and written.
        """
        read = self.prompt_tokens + self.unsettled_prompt_tokens
        written = self.completion_tokens + self.unsettled_completion_tokens
        return (read * price[0] + written * price[1]) / 1e6

    def as_dict(self, usd: float | None = None) -> dict[str, Any]:
        """Return the counters; with `usd`, the whole cost, also that of 1,000 questions."""
        values: dict[str, Any] = asdict(self) | {"seconds": round(self.seconds, 3)}
        if usd is not None:
            values |= {"usd": round(usd, 6), "usd_per_1000_questions": round(1000 * usd / max(1, self.questions), 6)}
        return values


class Judge:
    """Compares pairs of completions, and rates single completions. A judge of your own defines `_answer`.

    Args:
        name: the judge's name in reports and metrics, [A-Za-z0-9._-].
        identity: everything that an answer depends on besides the question (model and its revision or fingerprint,
            template, sampling), as JSON values. Ledgers use it in their keys.
        is_remote: whether it calls a server, for which a budget needs a price.
    """

    name: str
    identity: dict[str, Any]
    is_remote: bool = False

    @functools.cached_property
    def usage(self) -> Usage:
        """Counters of what this judge has used in this process."""
        return Usage()

    @functools.cached_property
    def members(self) -> dict[str, Judge]:
        """The judges that answer, by different names: itself, or the members of an ensemble."""
        return {self.name: self}

    def compare(self, pairs: Sequence[Pair], principle: Principle, done: Done | None = None) -> list[Verdict]:
        """Return a verdict per pair; `done` as in `answers`."""
        return self.answers([(pair, principle) for pair in pairs], done)

    def rate(self, completions: Sequence[Single], principle: Principle, done: Done | None = None) -> list[Rating]:
        """Return a rating per completion; `done` as in `answers`."""
        return self.answers([(completion, principle) for completion in completions], done)

    def answers(self, questions: Sequence[Question], done: Done | None = None) -> list[Any]:
        """Return the answers to questions: all about pairs, or all about single completions.

        A judge on a server is asked all at once, without waiting for the answers under one principle before the next.

        Args:
            done: called with the index of each question and its answer as soon as that is known, in any order.
        """
        answers: dict[int, Any] = {}

        def keep(index: int, answer: Any) -> None:
            answers[index] = answer
            self.usage.questions += answer.error is None
            if done is not None:
                done(index, answer)

        started = time.perf_counter()
        try:
            if questions:
                if self.usage.budget is not None:
                    self.usage.budget()  # Raises if it is spent.
                self._answer_all(questions, keep)
        finally:
            self.usage.seconds += time.perf_counter() - started
        return [answers[index] for index in range(len(questions))]

    def _answer_all(self, questions: Sequence[Question], keep: Done) -> None:
        """Call `keep(index, answer)` once per question. Asks about the items under one principle together."""
        places: dict[Principle, list[int]] = {}
        for index, (_, principle) in enumerate(questions):
            places.setdefault(principle, []).append(index)
        for principle, indices in places.items():
            items = [questions[index][0] for index in indices]
            self._answer(items, principle, lambda i, answer, indices=indices: keep(indices[i], answer))

    def _answer(self, items: Items, principle: Principle, keep: Done) -> None:
        """Call `keep(index, answer)` once per item: a Verdict for a Pair, a Rating for a Single."""
        raise NotImplementedError(f"the judge {self.name} has no _answer")


class ScoringJudge(Judge, ABC):
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


def logistic(x: float) -> float:
    """Return 1 / (1 + exp(-x)), so that logistic(x) and logistic(-x) add up to 1 exactly."""
    positive = 1 / (1 + math.exp(-abs(x)))
    return positive if x >= 0 else 1 - positive


def model_name(source: str) -> str:
    """Return the last part of a path or a Hub name, with only the characters that `Judge.name` may have."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", source.rstrip("/").rpartition("/")[2])[:96]


def prompt_key(prompt: Prompt) -> str:
    """Return the sha256 of a prompt's content."""
    return digest({"prompt": prompt})
