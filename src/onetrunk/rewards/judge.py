"""A judge as the reward: its ratings of single completions."""

from __future__ import annotations

from typing import Any

from onetrunk.judges.constitution import Constitution
from onetrunk.judges.judge import Judge
from onetrunk.judges.labels import kept_ratings
from onetrunk.rewards.reward import BuiltInReward
from onetrunk.types import Completion, Prompt, as_text
from onetrunk.utils.files import digest
from onetrunk.utils.ledger import Ledger


class JudgeReward(BuiltInReward):
    """The judge's mean rating over the principles of a constitution, weighted; in YAML `reward_funcs: [judge]`.

    Rows on which the judge abstains or gives no answer have no reward (None). Without a memory of the judge's earlier
    answers every question is asked. The name is for metrics.
    """

    reads = ("reference",)

    def __init__(self, judge: Judge, constitution: Constitution, *, memory: Ledger | None = None, name: str = "judge"):
        self.judge, self.constitution, self.memory = judge, constitution, memory
        self.__name__ = name

    def __call__(self, prompts: list[Prompt], completions: list[Completion], **columns: Any) -> list[float | None]:
        """Return n ratings in [0, 1]."""
        if not prompts:
            return []
        texts = [as_text(completion) for completion in completions]
        shown = {"stopped": columns.get("completion_stopped"), "references": columns.get("reference")}
        return kept_ratings(self.judge, prompts, texts, self.constitution, self.memory, **shown)

    def content(self) -> str:
        asked = digest([self.judge.identity, []])[:16]
        return f"judge, sha256 {asked}, constitution {self.constitution.version[:16]}"
