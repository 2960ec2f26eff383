"""The ratings of a judge as rewards.

In YAML: `reward_funcs: [judge]`, with `judge` and `constitution`. Rows on which the judge abstains or gives no answer
have no reward (None) and are left out of the update.
"""

from __future__ import annotations

from typing import Any

from onetrunk.judges.constitution import Constitution
from onetrunk.judges.judge import Judge
from onetrunk.judges.labels import Memory, kept_ratings
from onetrunk.rewards.reward import BuiltInReward, Completion
from onetrunk.types import Prompt, as_text
from onetrunk.utils.files import digest


class JudgeReward(BuiltInReward):
    """The judge's mean rating over the principles of a constitution, weighted.

    Without a memory of the judge's earlier answers every question is asked. The name is for metrics.
    """

    def __init__(self, judge: Judge, constitution: Constitution, *, memory: Memory | None = None, name: str = "judge"):
        self.judge, self.constitution, self.memory = judge, constitution, memory
        self.__name__ = name

    def __call__(self, prompts: list[Prompt], completions: list[Completion], **columns: Any) -> list[float | None]:
        """Return n ratings in [0, 1]."""
        if not prompts:
            return []
        texts = [as_text(completion) for completion in completions]
        stopped = columns.get("completion_stopped")
        labels = kept_ratings(self.judge, prompts, texts, self.constitution, self.memory, stopped)
        # A mean over some of the principles would change once the others are answered.
        return [None if label.errors else label.score for label in labels]

    def content(self) -> str:
        asked = digest([self.judge.identity, []])[:16]
        return f"judge, sha256 {asked}, constitution {self.constitution.version[:16]}"
