"""A judge's answers, each bought once: what the ledger holds is not asked, what is asked is kept as it arrives.

A question that got no answer (a server that is down) is never kept: it is asked again in the next run. Knows judges
and a ledger; no pairs of indices and no rows.
"""

from __future__ import annotations

from collections.abc import Sequence

from onetrunk.feedback.failures import FailureLimit
from onetrunk.feedback.ledger import Ledger
from onetrunk.judges.base import Judge, Pair, Principle, Rating, Verdict, stopped_keyword
from onetrunk.judges.constitution import Constitution
from onetrunk.judges.kept import keep_answer, kept_answer, rating_key
from onetrunk.judges.verdicts import JudgeStatistics, PairLabel, Question, judge_pairs, questions, verdict_key
from onetrunk.types import Prompt, SampledText


class Asker:
    """Asks a judge about pairs and single completions under every principle of a constitution.

    Args:
        judge: asked.
        constitution: its principles.
        ledger: of verdicts and ratings.
        limit: counts what is asked.
        both_orders: ask for a pair in both orders.
    """

    def __init__(
        self,
        judge: Judge,
        constitution: Constitution,
        ledger: Ledger,
        limit: FailureLimit,
        both_orders: bool = True,
    ):
        self.judge, self.constitution, self.ledger = judge, constitution, ledger
        self.limit, self.both_orders = limit, both_orders
        self.statistics = JudgeStatistics()

    def labels(self, pairs: Sequence[Pair]) -> list[PairLabel]:
        """Return a label per pair; its `errors` count the questions that got no answer.

        Raises:
            RuntimeError: too many got none.
        """
        keys = {q: self._key(pairs, q) for q in questions(pairs, self.constitution, self.both_orders)}
        found = {question: kept_answer(self.ledger, key, Verdict) for question, key in keys.items()}

        def keep(question: Question, verdict: Verdict) -> None:
            keep_answer(self.ledger, keys[question], verdict)
            self.limit.note(verdict.error, verdict.error_kind, pairs[question.pair].prompt)

        labels = judge_pairs(
            self.judge,
            pairs,
            self.constitution,
            both_orders=self.both_orders,
            on_verdict=keep,
            known={question: verdict for question, verdict in found.items() if verdict is not None},
        )
        for label in labels:
            self.statistics.add(label)
        return labels

    def ratings(
        self, prompts: Sequence[Prompt], completions: Sequence[Sequence[SampledText]]
    ) -> list[tuple[list[float | None], bool]]:
        """Return, per prompt, the rating of each completion, and whether one of them got no answer.

        A rating is the mean over principles, by weight, of the scores that the judge gave; None: it abstained from
        all.

        Raises:
            RuntimeError: too many questions got no answer.
        """
        flat = [
            (prompt, sampled.text, sampled.stopped)
            for prompt, row in zip(prompts, completions, strict=True)
            for sampled in row
        ]
        by_principle = [self._scores(flat, principle) for principle in self.constitution.principles]
        weights = [principle.weight for principle in self.constitution.principles]
        found = iter([_weighted(scores, weights) for scores in zip(*by_principle, strict=True)])
        rated = [[next(found) for _ in texts] for texts in completions]
        return [([score for score, _ in row], any(failed for _, failed in row)) for row in rated]

    def _key(self, pairs: Sequence[Pair], question: Question) -> str:
        pair = pairs[question.pair]
        shown = pair.flipped() if question.flipped else pair
        return verdict_key(self.judge, self.constitution.principles[question.principle], shown)

    def _scores(self, flat: Sequence[tuple[Prompt, str, bool]], principle: Principle) -> list[Rating]:
        keys = [rating_key(self.judge, principle, *row) for row in flat]
        found = {key: rating for key in keys if (rating := kept_answer(self.ledger, key, Rating)) is not None}
        # The same text twice is one question.
        missing = list({key: row for key, row in zip(keys, flat, strict=True) if key not in found}.items())

        def keep(index: int, rating: Rating) -> None:
            key, (prompt, *_) = missing[index]
            found[key] = rating
            keep_answer(self.ledger, key, rating)
            self.limit.note(rating.error, rating.error_kind, prompt)

        if missing:
            prompts, texts, stopped = (list(column) for column in zip(*(row for _, row in missing), strict=True))
            self.judge.rate(prompts, texts, principle, keep, **stopped_keyword(stopped))
        for rating in found.values():
            self.statistics.add_rating(rating)
        return [found[key] for key in keys]


def _weighted(scores: Sequence[Rating], weights: Sequence[float]) -> tuple[float | None, bool]:
    """Return the mean of the scores that are there, and whether one is missing for an error."""
    has_failed = any(rating.error is not None for rating in scores)
    given = [
        (rating.score, weight) for rating, weight in zip(scores, weights, strict=True) if rating.score is not None
    ]
    total = sum(weight for _, weight in given)
    return (sum(score * weight for score, weight in given) / total if given else None), has_failed
