"""How probably a completion beats another one of the same prompt, as a reward: r = beta * log P(y > y_ref).

y_ref is sampled once per prompt from the model that training starts from, and stays: a column of the rows, or what
`references` holds. The reward is at most 0; beta * log 1/2 is that of a completion as good as y_ref. Knows judges,
prompts and texts; samples nothing. In YAML: `reward_funcs: [pairwise]` beside `judge` and `constitution`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from onetrunk.judges.base import Judge, Pair, digest
from onetrunk.judges.constitution import Constitution
from onetrunk.judges.verdicts import JudgeStatistics, Memory, PairLabel, kept_labels, kept_ratings
from onetrunk.rewards.base import Completion
from onetrunk.types import Prompt, SampledText


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


COLUMN = "reference_completion"
AS_GOOD = 0.5


class PairwiseReward:
    """beta * log P(y > y_ref), where a judge that is asked in both orders says P.

    Rows of which the judge abstains, or to which it gives no answer, have no reward (None) and are left out of the
    update. A completion equal to y_ref is as good as y_ref; nobody is asked.

    Args:
        judge: any; a reward model as a judge makes P = sigmoid(score - score of y_ref).
        constitution: its principles.
        beta: above 0; what PPO's own `beta` is measured against.
        floor: least P that counts, in (0, 1/2): log 0 would be no number, and a judge of plain checks is that sure.
        references: y_ref, and whether it stopped by itself, by `prompt_key(prompt)`, for rows without the column
            `reference_completion`.
        memory: of the judge's answers; None: every question is asked.
        name: for metrics.

    Raises:
        ValueError: a setting out of range.
    """

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
        self.judge = judge
        self.constitution = constitution
        self.beta = beta
        self.floor = floor
        self.references = {} if references is None else references
        self.memory = memory
        self.__name__ = name

    def __call__(
        self,
        prompts: list[Prompt],
        completions: list[Completion],
        completion_ids: list[list[int]] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        """Return n rewards.

        Raises:
            RuntimeError: a prompt without y_ref.
        """
        references = self._references(prompts, columns.get(COLUMN))
        stopped = columns.get("completion_stopped") or [True] * len(prompts)
        pairs = [
            Pair(prompt, as_text(completion), reference.text, has_stopped, reference.stopped)
            for prompt, completion, reference, has_stopped in zip(
                prompts, completions, references, stopped, strict=True
            )
        ]
        asked = [index for index, pair in enumerate(pairs) if pair.first != pair.second]
        labels = kept_labels(self.judge, [pairs[i] for i in asked], self.constitution, self.memory) if asked else []
        probabilities: list[float | None] = [AS_GOOD] * len(pairs)
        for index, label in zip(asked, labels, strict=True):
            probabilities[index] = _decided(label)
        if "log_metric" in columns:
            self._log(columns["log_metric"], labels, probabilities)
        return [None if p is None else self.beta * math.log(max(p, self.floor)) for p in probabilities]

    def _references(self, prompts: Sequence[Prompt], column: Sequence[Completion] | None) -> list[SampledText]:
        if column is not None:
            return [SampledText(as_text(completion)) for completion in column]
        found = [self.references.get(prompt_key(prompt)) for prompt in prompts]
        missing = next((prompt for prompt, text in zip(prompts, found, strict=True) if text is None), None)
        if missing is not None:
            raise RuntimeError(
                f"there is no reference completion of the prompt {str(missing)[:80]!r}; add a column {COLUMN} to the"
                " rows, or have them sampled (ppo.reference_completions) before training"
            )
        return found

    def _log(self, log_metric: Any, labels: Sequence[PairLabel], probabilities: Sequence[float | None]) -> None:
        known = [p for p in probabilities if p is not None]
        if known:
            log_metric(f"score/{self.__name__}_probability", sum(known) / len(known))
        statistics = JudgeStatistics()
        for label in labels:
            statistics.add(label)
        consistency = statistics.as_dict()["position_consistency"]
        if consistency is not None:
            log_metric(f"score/{self.__name__}_consistency", consistency)


def prompt_key(prompt: Prompt) -> str:
    """Return the sha256 of a prompt's content."""
    return digest({"prompt": prompt})


def _decided(label: PairLabel) -> float | None:
    # A label over a part of the questions would be another one once the rest is answered.
    return None if label.errors else label.probability
