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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np

from onetrunk.data.rows import text_fault
from onetrunk.feedback.asking import Asker
from onetrunk.feedback.sampling import PromptItem
from onetrunk.feedback.shards import prompt_words
from onetrunk.judges.base import Pair
from onetrunk.judges.verdicts import JudgeStatistics, PairLabel
from onetrunk.types import Message, Prompt, SampledText
from onetrunk.utils.randomness import PAIRING_STREAM, generator_of

PAIRINGS = ("all", "best_worst", "random")


def check_pairing(pairing: str, num_completions: int, pairs_per_prompt: int | None) -> None:
    """Refuse settings under which no prompt could have a pair, or that contradict each other.

    Raises:
        ValueError: says which, and what to set.
    """
    if pairing not in PAIRINGS:
        raise ValueError(f"pairing is {pairing!r}; set one of {', '.join(PAIRINGS)}")
    if num_completions < 2:
        raise ValueError(f"num_completions is {num_completions}; a pair needs two completions: set 2 or more")
    if (pairs_per_prompt is not None) != (pairing == "random"):
        raise ValueError(
            f"pairing is {pairing!r} and pairs_per_prompt is {pairs_per_prompt}; set pairs_per_prompt with the pairing"
            " 'random', and only there"
        )
    if pairs_per_prompt is not None and pairs_per_prompt < 1:
        raise ValueError(f"pairs_per_prompt is {pairs_per_prompt}; set it to 1 or more")


def distinct(completions: Sequence[str]) -> list[int]:
    """Return the indices of the completions that count: the first of each text, white space at the ends aside."""
    first: dict[str, int] = {}
    for index, text in enumerate(completions):
        if text_fault(text) is None:
            first.setdefault(text.strip(), index)
    return list(first.values())


def all_pairs(completions: Sequence[str], words: Sequence[int]) -> list[tuple[int, int]]:
    """Return every pair of distinct completions once.

    Args:
        completions: of one prompt.
        words: non-negative integers below 2**32, the seed and the prompt's; they decide which of two comes first.

    Returns:
        Pairs of indices in `completions`, (shown first, shown second).
    """
    return _turned(list(combinations(distinct(completions), 2)), _draws(words))


def random_pairs(completions: Sequence[str], words: Sequence[int], count: int) -> list[tuple[int, int]]:
    """Return `count` different pairs of distinct completions, or all of them where there are fewer.

    Arguments as of `all_pairs`.
    """
    pairs, draws = list(combinations(distinct(completions), 2)), _draws(words)
    chosen = np.sort(draws.permutation(len(pairs))[:count])
    return _turned([pairs[i] for i in chosen], draws)


def best_worst_pair(
    completions: Sequence[str], ratings: Sequence[float | None], words: Sequence[int]
) -> list[tuple[int, int]]:
    """Return the highest and the lowest rated completion as one pair; none where no two ratings differ.

    Args:
        completions: of one prompt.
        ratings: a number per completion; None leaves the completion out. Of equal ratings the first counts.
        words: as of `all_pairs`.
    """
    rated = [i for i in distinct(completions) if ratings[i] is not None]
    if not rated:
        return []
    best, worst = max(rated, key=lambda i: ratings[i]), min(rated, key=lambda i: ratings[i])
    return [] if ratings[best] == ratings[worst] else _turned([(best, worst)], _draws(words))


def _draws(words: Sequence[int]) -> np.random.Generator:
    return generator_of((*words, 0, PAIRING_STREAM))


def _turned(pairs: list[tuple[int, int]], draws: np.random.Generator) -> list[tuple[int, int]]:
    # Where a judge is asked in one order only, its preference for a place must not become one for an index.
    return [pair if draws.random() < 0.5 else pair[::-1] for pair in pairs]


BINS = 10
COUNTS = (
    "prompts",
    "repeated_prompts",
    "completions",
    "repeated_completions",
    "blank_completions",  # Or with a NUL character: what no training row may hold.
    "prompts_without_pair",
    "pairs",
    "labelled",
    "ties",
    "abstained",
    "unjudged",
)


class PreferenceFigures:
    """Figures of preference rows, one row after the other. Lengths are in characters."""

    def __init__(self) -> None:
        self.num_rows = 0
        self.histogram = [0] * BINS
        self.sums: Counter[str] = Counter()

    def add(self, rows: Iterable[dict[str, Any]]) -> None:
        """Count rows in."""
        for row in rows:
            chosen, rejected = len(plain(row["chosen"])), len(plain(row["rejected"]))
            self.num_rows += 1
            # Bins of 0.05 from 0.5 to 1, the last one closed.
            self.histogram[min(BINS - 1, int((row["probability"] - 0.5) * 2 * BINS + 1e-9))] += 1
            self.sums["probability"] += row["probability"]
            self.sums["consistent"] += bool(row["consistent"])
            self.sums["chosen"] += chosen
            self.sums["rejected"] += rejected
            self.sums["longer"] += chosen > rejected
            self.sums["of_unequal_length"] += chosen != rejected

    def as_dict(self) -> dict[str, Any]:
        """Return the figures; None where there is nothing to take a mean of."""
        edges = [round(0.5 + i / (2 * BINS), 2) for i in range(BINS + 1)]
        return {
            "rows": self.num_rows,
            "mean_probability": _ratio(self.sums["probability"], self.num_rows),
            "consistent_fraction": _ratio(self.sums["consistent"], self.num_rows),
            "label_histogram": {
                f"{low:.2f}-{high:.2f}": n for low, high, n in zip(edges[:-1], edges[1:], self.histogram, strict=True)
            },
            "length": {
                "mean_chosen_characters": _ratio(self.sums["chosen"], self.num_rows),
                "mean_rejected_characters": _ratio(self.sums["rejected"], self.num_rows),
                "longer_is_chosen_fraction": _ratio(self.sums["longer"], self.sums["of_unequal_length"]),
            },
        }


def counts_of(counter: Counter[str]) -> dict[str, int]:
    """Return all counts under their names, 0 included, in one order."""
    return {name: counter[name] for name in COUNTS}


def judge_sums(statistics: JudgeStatistics) -> dict[str, float]:
    """Return what the figures of a judge are made of: sums, which those of other shards can be added to."""
    return dict(vars(statistics))


def judge_figures(sums: Iterable[dict[str, float]]) -> dict[str, Any]:
    """Return the figures of a judge from the sums of one or several shards."""
    total: Counter[str] = Counter()
    for part in sums:
        total.update(part)
    statistics = JudgeStatistics()
    for name in vars(statistics):
        setattr(statistics, name, total[name])
    # Sums of floats differ in their last digits with the order of the shards.
    return {name: round(v, 6) if isinstance(v, float) else v for name, v in statistics.as_dict().items()}


def plain(text: str | list[Message]) -> str:
    """Return a completion as text."""
    return text if isinstance(text, str) else "\n".join(message["content"] for message in text)


def _ratio(total: float, count: int) -> float | None:
    return round(total / count, 6) if count else None


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
