"""Ask a judge, keep its answers in a ledger, and stop the run if too many questions have no answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from onetrunk.feedback.ledger import Ledger
from onetrunk.judges.base import ErrorKind, Judge, Pair, Rating, Verdict, digest
from onetrunk.judges.constitution import Constitution
from onetrunk.judges.verdicts import JudgeStatistics, PairLabel, RatingLabel, kept_labels, kept_ratings
from onetrunk.types import Prompt, SampledText

# The failed fraction is taken of this number of questions at least.
FEWEST = 50
# Refused and unread questions stop a run only if they are about this number of prompts or more.
FEWEST_PROMPTS = 5


@dataclass
class Asker:
    """Asks a judge about pairs and single completions under every principle of a constitution.

    Its methods raise a RuntimeError if too many questions have no answer.
    """

    judge: Judge
    constitution: Constitution
    ledger: Ledger
    limit: FailureLimit
    both_orders: bool = True
    statistics: JudgeStatistics = field(default_factory=JudgeStatistics)

    def labels(self, pairs: Sequence[Pair]) -> list[PairLabel]:
        """Return a label per pair; its `errors` count the questions without an answer."""
        labels = kept_labels(
            self.judge, pairs, self.constitution, self.ledger, both_orders=self.both_orders, on_answer=self._note
        )
        for label in labels:
            self.statistics.add(label)
        return labels

    def ratings(
        self, prompts: Sequence[Prompt], completions: Sequence[Sequence[SampledText]]
    ) -> list[list[RatingLabel]]:
        """Return the rating of each completion of each prompt."""
        sampled = [text for texts in completions for text in texts]
        ratings = kept_ratings(
            self.judge,
            [prompt for prompt, texts in zip(prompts, completions, strict=True) for _ in texts],
            [text.text for text in sampled],
            self.constitution,
            self.ledger,
            [text.stopped for text in sampled],
            statistics=self.statistics,
            on_answer=self._note,
        )
        by_row = iter(ratings)
        return [[next(by_row) for _ in texts] for texts in completions]

    def _note(self, answer: Verdict | Rating, prompt: Prompt) -> None:
        self.limit.note(answer.error, answer.error_kind, prompt)


class FailureLimit:
    """Counts the questions of this run, and stops the run if too many have no answer.

    Args:
        max_failed_fraction: largest fraction of the questions so far (of FEWEST at least) that may fail; 1: never
            stop. The same fraction may be refused or unread, if these are about FEWEST_PROMPTS prompts or more.
            FEWEST failures in a row also stop a run: the judge is down.
        judge: its name, for the error message.
    """

    def __init__(self, max_failed_fraction: float, judge: str):
        self.max_failed_fraction = max_failed_fraction
        self.judge = judge
        self.asked = self.failed = self.refused = self.unread = self._in_a_row = 0
        self._prompts: set[str] = set()

    def note(self, error: str | None, kind: ErrorKind = "server", prompt: Prompt = "") -> None:
        """Count one question about `prompt`, with its error or None.

        Raises:
            RuntimeError: the limit is passed.
        """
        self.asked += 1
        if error is None:
            self._in_a_row = 0
            return
        allowed = self.max_failed_fraction * max(self.asked, FEWEST)
        repair = "repair the judge"
        if kind == "server":
            self.failed += 1
            self._in_a_row += 1
            is_passed = self.failed > allowed or self._in_a_row >= FEWEST
            what = f"left {self.failed} of {self.asked} questions without an answer"
        else:
            # The judge is running: it has replied, or it answers other questions.
            self._in_a_row = 0
            self.refused += kind == "refused"
            self.unread += kind == "unread"
            if len(self._prompts) < FEWEST_PROMPTS:
                self._prompts.add(digest(prompt))
            is_passed = self.refused + self.unread > allowed and len(self._prompts) >= FEWEST_PROMPTS
            what = (
                f"refused {self.refused} of {self.asked} questions, and gave {self.unread} of them a reply that is no"
                " verdict"
            )
            repair += ", or raise max_failed_fraction to leave these questions out,"
        if is_passed and self.max_failed_fraction < 1:
            raise RuntimeError(
                f"the judge {self.judge} {what}, past max_failed_fraction {self.max_failed_fraction:g} (the last:"
                f" {error}); all answers are kept: {repair} and run the same command again"
            )
