"""Completions become preference rows: which are paired, what the judge's labels make of the pairs, and statistics.

README.md lists the columns of a row. Pairs without an answer make no row and are counted as unjudged; ties make one
only with `keep_ties`.
"""

from __future__ import annotations

import json
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
from onetrunk.judges.judge import Pair
from onetrunk.judges.labels import JudgeStatistics, PairLabel
from onetrunk.types import SampledText, as_completion, as_text
from onetrunk.utils.randomness import PAIRING_STREAM, generator_of

COUNTS = (
    "prompts",
    "repeated_prompts",
    "completions",
    "repeated_completions",
    "blank_completions",  # Includes texts with a NUL character, which no training row may hold.
    "cut_revisions",
    "prompts_without_pair",
    "pairs",
    "labelled",
    "ties",
    "abstained",
    "unjudged",
)
# Bins of the histogram of labels, from 0.5 to 1.
BINS = 10


@dataclass
class PreferenceMaker:
    """Makes rows from chunks of completions, and counts what happens to them.

    Args:
        seed: decides which pairs are drawn, and which completion of a pair is shown first.
        pairing: "all" pairs, the "best_worst" pair by the judge's ratings, or pairs_per_prompt "random" ones.
        pairs_per_prompt: only with the pairing "random".
        keep_ties: write labels that are ties.
        tie_margin: labels at most this far from 1/2 are ties.
    """

    asker: Asker
    seed: int
    pairing: str = "all"
    pairs_per_prompt: int | None = None
    keep_ties: bool = False
    tie_margin: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    statistics: PreferenceStatistics = field(default_factory=lambda: PreferenceStatistics())

    def rows(
        self,
        items: Sequence[PromptItem],
        completions: Sequence[Sequence[SampledText]],
        references: Sequence[str | None] | None = None,
    ) -> list[dict[str, Any]]:
        """Return the rows of a chunk, in the order of prompts and pairs.

        Args:
            items, completions: the prompts, and the completions of each.
            references: per prompt an answer that is known to be good, if any.
        """
        references = references or [None] * len(items)
        ratings: list[tuple[list[float | None], bool]] = [([], False)] * len(items)
        if self.pairing == "best_worst":
            ratings = self.asker.ratings([item.prompt for item in items], completions, references)
        pairs = [
            _pair(item, row[first], row[second], reference)
            for item, row, rated, reference in zip(items, completions, ratings, references, strict=True)
            for first, second in self._pairs(item, [sampled.text for sampled in row], *rated)
        ]
        labels = self.asker.labels(pairs)
        decided = [(pair, label) for pair, label in zip(pairs, labels, strict=True) if self._has_label(label)]
        rows = [_row(pair, label) for pair, label in decided if self.keep_ties or not self._is_tie(label)]
        self.counts["pairs"] += len(pairs)
        self.counts["labelled"] += len(rows)
        self.statistics.add(rows)
        return rows

    def _has_label(self, label: PairLabel) -> bool:
        """Return whether a pair has a label; count it."""
        if label.probability is None:
            self.counts["unjudged" if label.errors else "abstained"] += 1
            return False
        self.counts["ties"] += self._is_tie(label)
        return True

    def _is_tie(self, label: PairLabel) -> bool:
        return abs(label.probability - 0.5) <= self.tie_margin

    def _pairs(
        self, item: PromptItem, texts: Sequence[str], ratings: Sequence[float | None], is_unrated: bool
    ) -> list[tuple[int, int]]:
        """Return the pairs of one prompt, as indices of its completions, and count the completions."""
        blank = sum(text_fault(text) is not None for text in texts)
        self.counts["completions"] += len(texts)
        self.counts["blank_completions"] += blank
        self.counts["repeated_completions"] += len(texts) - blank - len(distinct(texts))
        if is_unrated:
            # There will be a pair once the judge answers.
            self.counts["pairs"] += 1
            self.counts["unjudged"] += 1
            return []
        words = (self.seed, *prompt_words(item.key))
        if self.pairing == "best_worst":
            pairs = best_worst_pair(texts, ratings, words)
        else:
            pairs = all_pairs(texts, words, self.pairs_per_prompt)
        self.counts["prompts_without_pair"] += not pairs
        return pairs


def _pair(item: PromptItem, first: SampledText, second: SampledText, reference: str | None) -> Pair:
    return Pair(item.prompt, first.text, second.text, first.stopped, second.stopped, reference)


def _row(pair: Pair, label: PairLabel) -> dict[str, Any]:
    """Return the row of a pair with a label; of a tie the completion shown first is chosen."""
    first_is_chosen = label.probability >= 0.5
    probability = label.probability if first_is_chosen else 1 - label.probability
    ordered = pair if first_is_chosen else pair.flipped()
    votes = [
        {"principle": principle, "probabilities": [p if p is None or first_is_chosen else 1 - p for p in both_orders]}
        for principle, both_orders in label.votes
    ]
    return {
        "prompt": pair.prompt,
        "chosen": as_completion(pair.prompt, ordered.first),
        "rejected": as_completion(pair.prompt, ordered.second),
        "chosen_stopped": ordered.first_stopped,
        "rejected_stopped": ordered.second_stopped,
        "probability": probability,
        "votes": json.dumps(votes, ensure_ascii=False),
        "consistent": label.consistent,
    }


def all_pairs(completions: Sequence[str], words: Sequence[int], count: int | None = None) -> list[tuple[int, int]]:
    """Return every pair of distinct completions once, or a random `count` of them.

    Args:
        words: the seed and the prompt's words, each in [0, 2**32); they decide which of two comes first.

    Returns:
        Pairs of indices in `completions`, (shown first, shown second).
    """
    pairs, generator = list(combinations(distinct(completions), 2)), _generator(words)
    if count is not None:
        pairs = [pairs[i] for i in np.sort(generator.permutation(len(pairs))[:count])]
    return _ordered(pairs, generator)


def best_worst_pair(
    completions: Sequence[str], ratings: Sequence[float | None], words: Sequence[int]
) -> list[tuple[int, int]]:
    """Return the highest and the lowest rated completion as the only pair; no pair if all ratings are equal.

    Args:
        ratings: a number per completion; None leaves the completion out. Of equal ratings the first counts.
        words: as in `all_pairs`.
    """
    indices = [i for i in distinct(completions) if ratings[i] is not None]
    if not indices:
        return []
    best, worst = max(indices, key=lambda i: ratings[i]), min(indices, key=lambda i: ratings[i])
    return [] if ratings[best] == ratings[worst] else _ordered([(best, worst)], _generator(words))


def distinct(completions: Sequence[str]) -> list[int]:
    """Return the indices of the valid completions, the first of each text; white space at the ends is ignored."""
    first: dict[str, int] = {}
    for index, text in enumerate(completions):
        if text_fault(text) is None:
            first.setdefault(text.strip(), index)
    return list(first.values())


def _generator(words: Sequence[int]) -> np.random.Generator:
    return generator_of((*words, 0, PAIRING_STREAM))


def _ordered(pairs: list[tuple[int, int]], generator: np.random.Generator) -> list[tuple[int, int]]:
    # With one order per pair, a judge's preference for a position must not become one for an index.
    return [pair if generator.random() < 0.5 else pair[::-1] for pair in pairs]


def _share(part: float, whole: float) -> float | None:
    return round(part / whole, 6) if whole else None


class PreferenceStatistics:
    """Sums over preference rows. Lengths are in characters."""

    def __init__(self) -> None:
        self.histogram = [0] * BINS
        self.sums: Counter[str] = Counter()

    def add(self, rows: Iterable[dict[str, Any]]) -> None:
        """Add rows."""
        for row in rows:
            chosen, rejected = len(as_text(row["chosen"])), len(as_text(row["rejected"]))
            # Bins of 0.05, the last one closed.
            self.histogram[min(BINS - 1, int((row["probability"] - 0.5) * 2 * BINS + 1e-9))] += 1
            self.sums.update(
                rows=1,
                probability=row["probability"],
                consistent=bool(row["consistent"]),
                chosen=chosen,
                rejected=rejected,
                longer=chosen > rejected,
                of_unequal_length=chosen != rejected,
            )

    def as_dict(self) -> dict[str, Any]:
        """Return the statistics; None for a mean of nothing."""
        lows = [0.5 + i / (2 * BINS) for i in range(BINS)]
        bins = [f"{low:.2f}-{low + 0.5 / BINS:.2f}" for low in lows]
        sums, num_rows = self.sums, self.sums["rows"]
        return {
            "rows": num_rows,
            "mean_probability": _share(sums["probability"], num_rows),
            "consistent_fraction": _share(sums["consistent"], num_rows),
            "label_histogram": dict(zip(bins, self.histogram, strict=True)),
            "length": {
                "mean_chosen_characters": _share(sums["chosen"], num_rows),
                "mean_rejected_characters": _share(sums["rejected"], num_rows),
                "of_unequal_length": sums["of_unequal_length"],
                "longer_is_chosen_fraction": _share(sums["longer"], sums["of_unequal_length"]),
            },
        }


def counts_of(counter: Counter[str]) -> dict[str, int]:
    """Return all counts in a fixed order, including those that are 0."""
    return {name: counter[name] for name in COUNTS}


def merged_judge_statistics(shards: Iterable[dict[str, float]]) -> dict[str, Any]:
    """Return the statistics of a judge from the sums (`JudgeStatistics.sums`) of one or several shards."""
    total = JudgeStatistics()
    for sums in shards:
        total.sums.update(sums)
    # Sums of floats differ in their last digits with the order of the shards.
    return {name: round(v, 6) if isinstance(v, float) else v for name, v in total.as_dict().items()}
