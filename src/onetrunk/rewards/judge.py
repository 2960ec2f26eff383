"""A judge's rating of a completion alone, from 0 to 1, as a reward function.

Knows judges and texts; no model and no trainer. In YAML: `reward_funcs: [judge]` beside `judge` and `constitution`.
"""

from __future__ import annotations

from typing import Any

from onetrunk.judges.base import Judge
from onetrunk.judges.constitution import Constitution
from onetrunk.judges.kept import Memory, kept_ratings
from onetrunk.rewards.base import Completion
from onetrunk.types import Prompt


class JudgeReward:
    """The mean rating over the principles of a constitution, by weight.

    Rows of which the judge abstains, or to which it gives no answer, have no reward (None) and are left out of the
    update.

    Args:
        judge: rates.
        constitution: its principles.
        memory: of the judge's answers; None: every question is asked.
        name: for metrics.
    """

    def __init__(self, judge: Judge, constitution: Constitution, *, memory: Memory | None = None, name: str = "judge"):
        self.judge = judge
        self.constitution = constitution
        self.memory = memory
        self.__name__ = name

    def __call__(
        self,
        prompts: list[Prompt],
        completions: list[Completion],
        completion_ids: list[list[int]] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        """Return n ratings in [0, 1]."""
        if not prompts:
            return []
        texts = [as_text(completion) for completion in completions]
        stopped = columns.get("completion_stopped")
        labels = kept_ratings(self.judge, prompts, texts, self.constitution, self.memory, stopped)
        # A mean over a part of the principles would be another number once the rest is answered.
        return [None if label.errors else label.score for label in labels]


def as_text(completion: Completion) -> str:
    """Return a completion as the text that a judge reads."""
    return completion if isinstance(completion, str) else "\n".join(message["content"] for message in completion)
