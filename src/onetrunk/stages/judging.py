"""Load the judge that a stage's settings name, and show how far it is."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from tqdm.auto import tqdm

from onetrunk.feedback.asking import FailureLimit
from onetrunk.feedback.costs import BudgetReached, Costs
from onetrunk.judges.constitution import Constitution, load_constitution
from onetrunk.judges.judge import ErrorKind, Judge
from onetrunk.judges.judge_config import JudgeConfig, check_judge, load_judge
from onetrunk.types import Prompt


def load_judge_parts(settings: JudgeConfig, asks: bool = True) -> tuple[Judge | None, Constitution]:
    """Return the judge, its servers checked, and its constitution; without `asks` None in place of the judge."""
    constitution = load_constitution(settings.constitution)
    if not asks:
        return None, constitution
    judge = load_judge(settings)
    check_judge(judge)
    return judge, constitution


def check_judges(judges: Sequence[Judge]) -> None:
    """Check the servers of judges before anything is asked. With a spent budget, answers that are kept still count."""
    for judge in judges:
        with contextlib.suppress(BudgetReached):
            check_judge(judge)


class ShownLimit(FailureLimit):
    """A limit of failures that advances a progress bar with every answered question; `costs` are shown next to it."""

    def __init__(self, max_failed_fraction: float, judge: str, bar: tqdm, costs: Costs | None = None):
        super().__init__(max_failed_fraction, judge)
        self.bar, self.costs = bar, costs

    def note(self, error: str | None, kind: ErrorKind = "server", prompt: Prompt = "") -> None:
        if self.costs is not None:
            self.bar.set_postfix(self.costs.shown(), refresh=False)
        self.bar.update(1)
        super().note(error, kind, prompt)
