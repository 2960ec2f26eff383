"""The verdicts of a judge as rewards: a rating of each completion, or beta * log P(y > y_ref) against a reference.

In YAML: `reward_funcs: [judge]` or `[pairwise]`, with `judge` and `constitution`. Rows on which the judge abstains or
gives no answer have no reward (None) and are left out of the update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from onetrunk.judges.constitution import Constitution
from onetrunk.judges.judge import Judge, Pair, prompt_key
from onetrunk.judges.labels import JudgeStatistics, Memory, PairLabel, judge_pairs, kept_ratings
from onetrunk.rewards.reward import BuiltInReward, Completion
from onetrunk.types import Prompt, SampledText, as_text
from onetrunk.utils.files import digest

COLUMN = "reference_completion"
AS_GOOD = 0.5


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
        return judged_by(self.judge, self.constitution, [])


class PairwiseReward(BuiltInReward):
    """beta * log P(y > y_ref), where P comes from a judge that is asked in both orders.

    y_ref is sampled once per prompt from the model that training starts from. It is read from the column
    `reference_completion` or from `references`. The reward is at most 0; a completion as good as y_ref has
    beta * log 1/2. For a completion equal to y_ref the judge is not asked.

    Args:
        judge, constitution, memory, name: as in `JudgeReward`. With a reward model as the judge, P = sigmoid(score -
            score of y_ref).
        beta: scale, above 0; compare it with PPO's own `beta`.
        floor: lower bound of P, in (0, 1/2): a judge of plain checks can give P = 0, whose log is infinite.
        references: `prompt_key(prompt)` -> y_ref, for rows without the column.

    Raises:
        ValueError: a setting is out of range.
    """

    columns_read = (COLUMN,)

    def __init__(
        self,
        judge: Judge,
        constitution: Constitution,
        *,
        beta: float = 1.0,
        floor: float = 0.01,
        references: dict[str, SampledText] | None = None,
        memory: Memory | None = None,
        name: str = "pairwise",
    ):
        if not (math.isfinite(beta) and beta > 0):
            raise ValueError(f"the beta of a pairwise reward is {beta}; set a number above 0, such as 1")
        if not 0 < floor < AS_GOOD:
            raise ValueError(f"the floor of a pairwise reward is {floor}; set a probability above 0 and below 0.5")
        self.judge, self.constitution, self.memory = judge, constitution, memory
        self.beta, self.floor = beta, floor
        self.references = {} if references is None else references
        self.__name__ = name

    def __call__(self, prompts: list[Prompt], completions: list[Completion], **columns: Any) -> list[float | None]:
        """Return n rewards.

        Raises:
            RuntimeError: a prompt has no y_ref.
        """
        references = self._references(prompts, columns.get(COLUMN))
        stopped = columns.get("completion_stopped") or [True] * len(prompts)
        pairs = [
            Pair(prompt, as_text(completion), reference.text, has_stopped, reference.stopped)
            for prompt, completion, reference, has_stopped in zip(
                prompts, completions, references, stopped, strict=True
            )
        ]
        different = [index for index, pair in enumerate(pairs) if pair.first != pair.second]
        labels = judge_pairs(self.judge, [pairs[i] for i in different], self.constitution, memory=self.memory)
        probabilities: list[float | None] = [AS_GOOD] * len(pairs)
        for index, label in zip(different, labels, strict=True):
            # A label over some of the questions would change once the others are answered.
            probabilities[index] = None if label.errors else label.probability
        if "log_metric" in columns:
            self._log(columns["log_metric"], labels, probabilities)
        return [None if p is None else self.beta * math.log(max(p, self.floor)) for p in probabilities]

    def content(self) -> str:
        return judged_by(self.judge, self.constitution, [self.beta, self.floor])

    def _references(self, prompts: Sequence[Prompt], column: Sequence[Completion] | None) -> list[SampledText]:
        if column is not None:
            return [SampledText(as_text(completion)) for completion in column]
        references = []
        for prompt in prompts:
            reference = self.references.get(prompt_key(prompt))
            if reference is None:
                raise RuntimeError(
                    f"there is no reference completion of the prompt {str(prompt)[:80]!r}; add a column {COLUMN} to"
                    " the rows, or have them sampled (ppo.reference_completions.sample_references) before training"
                )
            references.append(reference)
        return references

    def _log(
        self,
        log_metric: Callable[[str, float], None],
        labels: Sequence[PairLabel],
        probabilities: Sequence[float | None],
    ) -> None:
        known = [p for p in probabilities if p is not None]
        if known:
            log_metric(f"score/{self.__name__}_probability", sum(known) / len(known))
        statistics = JudgeStatistics()
        for label in labels:
            statistics.add(label)
        consistency = statistics.as_dict()["position_consistency"]
        if consistency is not None:
            log_metric(f"score/{self.__name__}_consistency", consistency)


def judged_by(judge: Judge, constitution: Constitution, numbers: list[float]) -> str:
    """Return the content of a judge's reward; `numbers` are its other settings."""
    return f"judge, sha256 {digest([judge.identity, numbers])[:16]}, constitution {constitution.version[:16]}"
