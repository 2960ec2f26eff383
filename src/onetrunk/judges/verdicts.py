"""From verdicts to labels: every pair is asked in both orders, under every principle, and the answers are averaged.

A judge that favours the slot it reads first says p in one order and 1 - p in the other: the mean is 1/2, and the
figures show it. Knows judges and pairs; no server, no ledger and no file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onetrunk.judges.base import Judge, Pair, Principle, Verdict, digest
from onetrunk.judges.constitution import Constitution

TIE = 0.5


@dataclass(frozen=True)
class Question:
    """One call of a judge: a pair and a principle by their numbers, and whether the pair is shown flipped."""

    pair: int
    principle: int
    flipped: bool


@dataclass(frozen=True)
class PairLabel:
    """What a judge says of a pair, all in all.

    Args:
        probability: that the pair's first completion is the better one: the mean over orders and, by weight, over the
            principles that were answered in every order asked; None where there is none.
        consistent: True where both orders were asked and neither contradicts the other; a tie contradicts nothing.
        votes: a principle's text, and the probability of `first` in each order that was asked, as given and flipped
            (None: no answer).
        abstentions: questions that the judge did not decide.
        errors: questions that got no answer yet.
    """

    probability: float | None
    consistent: bool
    votes: tuple[tuple[str, tuple[float | None, ...]], ...]
    abstentions: int = 0
    errors: int = 0


class JudgeStatistics:
    """What many labels say of their judge: whether it favours a slot, and how often it decides."""

    def __init__(self) -> None:
        self.pairs = self.questions = self.abstained = self.errors = 0
        self.compared = self.agreed = 0
        self.answered, self.first_slot_wins, self.first_slot_sum = 0, 0.0, 0.0

    def add(self, label: PairLabel) -> None:
        """Count one label."""
        self.pairs += 1
        self.abstained += label.abstentions
        self.errors += label.errors
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

    def as_dict(self) -> dict[str, Any]:
        """Return the figures; a share of nothing is None.

        answers, compared: verdicts given, and (pair, principle) that were answered in both orders.
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
            "position_consistency": _share(self.agreed, self.compared),
            "first_slot_rate": _share(self.first_slot_wins, self.answered),
            "first_slot_probability": _share(self.first_slot_sum, self.answered),
        }


def questions(pairs: Sequence[Pair], constitution: Constitution, both_orders: bool = True) -> list[Question]:
    """Return all that a judge is asked about some pairs, principle by principle."""
    orders = (False, True) if both_orders else (False,)
    numbers = range(len(constitution.principles))
    return [Question(i, j, flipped) for j in numbers for flipped in orders for i in range(len(pairs))]


def verdict_key(judge: Judge, principle: Principle, pair: Pair) -> str:
    """Return what a verdict is kept under: everything that it depends on. `pair` is in the order shown."""
    shown: dict[str, Any] = {"prompt": pair.prompt, "first": pair.first, "second": pair.second}
    if not (pair.first_stopped and pair.second_stopped):
        shown["stopped"] = [pair.first_stopped, pair.second_stopped]
    return digest({"verdict": shown, "principle": principle.key, "judge": judge.identity})


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
        judge: asked, principle by principle, about what is not known.
        pairs: n of them.
        constitution: its principles and their weights.
        both_orders: False asks for the order given alone, and leaves a judge's bias in the labels.
        on_verdict: called with each new verdict as soon as it is there, errors too.
        known: verdicts that are there already.
    """
    verdicts: dict[Question, Verdict] = dict(known or {})
    asked = questions(pairs, constitution, both_orders)
    for number, principle in enumerate(constitution.principles):
        missing = [q for q in asked if q.principle == number and q not in verdicts]
        if not missing:
            continue
        shown = [pairs[q.pair].flipped() if q.flipped else pairs[q.pair] for q in missing]

        def keep(index: int, verdict: Verdict, missing: list[Question] = missing) -> None:
            if on_verdict is not None:
                on_verdict(missing[index], verdict)

        verdicts.update(zip(missing, judge.compare(shown, principle, keep), strict=True))
    orders = (False, True) if both_orders else (False,)
    return [_label(number, verdicts, constitution, orders) for number in range(len(pairs))]


def _label(
    pair: int, verdicts: Mapping[Question, Verdict], constitution: Constitution, orders: Sequence[bool]
) -> PairLabel:
    votes, abstentions, errors = [], 0, 0
    sums, weights = [0.0] * len(orders), 0.0
    for number, principle in enumerate(constitution.principles):
        given: list[float | None] = []
        for flipped in orders:
            verdict = verdicts[Question(pair, number, flipped)]
            errors += verdict.error is not None
            abstentions += verdict.error is None and verdict.probability is None
            probability = verdict.probability if verdict.error is None else None
            given.append(1 - probability if flipped and probability is not None else probability)
        votes.append((principle.text, tuple(given)))
        # An answer in one order alone would bring the slot's bias into the mean.
        if None not in given:
            sums = [total + principle.weight * p for total, p in zip(sums, given, strict=True)]
            weights += principle.weight
    means = [total / weights for total in sums] if weights else []
    probability = sum(means) / len(means) if means else None
    return PairLabel(probability, len(means) == 2 and _agree(*means), tuple(votes), abstentions, errors)


def _agree(one: float, other: float) -> bool:
    return (one - TIE) * (other - TIE) >= 0


def _share(part: float, whole: int) -> float | None:
    return part / whole if whole else None
