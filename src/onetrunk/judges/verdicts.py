"""From verdicts to labels: every pair is asked in both orders, under every principle, and the answers are averaged.

A judge that favours a slot answers p in one order and 1 - p in the other: the mean is 1/2, and `JudgeStatistics`
shows the bias. Answers that a `Memory` keeps are not asked again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TypeVar

from onetrunk.judges.base import ErrorKind, Judge, Pair, Principle, Rating, Verdict, digest, stopped_keyword
from onetrunk.judges.constitution import Constitution
from onetrunk.types import Prompt

T = TypeVar("T", Verdict, Rating)
TIE = 0.5
# Limits of `judge_warnings`. Below FEWEST_ANSWERS a share is noise.
LEAST_CONSISTENCY, MOST_SLOT_BIAS, SLOT_RATE_NEAR, MANY_ABSTENTIONS = 0.5, 0.15, 0.1, 0.1
FEWEST_ANSWERS = 20
# Under this reason earlier versions kept the answer of an ensemble with a member whose replies they could not read.
UNREAD_MEMBER = re.compile(r"^[\w.-]+: \d+ of \d+ replies are no label$", re.MULTILINE)


@dataclass(frozen=True)
class Question:
    """One question for a judge: the indices of a pair and a principle, and whether the pair is shown flipped."""

    pair: int
    principle: int
    flipped: bool


@dataclass(frozen=True)
class PairLabel:
    """The label of a pair, from all verdicts about it.

    Args:
        probability: that the pair's first completion is the better one. It is the mean over orders and, by weight,
            over the principles that were answered in every order asked and did not tie; 1/2 if all of those tie, None
            if there are none.
        consistent: True if both orders were asked and neither contradicts the other; a tie contradicts nothing.
        votes: the text of each principle, and the probability of `first` in each order asked, as given and flipped
            (None: no answer).
        abstentions: questions that the judge did not decide.
        errors: questions without an answer yet.
        refused, unread: those among the errors that have this `ErrorKind`.
    """

    probability: float | None
    consistent: bool
    votes: tuple[tuple[str, tuple[float | None, ...]], ...]
    abstentions: int = 0
    errors: int = 0
    refused: int = 0
    unread: int = 0


@dataclass(frozen=True)
class RatingLabel:
    """The label of a completion, from its ratings.

    Args:
        score: mean over principles, by weight, in [0, 1]; None without an answer to average.
        abstentions: principles by which the judge did not decide.
        errors: principles without an answer yet.
        failure: the first error's message.
    """

    score: float | None
    abstentions: int = 0
    errors: int = 0
    failure: str | None = None


def questions(pairs: Sequence[Pair], constitution: Constitution, both_orders: bool = True) -> list[Question]:
    """Return every question about some pairs, principle by principle."""
    orders = (False, True) if both_orders else (False,)
    numbers = range(len(constitution.principles))
    return [Question(i, j, flipped) for j in numbers for flipped in orders for i in range(len(pairs))]


def judge_pairs(
    judge: Judge,
    pairs: Sequence[Pair],
    constitution: Constitution,
    *,
    both_orders: bool = True,
    on_verdict: Callable[[Question, Verdict], None] | None = None,
    known: Mapping[Question, Verdict] | None = None,
) -> list[PairLabel]:
    """Return a label per pair.

    Args:
        judge, pairs, constitution: the judge answers, principle by principle, the questions that are not in `known`.
        both_orders: False asks only in the given order, and leaves a judge's bias in the labels.
        on_verdict: called with each new verdict, also with an error, as soon as it arrives.
        known: verdicts that need not be asked for.
    """
    verdicts: dict[Question, Verdict] = dict(known or {})
    all_questions = questions(pairs, constitution, both_orders)
    for number, principle in enumerate(constitution.principles):
        missing = [q for q in all_questions if q.principle == number and q not in verdicts]
        if not missing:
            continue

        def keep(index: int, verdict: Verdict, missing: list[Question] = missing) -> None:
            if on_verdict is not None:
                on_verdict(missing[index], verdict)

        shown = [_shown(pairs, question) for question in missing]
        verdicts.update(zip(missing, judge.compare(shown, principle, keep), strict=True))
    orders = (False, True) if both_orders else (False,)
    return [_label(number, verdicts, constitution, orders) for number in range(len(pairs))]


def _shown(pairs: Sequence[Pair], question: Question) -> Pair:
    pair = pairs[question.pair]
    return pair.flipped() if question.flipped else pair


def _label(
    pair: int, verdicts: Mapping[Question, Verdict], constitution: Constitution, orders: Sequence[bool]
) -> PairLabel:
    votes, abstentions = [], 0
    errors: list[ErrorKind] = []
    answered: list[tuple[float, list[float]]] = []
    for number, principle in enumerate(constitution.principles):
        by_order: list[float | None] = []
        for flipped in orders:
            verdict = verdicts[Question(pair, number, flipped)]
            errors += [verdict.error_kind] if verdict.error is not None else []
            abstentions += verdict.error is None and verdict.probability is None
            probability = verdict.probability if verdict.error is None else None
            by_order.append(1 - probability if flipped and probability is not None else probability)
        votes.append((principle.text, tuple(by_order)))
        # An answer in one order alone would bring the slot's bias into the mean.
        if None not in by_order:
            answered.append((principle.weight, by_order))
    # A principle that ties in every order would only pull the others towards 1/2. Two orders that contradict each
    # other do count: the judge saw a difference, but cannot be trusted with it.
    decided = [(weight, by_order) for weight, by_order in answered if any(p != TIE for p in by_order)] or answered
    weights = sum(weight for weight, _ in decided)
    means = [sum(weight * p[i] for weight, p in decided) / weights for i in range(len(orders)) if decided]
    probability = sum(means) / len(means) if means else None
    kinds = len(errors), errors.count("refused"), errors.count("unread")
    return PairLabel(probability, len(means) == 2 and _agree(*means), tuple(votes), abstentions, *kinds)


class Memory(Protocol):
    """Answers as JSON values under sha256 keys; `feedback.ledger.Ledger` is one that is saved to disk."""

    def get(self, key: str) -> Any:
        """Return the value under a key, None without one."""

    def put(self, key: str, value: Any) -> Any:
        """Keep a value."""

    def replace(self, key: str, value: Any) -> Any:
        """Keep a value in place of the one under the key."""


def kept_labels(
    judge: Judge, pairs: Sequence[Pair], constitution: Constitution, memory: Memory | None = None
) -> list[PairLabel]:
    """Return a label per pair, from both orders; only questions that the memory does not hold are asked."""
    if memory is None:
        return judge_pairs(judge, pairs, constitution)

    def key(question: Question) -> str:
        return verdict_key(judge, constitution.principles[question.principle], _shown(pairs, question))

    def keep(question: Question, verdict: Verdict) -> None:
        keep_answer(memory, key(question), verdict)

    kept = {question: kept_answer(memory, key(question), Verdict) for question in questions(pairs, constitution)}
    known = {question: verdict for question, verdict in kept.items() if verdict is not None}
    return judge_pairs(judge, pairs, constitution, on_verdict=keep, known=known)


def kept_ratings(
    judge: Judge,
    prompts: Sequence[Prompt],
    completions: Sequence[str],
    constitution: Constitution,
    memory: Memory | None = None,
    stopped: Sequence[bool] | None = None,
) -> list[RatingLabel]:
    """Return a rating per completion; only questions that the memory does not hold are asked.

    `stopped` is False for a completion that was cut off; None: no completion was cut off.
    """
    rows = list(zip(prompts, completions, stopped or [True] * len(prompts), strict=True))
    by_principle = [_ratings(judge, rows, principle, memory) for principle in constitution.principles]
    weights = [principle.weight for principle in constitution.principles]
    return [_rating_label(ratings, weights) for ratings in zip(*by_principle, strict=True)]


def _ratings(
    judge: Judge, rows: Sequence[tuple[Prompt, str, bool]], principle: Principle, memory: Memory | None
) -> list[Rating]:
    keys = [rating_key(judge, principle, *row) for row in rows]
    kept = {} if memory is None else {key: kept_answer(memory, key, Rating) for key in keys}
    ratings = {key: rating for key, rating in kept.items() if rating is not None}
    # The same text twice is one question.
    missing = {key: row for key, row in zip(keys, rows, strict=True) if key not in ratings}
    order = list(missing)

    def keep(index: int, rating: Rating) -> None:
        if memory is not None:
            keep_answer(memory, order[index], rating)

    if missing:
        prompts, texts, stopped = (list(column) for column in zip(*missing.values(), strict=True))
        answers = judge.rate(prompts, texts, principle, keep, **stopped_keyword(stopped))
        ratings |= dict(zip(order, answers, strict=True))
    return [ratings[key] for key in keys]


def _rating_label(ratings: Sequence[Rating], weights: Sequence[float]) -> RatingLabel:
    failures = [rating.error for rating in ratings if rating.error is not None]
    scores = [(r.score, w) for r, w in zip(ratings, weights, strict=True) if r.error is None and r.score is not None]
    total = sum(weight for _, weight in scores)
    score = sum(score * weight for score, weight in scores) / total if scores else None
    return RatingLabel(score, len(ratings) - len(failures) - len(scores), len(failures), next(iter(failures), None))


def verdict_key(judge: Judge, principle: Principle, pair: Pair) -> str:
    """Return the key of a verdict: everything that it depends on. `pair` is in the order shown."""
    shown: dict[str, Any] = {"prompt": pair.prompt, "first": pair.first, "second": pair.second}
    if not (pair.first_stopped and pair.second_stopped):
        shown["stopped"] = [pair.first_stopped, pair.second_stopped]
    return digest({"verdict": shown, "principle": principle.key, "judge": judge.identity})


def rating_key(judge: Judge, principle: Principle, prompt: Prompt, completion: str, stopped: bool = True) -> str:
    """Return the key of a rating: everything that it depends on."""
    about: dict[str, Any] = {"prompt": prompt, "completion": completion, "principle": principle.key}
    if not stopped:
        about["stopped"] = False
    return digest({"rating": about, "judge": judge.identity})


def kept_answer(memory: Memory, key: str, kind: type[T]) -> T | None:
    """Return the Verdict or Rating (`kind`) under a key; None for a question that must be asked."""
    value = memory.get(key)
    return None if value is None or _is_unread(value) else kind(**value)


def keep_answer(memory: Memory, key: str, answer: Verdict | Rating) -> None:
    """Keep an answer; an error is not kept, so that the question is asked again."""
    if answer.error is not None:
        return
    value = asdict(answer)
    del value["error_kind"]
    (memory.replace if _is_unread(memory.get(key)) else memory.put)(key, value)


def _is_unread(value: dict[str, Any] | None) -> bool:
    """Return whether a kept value holds replies without a verdict, which earlier versions kept as an abstention."""
    if value is None:
        return False
    details = value.get("details", {})
    if None in details.get("members", {}).values():
        return UNREAD_MEMBER.search(value["reason"] or "") is not None
    # Votes measure no label mass, so votes without a probability are no abstention.
    return details.get("method") == "votes" and value.get("probability", value.get("score")) is None


class JudgeStatistics:
    """Statistics of a judge over many labels: whether it favours a slot, and how often it decides."""

    def __init__(self) -> None:
        self.pairs = self.questions = self.abstained = self.errors = self.refused = self.unread = 0
        self.compared = self.agreed = 0
        self.answered, self.first_slot_wins, self.first_slot_sum = 0, 0.0, 0.0

    def add(self, label: PairLabel) -> None:
        """Count one label."""
        self.pairs += 1
        self.abstained += label.abstentions
        self.errors += label.errors
        self.refused += label.refused
        self.unread += label.unread
        for _, orders in label.votes:
            self.questions += len(orders)
            for is_flipped, probability in enumerate(orders):
                if probability is not None:
                    shown_first = 1 - probability if is_flipped else probability
                    self.answered += 1
                    self.first_slot_sum += shown_first
                    self.first_slot_wins += TIE if shown_first == TIE else float(shown_first > TIE)
            if len(orders) == 2 and None not in orders:
                self.compared += 1
                self.agreed += _agree(*orders)

    def add_rating(self, rating: Rating) -> None:
        """Count the rating of one completion as a question without slots."""
        self.questions += 1
        self.abstained += rating.error is None and rating.score is None
        self.errors += rating.error is not None
        self.refused += rating.error is not None and rating.error_kind == "refused"
        self.unread += rating.error is not None and rating.error_kind == "unread"

    def as_dict(self) -> dict[str, Any]:
        """Return the statistics; a share of zero is None.

        answers, compared: verdicts, and (pair, principle) that were answered in both orders.
        errors: questions without an answer yet; refused and unread are the errors of that kind.
        position_consistency: share of (pair, principle) whose two orders do not contradict each other.
        first_slot_rate: share of answers for the completion shown first, a tie counting half; .5 for a fair judge.
        first_slot_probability: mean probability of the completion shown first.
        """
        return {
            "pairs": self.pairs,
            "questions": self.questions,
            "answers": self.answered,
            "compared": self.compared,
            "abstained_fraction": _share(self.abstained, self.questions),
            "errors": self.errors,
            "refused": self.refused,
            "unread": self.unread,
            "position_consistency": _share(self.agreed, self.compared),
            "first_slot_rate": _share(self.first_slot_wins, self.answered),
            "first_slot_probability": _share(self.first_slot_sum, self.answered),
        }


def judge_warnings(statistics: dict[str, Any]) -> list[str]:
    """Return warnings about a judge, from `JudgeStatistics.as_dict`."""
    warnings = []
    abstained, agreed = statistics["abstained_fraction"], statistics["position_consistency"]
    slot_rate, slot = statistics["first_slot_rate"], statistics["first_slot_probability"]
    if abstained is not None and abstained >= MANY_ABSTENTIONS:
        warnings.append(
            f"the judge abstains from {abstained:.0%} of its questions; the ledger holds a reason for each: look at"
            " them, or use another judge"
        )
    if agreed is not None and agreed < LEAST_CONSISTENCY:
        warnings.append(
            f"the judge contradicts itself in {1 - agreed:.0%} of the questions asked in both orders; use another one"
        )
    is_slot_bound = slot_rate is not None and not SLOT_RATE_NEAR < slot_rate < 1 - SLOT_RATE_NEAR
    if statistics["answers"] >= FEWEST_ANSWERS and (is_slot_bound or abs(slot - TIE) > MOST_SLOT_BIAS):
        both = statistics["compared"]
        effect = "asking in both orders cancels this" if both else "with one order this is in the labels"
        warnings.append(
            f"the judge prefers the completion shown first in {slot_rate:.0%} of its answers, with a mean probability"
            f" of {slot:.2f}; {effect}"
        )
    if statistics["refused"] or statistics["unread"]:
        warnings.append(
            f"the judge refused {statistics['refused']} questions and gave {statistics['unread']} a reply that is no"
            " verdict"
        )
    return warnings


def _agree(one: float, other: float) -> bool:
    return (one - TIE) * (other - TIE) >= 0


def _share(part: float, whole: int) -> float | None:
    return part / whole if whole else None
