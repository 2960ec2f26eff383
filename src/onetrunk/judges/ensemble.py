"""Several judges as one: the mean of their answers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from statistics import fmean, pstdev
from typing import Any

from onetrunk.judges.judge import Answer, Done, Judge, Question
from onetrunk.judges.labels import ask_missing
from onetrunk.utils.files import unique_names
from onetrunk.utils.ledger import Ledger


class EnsembleJudge(Judge):
    """The mean of its members' answers (see `Judge`).

    A member that abstains is left out of the mean; if all abstain, so does the ensemble. A member's error is the
    ensemble's error, because the mean would change once that member answers. `details` hold each member's answer and
    their disagreement, the population standard deviation.

    Args:
        judges: two or more different ones.
        memory: keeps the answers of each member as soon as they arrive; what it holds is not asked again.
    """

    name = "ensemble"

    def __init__(self, judges: Sequence[Judge], memory: Ledger | None = None):
        self.memory = memory
        identities = [judge.identity for judge in judges]
        twice = next((j.name for i, j in enumerate(judges) if j.identity in identities[:i]), None)
        if twice is not None:
            raise ValueError(f"the judge {twice!r} is twice in the ensemble and would count double; name it once")
        self.members = dict(zip(unique_names([judge.name for judge in judges]), judges, strict=True))
        self.identity: dict[str, Any] = {"kind": "ensemble", "members": identities}

    def _answer_all(self, questions: Sequence[Question], keep: Done) -> None:
        """Ask one member after the other; an answer is known when the last one has given its own."""
        answers: dict[int, dict[str, Answer]] = {}
        *_, last = self.members

        def take(index: int, answer: Answer, member: str) -> None:
            answers.setdefault(index, {})[member] = answer
            if member == last:
                keep(index, _joined(answers.pop(index)))

        for name, judge in self.members.items():
            ask_missing(judge, questions, self.memory, done=functools.partial(take, member=name))


def _joined(answers: dict[str, Answer]) -> Answer:
    kind = type(next(iter(answers.values())))
    members = {name: answer.number for name, answer in answers.items()}
    errors = [f"{name}: {answer.error}" for name, answer in answers.items() if answer.error]
    if errors:
        # "server" if one of the errors is the server's, else a kind that is the question's fault.
        kinds = [answer.error_kind for answer in answers.values() if answer.error is not None]
        error_kind = "server" if "server" in kinds else kinds[0]
        return kind(None, error="; ".join(errors), details={"members": members}, error_kind=error_kind)
    numbers = [number for number in members.values() if number is not None]
    reasons = [f"{name}: {answer.reason}" for name, answer in answers.items() if answer.reason]
    details = {"members": members, "disagreement": pstdev(numbers) if numbers else None}
    return kind(fmean(numbers) if numbers else None, "\n".join(reasons) or None, details=details)
