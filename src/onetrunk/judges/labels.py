"""From verdicts to labels: every pair is asked in both orders, under every principle, and the answers are averaged.

A judge that favours a slot answers p in one order and 1 - p in the other: the mean is 1/2, and `JudgeStatistics`
shows the bias. Answers that a `Ledger` keeps are not asked again.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist, fmean
from typing import Any, TypeVar

from onetrunk.judges.constitution import Constitution
from onetrunk.judges.judge import Answer, Done, Items, Judge, Pair, Principle, Question, Rating, Single, Verdict
from onetrunk.servers.errors import ErrorKind
from onetrunk.types import Prompt
from onetrunk.utils.files import digest
from onetrunk.utils.ledger import Ledger

Kind = TypeVar("Kind", bound=Answer)
# Called with an item and its new answer.
OnAnswer = Callable[[Pair | Single, Answer], None]
TIE = 0.5
# Limits of `judge_warnings`. Below FEWEST_ANSWERS a share is noise.
LEAST_CONSISTENCY, MOST_SLOT_BIAS, SLOT_RATE_NEAR, MANY_ABSTENTIONS = 0.5, 0.15, 0.1, 0.1
FEWEST_ANSWERS = 20
# Characters of a reason in a message.
LONGEST_REASON = 200
# Where one length is chosen in this share of the pairs, a reward model may learn length alone.
ONE_LENGTH = 0.65


@dataclass(frozen=True)
class PairLabel:
    """The label of a pair, from all verdicts about it.

    Args:
        probability: that the pair's first completion is the better one. It is the mean over orders and, by weight,
            over the principles that were answered in both orders and did not tie; 1/2 if all of those tie. None if
            there are none, or if a question has no answer yet, with which the label would change.
        consistent: True if neither order contradicts the other; a tie contradicts nothing.
        votes: the text of each principle, and the probability of `first` as given and flipped (None: no answer).
        abstentions: why the judge did not decide questions, in its words.
        errors: the kinds of the errors of questions without an answer yet.
    """

    probability: float | None
    consistent: bool
    votes: tuple[tuple[str, tuple[float | None, ...]], ...]
    abstentions: tuple[str, ...] = ()
    errors: tuple[ErrorKind, ...] = ()


def judge_pairs(
    judge: Judge,
    pairs: Sequence[Pair],
    constitution: Constitution,
    *,
    memory: Ledger | None = None,
    on_answer: OnAnswer | None = None,
) -> list[PairLabel]:
    """Return a label per pair; `memory` and `on_answer` as in `ask_missing`, which gets pairs in the order shown."""
    shown = [*pairs, *(pair.flipped() for pair in pairs)]
    by_principle = answers_by_principle(judge, shown, constitution, memory, on_answer)
    return [_label([v[i :: len(pairs)] for v in by_principle], constitution.principles) for i in range(len(pairs))]


def kept_ratings(
    judge: Judge,
    prompts: Sequence[Prompt],
    completions: Sequence[str],
    constitution: Constitution,
    memory: Ledger | None = None,
    stopped: Sequence[bool] | None = None,
    on_answer: OnAnswer | None = None,
    references: Sequence[str | None] | None = None,
) -> list[float | None]:
    """Return `weighted_rating` per completion; only questions that the memory does not hold are asked.

    `stopped` is False for a completion that was cut off; None: no completion was cut off. `on_answer` gets each new
    answer. `references` are answers that are known to be good.
    """
    stopped, references = stopped or [True] * len(prompts), references or [None] * len(prompts)
    rows = [Single(*row) for row in zip(prompts, completions, stopped, references, strict=True)]
    by_principle = answers_by_principle(judge, rows, constitution, memory, on_answer)
    return [weighted_rating(ratings, constitution) for ratings in zip(*by_principle, strict=True)]


def answers_by_principle(
    judge: Judge,
    items: Items,
    constitution: Constitution,
    memory: Ledger | None = None,
    on_answer: OnAnswer | None = None,
) -> list[list[Any]]:
    """Return the judge's answers about all items, a list for each principle; arguments as in `ask_missing`."""
    questions = [(item, principle) for principle in constitution.principles for item in items]
    answers = ask_missing(judge, questions, memory, on_answer)
    return [answers[number * len(items) :][: len(items)] for number in range(len(constitution.principles))]


def ask_missing(
    judge: Judge,
    questions: Sequence[Question],
    memory: Ledger | None = None,
    on_answer: OnAnswer | None = None,
    done: Done | None = None,
) -> list[Any]:
    """Return the judge's answers, as `Judge.answers`. Equal questions have one answer, the same object.

    Args:
        memory: what it holds is not asked, and each new answer is kept as soon as it arrives; None: all is asked.
        on_answer: called with each new answer, also with an error, after it is kept.
        done: called with the index of each question and its answer as soon as that is known.
    """
    keys = [answer_key(judge, principle, item) for item, principle in questions]
    places: dict[str, list[int]] = {}
    for index, key in enumerate(keys):
        places.setdefault(key, []).append(index)
    answers: dict[str, Answer] = {}

    def keep(key: str, answer: Answer) -> None:
        answers[key] = answer
        for index in places[key] if done is not None else ():
            done(index, answer)

    def keep_new(number: int, answer: Answer) -> None:
        key = missing[number]
        if memory is not None:
            keep_answer(memory, key, answer)
        if on_answer is not None:
            on_answer(questions[places[key][0]][0], answer)
        keep(key, answer)

    kind = Verdict if questions and isinstance(questions[0][0], Pair) else Rating
    for key in places if memory is not None else ():
        answer = kept_answer(memory, key, kind)
        if answer is not None:
            keep(key, answer)
    missing = [key for key in places if key not in answers]
    if missing:
        judge.answers([questions[places[key][0]] for key in missing], keep_new)
    return [answers[key] for key in keys]


def _label(verdicts: Sequence[Sequence[Verdict]], principles: Sequence[Principle]) -> PairLabel:
    """Return the label of a pair from its verdicts per principle, each as given and flipped."""
    everything = [verdict for in_orders in verdicts for verdict in in_orders]
    errors = tuple(verdict.error_kind for verdict in everything if verdict.error is not None)
    undecided = [verdict for verdict in everything if verdict.probability is None and verdict.error is None]
    abstentions = tuple(verdict.reason or "no reason given" for verdict in undecided)
    votes = tuple((p.text, _in_both_orders(*orders)) for p, orders in zip(principles, verdicts, strict=True))
    # An answer in one order alone would bring the slot's bias into the mean.
    answered = [(p.weight, orders) for p, (_, orders) in zip(principles, votes, strict=True) if None not in orders]
    # A principle that ties in every order would only pull the others towards 1/2. Two orders that contradict each
    # other do count: the judge saw a difference, but cannot be trusted with it.
    decided = [(weight, orders) for weight, orders in answered if orders != (TIE, TIE)] or answered
    weights = [weight for weight, _ in decided]
    means = [_weighted_mean(in_order, weights) for in_order in zip(*(orders for _, orders in decided), strict=True)]
    if errors or not means:
        return PairLabel(None, False, votes, abstentions, errors)
    return PairLabel(sum(means) / len(means), _agree(*means), votes, abstentions)


def _in_both_orders(given: Verdict, flipped: Verdict) -> tuple[float | None, float | None]:
    """Return the probability of a pair's first completion in both orders.

    Of an ensemble it is the mean over the members that answered in both: in one alone the bias of a slot would count.
    """
    one, other = given.probability, flipped.probability
    members = [(verdict.details or {}).get("members") for verdict in (given, flipped)]
    if all(members):
        both = [name for name in members[0] if None not in (members[0][name], members[1].get(name))]
        one, other = (fmean(answers[name] for name in both) if both else None for answers in members)
    return one, None if other is None else 1 - other


def weighted_rating(ratings: Sequence[Rating], constitution: Constitution) -> float | None:
    """Return the mean of a completion's ratings, one per principle, by weight, in [0, 1].

    None if the judge abstains under every principle, or has no answer yet under one: the mean would change with it.
    """
    rated = zip(ratings, constitution.principles, strict=True)
    scored = [(rating.score, principle.weight) for rating, principle in rated if rating.score is not None]
    if not scored or any(rating.error is not None for rating in ratings):
        return None
    return _weighted_mean(*zip(*scored, strict=True))


def answer_key(judge: Judge, principle: Principle, item: Pair | Single) -> str:
    """Return the key of an answer: everything that it depends on. A pair is in the order shown."""
    return digest({"question": vars(item), "principle": principle.key, "judge": judge.identity})


def kept_answer(memory: Ledger, key: str, kind: type[Kind]) -> Kind | None:
    """Return the Verdict or Rating (`kind`) under a key; None for a question that must be asked."""
    value = memory.get(key)
    return None if value is None else kind(**value)


def keep_answer(memory: Ledger, key: str, answer: Answer) -> None:
    """Keep an answer; an error is not kept, so that the question is asked again."""
    if answer.error is not None:
        return
    value = asdict(answer)
    del value["error_kind"]
    memory.put(key, value)


class JudgeStatistics:
    """Statistics of a judge over many labels: whether it favours a slot, and how often it decides."""

    def __init__(self) -> None:
        self.sums: Counter[str] = Counter()
        self.abstention: str | None = None

    def add(self, label: PairLabel) -> None:
        """Count one label."""
        self.abstention = next(iter(label.abstentions), self.abstention)
        self.sums.update(pairs=1, abstained=len(label.abstentions), errors=len(label.errors))
        self.sums.update(label.errors)
        for _, orders in label.votes:
            self.sums["questions"] += len(orders)
            for is_flipped, probability in enumerate(orders):
                if probability is not None:
                    shown_first = 1 - probability if is_flipped else probability
                    wins = TIE if shown_first == TIE else float(shown_first > TIE)
                    self.sums.update(answers=1, first_slot_sum=shown_first, first_slot_wins=wins)
            if None not in orders:
                self.sums.update(compared=1, agreed=_agree(*orders))

    def add_rating(self, rating: Answer) -> None:
        """Count the rating of one completion as a question without slots."""
        if rating.error is not None:
            self.sums.update(["questions", "errors", rating.error_kind])
            return
        self.sums.update(questions=1, abstained=rating.score is None)
        if rating.score is None:
            self.abstention = rating.reason

    def as_dict(self) -> dict[str, Any]:
        """Return the statistics; a share of zero is None.

        abstention: the reason of one abstention; None without any, and of several shards.
        answers, compared: verdicts, and (pair, principle) that were answered in both orders.
        position_consistency: share of (pair, principle) whose two orders do not contradict each other.
        first_slot_rate: share of answers for the completion shown first, a tie counting half; .5 for a fair judge.
        """
        counts = ("pairs", "questions", "answers", "compared", "errors", "refused", "unread")
        shares = {
            "abstained_fraction": ("abstained", "questions"),
            "position_consistency": ("agreed", "compared"),
            "first_slot_rate": ("first_slot_wins", "answers"),
            "first_slot_probability": ("first_slot_sum", "answers"),
        }
        values = {"abstention": self.abstention, **{name: self.sums[name] for name in counts}}
        return values | {name: _share(self.sums[part], self.sums[whole]) for name, (part, whole) in shares.items()}


def judge_warnings(statistics: dict[str, Any]) -> list[str]:
    """Return warnings about a judge, from `JudgeStatistics.as_dict`."""
    warnings = []
    abstained, agreed = statistics["abstained_fraction"], statistics["position_consistency"]
    slot_rate, slot = statistics["first_slot_rate"], statistics["first_slot_probability"]
    if abstained is not None and abstained >= MANY_ABSTENTIONS:
        example = for_instance(statistics.get("abstention"))
        warnings.append(f"the judge abstains from {abstained:.0%} of its questions{example}; use another one")
    if agreed is not None and agreed < LEAST_CONSISTENCY:
        warnings.append(
            f"the judge contradicts itself in {1 - agreed:.0%} of the questions asked in both orders; use another one"
        )
    is_slot_bound = slot_rate is not None and not SLOT_RATE_NEAR < slot_rate < 1 - SLOT_RATE_NEAR
    if statistics["answers"] >= FEWEST_ANSWERS and (is_slot_bound or abs(slot - TIE) > MOST_SLOT_BIAS):
        warnings.append(
            f"the judge prefers the completion shown first in {slot_rate:.0%} of its answers, with a mean probability"
            f" of {slot:.2f}; asking in both orders cancels this"
        )
    if statistics["refused"] or statistics["unread"]:
        warnings.append(
            f"the judge refused {statistics['refused']} questions and gave {statistics['unread']} a reply"
            " without a verdict"
        )
    return warnings


def for_instance(reason: str | None) -> str:
    """Return the end of a clause that gives the reason of one abstention; "" without one."""
    return "" if reason is None else f", for instance because: {' '.join(reason.split())[:LONGEST_REASON]}"


def _weighted_mean(values: Sequence[float], weights: Sequence[float]) -> float:
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)


def _agree(one: float, other: float) -> bool:
    return (one - TIE) * (other - TIE) >= 0


def _share(part: float, whole: int) -> float | None:
    return part / whole if whole else None


def wilson_interval(successes: float, number: int) -> tuple[float, float]:
    """Return the 95% interval of a share; NaN of nothing.

    Source: Wilson 1927, "Probable inference, the law of succession, and statistical inference", equation 4.
    """
    if not number:
        return math.nan, math.nan
    z = NormalDist().inv_cdf(0.975)
    share, square = successes / number, z * z / number
    center = (share + square / 2) / (1 + square)
    half = z / (1 + square) * math.sqrt(share * (1 - share) / number + square / (4 * number))
    return max(0.0, center - half), min(1.0, center + half)


def statistics_warnings(statistics: dict[str, Any]) -> list[str]:
    """Return what a reader of the statistics of preference rows should not overlook, as clauses."""
    warnings = []
    length = statistics.get("rows", {}).get("length", {})
    longer, number = length.get("longer_is_chosen_fraction"), length.get("of_unequal_length", 0)
    low, high = wilson_interval((longer or 0.0) * number, number)
    if longer is not None and max(longer, 1 - longer) >= ONE_LENGTH and not low <= 0.5 <= high:
        which = "longer" if longer > 0.5 else "shorter"
        share = f"{max(longer, 1 - longer):.0%}"
        warnings.append(f"the {which} completion is chosen in {share} of the pairs, which a reward model may learn")
    if "judge" in statistics:
        warnings += judge_warnings(statistics["judge"])
    if statistics["counts"].get("unjudged"):
        warnings.append(f"{statistics['counts']['unjudged']} pairs have no verdict yet")
    return warnings
