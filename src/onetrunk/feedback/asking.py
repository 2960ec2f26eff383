"""A judge's answers, each bought once: what the ledger holds is not asked, what is asked is kept as it arrives.

A question that got no answer (a server that is down) is never kept: it is asked again in the next run. Knows judges
and a ledger; no pairs of indices and no rows.
"""

from __future__ import annotations

from collections.abc import Sequence

from onetrunk.feedback.ledger import Ledger
from onetrunk.judges.base import ErrorKind, Judge, Pair, Principle, Rating, Verdict, digest, stopped_keyword
from onetrunk.judges.constitution import Constitution
from onetrunk.judges.verdicts import (
    JudgeStatistics,
    PairLabel,
    Question,
    judge_pairs,
    keep_answer,
    kept_answer,
    questions,
    rating_key,
    verdict_key,
)
from onetrunk.types import Prompt, SampledText

# Below this number of questions a share says nothing.
FEWEST = 50
# Questions on fewer prompts than these that are refused or unread never stop a run.
FEWEST_PROMPTS = 5


class FailureLimit:
    """Counts the questions asked in this run, and those that got no answer.

    Args:
        max_failed_fraction: of the questions asked so far, of the first FEWEST at least; 1: never stop. It holds for
            the questions that failed, and, once they are about FEWEST_PROMPTS prompts, for those refused or unread.
            FEWEST failures in a row stop a run too, however many answers came before: the judge is down.
        judge: its name, for the error message.
    """

    def __init__(self, max_failed_fraction: float, judge: str):
        self.max_failed_fraction = max_failed_fraction
        self.judge = judge
        self.asked = self.failed = self.refused = self.unread = self._in_a_row = 0
        self._prompts: set[str] = set()

    def note(self, error: str | None, kind: ErrorKind = "server", prompt: Prompt = "") -> None:
        """Count one question in.

        Args:
            error: why it has no answer; None: it has one.
            kind: of the error.
            prompt: that the question is about.

        Raises:
            RuntimeError: it was one failure too many.
        """
        self.asked += 1
        if error is None:
            self._in_a_row = 0
            return
        allowed = self.max_failed_fraction * max(self.asked, FEWEST)
        if kind == "server":
            self.failed += 1
            self._in_a_row += 1
            too_many = self.failed > allowed or self._in_a_row >= FEWEST
            what = f"left {self.failed} of {self.asked} questions without an answer"
            advice = "repair the judge and run the same command again"
        else:
            # The judge is there: it has replied, or it answers other questions.
            self._in_a_row = 0
            self.refused += kind == "refused"
            self.unread += kind == "unread"
            if len(self._prompts) < FEWEST_PROMPTS:
                self._prompts.add(digest(prompt))
            too_many = self.refused + self.unread > allowed and len(self._prompts) >= FEWEST_PROMPTS
            what = (
                f"refused {self.refused} of {self.asked} questions, and gave {self.unread} of them a reply that is no"
                " verdict"
            )
            advice = "repair the judge, or raise max_failed_fraction to leave these questions out, and run the same"
            advice += " command again"
        if too_many and self.max_failed_fraction < 1:
            raise RuntimeError(
                f"the judge {self.judge} {what}, past max_failed_fraction {self.max_failed_fraction:g} (the last:"
                f" {error}); all answers are kept: {advice}"
            )


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
