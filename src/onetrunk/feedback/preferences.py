"""From completions to preference rows: which are paired, what a judge says of them, what is written of that.

A row is TRL's `prompt, chosen, rejected` and ours: `chosen_stopped` and `rejected_stopped` (False for a completion
that was cut off at the length limit), `probability` that chosen is the better one, `margin` (its logit), `votes`
(JSON: what each principle said, for chosen) and `consistent`. A pair without an answer makes no row and is counted as
unjudged; so is a tie, unless it is wanted. Knows pairs, labels and counts; no model and no file.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from onetrunk.feedback.asking import Asker
from onetrunk.feedback.pairing import all_pairs, best_worst_pair, distinct, random_pairs
from onetrunk.feedback.sampler import PromptItem
from onetrunk.feedback.shards import prompt_words
from onetrunk.feedback.statistics import PreferenceFigures
from onetrunk.judges.base import Pair
from onetrunk.judges.verdicts import PairLabel
from onetrunk.row_faults import text_fault
from onetrunk.types import Prompt, SampledText

COLUMNS: dict[str, type] = {
    "prompt": list,
    "chosen": list,
    "rejected": list,
    "chosen_stopped": bool,
    "rejected_stopped": bool,
    "probability": float,
    "margin": float,
    "votes": str,
    "consistent": bool,
}
# A label of 1 says "all votes", not "for ever": its logit stays finite.
SUREST = 1 - 1e-4


@dataclass
class PreferenceMaker:
    """Makes rows of chunks of completions, and keeps count.

    Args:
        asker: has the judge.
        seed: of the pairs.
        pairing: one of `pairing.PAIRINGS`.
        pairs_per_prompt: with the pairing "random".
        keep_ties: write labels of exactly 0.5.
    """

    asker: Asker
    seed: int
    pairing: str = "all"
    pairs_per_prompt: int | None = None
    keep_ties: bool = False
    counts: Counter[str] = field(default_factory=Counter)
    figures: PreferenceFigures = field(default_factory=PreferenceFigures)

    def rows(self, items: Sequence[PromptItem], completions: Sequence[Sequence[SampledText]]) -> list[dict[str, Any]]:
        """Return the rows of a chunk, in the order of prompts and pairs.

        Args:
            items: prompts.
            completions: texts per prompt.

        Raises:
            RuntimeError: too many questions stay without an answer.
        """
        plans = self._plans(items, completions)
        pairs = [
            Pair(item.prompt, row[first].text, row[second].text, row[first].stopped, row[second].stopped)
            for item, row, plan in zip(items, completions, plans, strict=True)
            for first, second in plan
        ]
        rows = [self._row(pair, label) for pair, label in zip(pairs, self.asker.labels(pairs), strict=True)]
        written = [row for row in rows if row is not None]
        self.counts["pairs"] += len(pairs)
        self.counts["labelled"] += len(written)
        self.figures.add(written)
        return written

    def _plans(
        self, items: Sequence[PromptItem], completions: Sequence[Sequence[SampledText]]
    ) -> list[list[tuple[int, int]]]:
        """Return the pairs of every prompt, as indices of its completions."""
        unrated: set[int] = set()
        if self.pairing == "best_worst":
            rated = self.asker.ratings([item.prompt for item in items], completions)
            unrated = {i for i, (_, has_failed) in enumerate(rated) if has_failed}
        plans = []
        for i, (item, row) in enumerate(zip(items, completions, strict=True)):
            texts = [sampled.text for sampled in row]
            words = (self.seed, *prompt_words(item.key))
            if i in unrated:
                # A pair there will be, once the judge answers.
                plan = []
                self.counts["pairs"] += 1
                self.counts["unjudged"] += 1
            elif self.pairing == "best_worst":
                plan = best_worst_pair(texts, rated[i][0], words)
            elif self.pairing == "random":
                plan = random_pairs(texts, words, self.pairs_per_prompt)
            else:
                plan = all_pairs(texts, words)
            self._count(texts, has_pair=bool(plan) or i in unrated)
            plans.append(plan)
        return plans

    def _count(self, texts: Sequence[str], has_pair: bool) -> None:
        blank = sum(text_fault(text) is not None for text in texts)
        self.counts["completions"] += len(texts)
        self.counts["blank_completions"] += blank
        self.counts["repeated_completions"] += len(texts) - blank - len(distinct(texts))
        self.counts["prompts_without_pair"] += not has_pair

    def _row(self, pair: Pair, label: PairLabel) -> dict[str, Any] | None:
        """Return the row of a labelled pair; None, and a count, where there is none."""
        # A label over some of the questions would be another one once the rest is answered.
        reason = "unjudged" if label.errors else "abstained" if label.probability is None else None
        if reason is None and label.probability == 0.5:
            self.counts["ties"] += 1
            reason = None if self.keep_ties else "ties"
        elif reason is not None:
            self.counts[reason] += 1
        return preference_row(pair, label) if reason is None else None


def preference_row(pair: Pair, label: PairLabel) -> dict[str, Any]:
    """Return the row of a pair that has a label; of a tie the completion shown first is chosen."""
    first_is_chosen = label.probability >= 0.5
    probability = label.probability if first_is_chosen else 1 - label.probability
    ordered = pair if first_is_chosen else pair.flipped()
    return {
        "prompt": pair.prompt,
        "chosen": as_completion(pair.prompt, ordered.first),
        "rejected": as_completion(pair.prompt, ordered.second),
        "chosen_stopped": ordered.first_stopped,
        "rejected_stopped": ordered.second_stopped,
        "probability": probability,
        "margin": logit(probability),
        "votes": json.dumps(votes_for(label, first_is_chosen), ensure_ascii=False),
        "consistent": label.consistent,
    }


def as_completion(prompt: Prompt, text: str) -> str | list[dict[str, str]]:
    """Return a completion in the form of its prompt: text, or one message of the assistant."""
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]


def logit(probability: float) -> float:
    """Return log(p / (1 - p)) for p in [0.5, 1], at most 9.2."""
    p = min(probability, SUREST)
    return math.log(p / (1 - p))


def votes_for(label: PairLabel, first: bool) -> list[dict[str, Any]]:
    """Return what each principle said in either order: the probability of the chosen completion; None: it abstained.

    Args:
        label: says it of the completion that is `first` in the pair.
        first: that one was chosen.
    """
    return [
        {"principle": principle, "probabilities": [p if p is None or first else 1 - p for p in probabilities]}
        for principle, probabilities in label.votes
    ]
