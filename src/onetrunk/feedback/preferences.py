"""Completions become preference rows: which are paired, what the judge's labels make of the pairs, and statistics.

README.md lists the columns of a row. Pairs without an answer make no row and are counted as unjudged; ties make one
only with `keep_ties`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import numpy as np

from onetrunk.data.groups import Group
from onetrunk.data.rows import text_fault
from onetrunk.feedback.asking import Asker
from onetrunk.feedback.sampling import PromptItem
from onetrunk.feedback.shards import prompt_words
from onetrunk.judges.judge import Pair
from onetrunk.judges.labels import JudgeStatistics, PairLabel
from onetrunk.types import SampledText, as_completion
from onetrunk.types import as_text as plain
from onetrunk.utils.randomness import PAIRING_STREAM, generator_of

COLUMNS: dict[str, type] = {
    "prompt": list,
    "chosen": list,
    "rejected": list,
    "chosen_stopped": bool,
    "rejected_stopped": bool,
    "probability": float,
    "votes": str,
    "consistent": bool,
}
RATED_COLUMNS: dict[str, type] = {"prompt": list, "completion": list, "completion_stopped": bool, "rating": float}
# By the kind of rows. `margin` is no column: TRL's RewardTrainer would use it unasked.
COLUMNS_OF = {
    "pairs": COLUMNS,
    "unpaired": RATED_COLUMNS | {"label": bool},
    "best": RATED_COLUMNS,
    "worst": RATED_COLUMNS,
}
COUNTS = (
    "prompts",
    "repeated_prompts",
    "completions",
    "repeated_completions",
    "blank_completions",  # Includes texts with a NUL character, which no training row may hold.
    "prompts_without_pair",
    "pairs",
    "labelled",
    "ties",
    "abstained",
    "unjudged",
)
# Bins of the histogram of labels, from 0.5 to 1.
BINS = 10
# Stands for a principle in the votes of a label that people had a part in.
PEOPLE = "people"


@dataclass
class PreferenceMaker:
    """Makes rows from chunks of completions, and counts what happens to them.

    Args:
        asker: asks the judge.
        seed: of the pairs.
        pairing: one of PAIRINGS.
        pairs_per_prompt: with the pairing "random".
        keep_ties: write labels that are ties.
        tie_margin: labels at most this far from 1/2 are ties.
        output_rows: one of OUTPUT_ROWS.
        people_weight: share of the people's label in a label, where a group has one; 1: the judge is not asked there.
    """

    asker: Asker
    seed: int
    pairing: str = "all"
    pairs_per_prompt: int | None = None
    keep_ties: bool = False
    counts: Counter[str] = field(default_factory=Counter)
    statistics: PreferenceStatistics = field(default_factory=lambda: PreferenceStatistics())
    tie_margin: float = 0.0
    output_rows: str = "pairs"
    people_weight: float = 0.0
    sources: SourceStatistics = field(default_factory=lambda: SourceStatistics())

    def rows(
        self,
        items: Sequence[PromptItem],
        completions: Sequence[Sequence[SampledText]],
        groups: Sequence[Group | None] | None = None,
    ) -> list[dict[str, Any]]:
        """Return the rows of a chunk, in the order of prompts and pairs.

        Args:
            items, completions: the prompts, and the completions of each.
            groups: of completions that were given, with their authors and what people say of them.

        Raises:
            RuntimeError: too many questions have no answer.
        """
        groups = groups or [None] * len(items)
        ratings: list[tuple[list[float | None], bool]] = [([], False)] * len(items)
        if self.pairing == "best_worst":
            references = [None if group is None else group.reference for group in groups]
            ratings = self.asker.ratings([item.prompt for item in items], completions, references)
        asked = [
            _Asked(number, first, second, _pair(item, row, first, second, group), _of_people(group, first, second))
            for number, (item, row, rated, group) in enumerate(zip(items, completions, ratings, groups, strict=True))
            for first, second in self._pairs(item, [sampled.text for sampled in row], *rated)
        ]
        if self.output_rows in ("best", "worst") and self.pairing == "best_worst":
            # The ratings decide; nobody needs to compare.
            asked = []
        labels = self._labels(asked)
        for question, label in zip(asked, labels, strict=True):
            self.sources.add(groups[question.number], question, label)
        if self.output_rows == "pairs":
            # A label over some of the questions would change once the others are answered.
            decided = [(q.pair, label) for q, label in zip(asked, labels, strict=True) if self._counts(label)]
            rows = [_row(pair, label) for pair, label in decided if self.keep_ties or not self._is_tie(label)]
        else:
            rows = self._rated_rows(items, completions, ratings, asked, labels)
        self.counts["pairs"] += len(asked)
        self.counts["labelled"] += len(rows)
        self.statistics.add(rows)
        return rows

    def _labels(self, asked: Sequence[_Asked]) -> list[PairLabel]:
        """Return the labels of pairs: the judge's, the people's, or both by weight."""
        alone = self.people_weight == 1
        to_judge = [question for question in asked if not (alone and question.people is not None)]
        judged = iter(self.asker.labels([question.pair for question in to_judge]))
        labels = []
        for question in asked:
            if question.people is None:
                labels.append(next(judged))
            elif alone:
                labels.append(PairLabel(question.people, True, ((PEOPLE, (question.people,)),)))
            else:
                labels.append(_mixed(next(judged), question.people, self.people_weight))
        return labels

    def _rated_rows(
        self,
        items: Sequence[PromptItem],
        completions: Sequence[Sequence[SampledText]],
        ratings: Sequence[tuple[list[float | None], bool]],
        asked: Sequence[_Asked],
        labels: Sequence[PairLabel],
    ) -> list[dict[str, Any]]:
        """Return rows of single completions, each with its rating: the judge's, or the mean of its pairs' labels."""
        by_prompt: list[list[tuple[_Asked, PairLabel]]] = [[] for _ in items]
        for question, label in zip(asked, labels, strict=True):
            by_prompt[question.number].append((question, label))
        rows = []
        for item, texts, (given, is_unrated), pairs in zip(items, completions, ratings, by_prompt, strict=True):
            if is_unrated:
                continue  # Counted with the pairs.
            decided = [(question, label) for question, label in pairs if self._counts(label)]
            if len(decided) < len(pairs) and any(label.errors for _, label in pairs):
                continue  # A rating of some of the pairs would change once the others are answered.
            if self.output_rows != "unpaired" and given:
                usable = distinct([sampled.text for sampled in texts])
                rated = {index: given[index] for index in usable if given[index] is not None}
            else:
                rated = _mean_ratings(decided)
            rows += self._chosen(item, texts, rated)
        return rows

    def _counts(self, label: PairLabel) -> bool:
        """Return whether a pair has a label; count it."""
        if label.errors or label.probability is None:
            self.counts["unjudged" if label.errors else "abstained"] += 1
            return False
        self.counts["ties"] += self._is_tie(label)
        return True

    def _is_tie(self, label: PairLabel) -> bool:
        return abs(label.probability - 0.5) <= self.tie_margin

    def _chosen(self, item: PromptItem, texts: Sequence[SampledText], rated: dict[int, float]) -> list[dict[str, Any]]:
        """Return the rows of one prompt: the best, the worst, or each that is better or worse than a tie."""
        if not rated:
            return []
        if self.output_rows == "unpaired":
            clear = {i: rating for i, rating in rated.items() if abs(rating - 0.5) > self.tie_margin}
            return [_rated_row(item, texts[i], rating) | {"label": rating > 0.5} for i, rating in clear.items()]
        if len(set(rated.values())) == 1 and len(rated) > 1 and not self.keep_ties:
            self.counts["ties"] += 1
            return []
        pick = max if self.output_rows == "best" else min
        index = pick(rated, key=lambda i: rated[i])
        return [_rated_row(item, texts[index], rated[index])]

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


@dataclass(frozen=True)
class _Asked:
    """A pair of completions of a prompt of a chunk: their indices, and the people's probability of the first."""

    number: int
    first: int
    second: int
    pair: Pair
    people: float | None


def _pair(item: PromptItem, row: Sequence[SampledText], first: int, second: int, group: Group | None) -> Pair:
    one, other = row[first], row[second]
    reference = None if group is None else group.reference
    return Pair(item.prompt, one.text, other.text, one.stopped, other.stopped, reference)


def _of_people(group: Group | None, first: int, second: int) -> float | None:
    """Return the people's probability that the first is better; None if they say nothing about these two."""
    if group is None or (first < group.num_better) == (second < group.num_better):
        return None
    return group.probability if first < group.num_better else 1 - group.probability


def _mixed(label: PairLabel, people: float, weight: float) -> PairLabel:
    """Return the mean of a judge's label and the people's; the people's alone if the judge abstains."""
    if label.errors or weight == 0:
        return label
    mean = people if label.probability is None else weight * people + (1 - weight) * label.probability
    return replace(label, probability=mean, votes=(*label.votes, (PEOPLE, (people,))))


def _mean_ratings(decided: Sequence[tuple[_Asked, PairLabel]]) -> dict[int, float]:
    """Return the mean probability of each completion of being better, over its pairs."""
    won: dict[int, list[float]] = {}
    for question, label in decided:
        won.setdefault(question.first, []).append(label.probability)
        won.setdefault(question.second, []).append(1 - label.probability)
    return {index: sum(won[index]) / len(won[index]) for index in sorted(won)}


def _rated_row(item: PromptItem, sampled: SampledText, rating: float) -> dict[str, Any]:
    return {
        "prompt": item.prompt,
        "completion": as_completion(item.prompt, sampled.text),
        "completion_stopped": sampled.stopped,
        "rating": rating,
    }


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
        completions: of one prompt.
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
        completions: of one prompt.
        ratings: a number per completion; None leaves the completion out. Of equal ratings the first counts.
        words: as in `all_pairs`.
    """
    rated = [i for i in distinct(completions) if ratings[i] is not None]
    if not rated:
        return []
    best, worst = max(rated, key=lambda i: ratings[i]), min(rated, key=lambda i: ratings[i])
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


class SourceStatistics:
    """Sums over the pairs of given completions: by who wrote them, and by the part of the dataset."""

    def __init__(self) -> None:
        self.authors: dict[str, dict[str, float]] = {}
        self.subsets: dict[str, dict[str, float]] = {}

    def add(self, group: Group | None, asked: _Asked, label: PairLabel) -> None:
        """Add a pair with its label; nothing for sampled completions, or without a label."""
        if group is None or label.errors or label.probability is None:
            return
        for index, probability in ((asked.first, label.probability), (asked.second, 1 - label.probability)):
            if group.author(index):
                won = 0.5 if probability == 0.5 else float(probability > 0.5)
                _sum_up(self.authors, group.author(index), pairs=1, won=won, probability=probability)
        agrees = {}
        if asked.people is not None and asked.people != 0.5:
            same = (label.probability - 0.5) * (asked.people - 0.5)
            agrees = {"labelled_by_people": 1, "agrees": 0.5 if same == 0 else float(same > 0)}
        _sum_up(self.subsets, group.subset, pairs=1, **agrees)

    def merge(self, sums: dict[str, dict[str, dict[str, float]]]) -> None:
        """Add the sums of a shard."""
        for name, ours in vars(self).items():
            for key, values in sums.get(name, {}).items():
                _sum_up(ours, key, **values)

    def as_dict(self) -> dict[str, Any]:
        """Return pairs, share won and mean probability by author; pairs and agreement with people by subset."""
        authors = {
            name: {
                "pairs": int(sums["pairs"]),
                "won_fraction": _share(sums["won"], sums["pairs"]),
                "mean_probability": _share(sums["probability"], sums["pairs"]),
            }
            for name, sums in sorted(self.authors.items())
        }
        subsets = {}
        for name, sums in sorted(self.subsets.items()):
            subsets[name] = {"pairs": int(sums["pairs"])}
            if sums.get("labelled_by_people"):
                subsets[name]["agrees_with_people"] = _share(sums["agrees"], sums["labelled_by_people"])
        return {"authors": authors, "subsets": subsets}


def _sum_up(table: dict[str, dict[str, float]], key: str, **values: float) -> None:
    row = table.setdefault(key, {})
    for name, value in values.items():
        row[name] = row.get(name, 0) + value


def _share(part: float, whole: float) -> float | None:
    return round(part / whole, 6) if whole else None


class RatedStatistics:
    """Sums over rows of single completions. Lengths are in characters."""

    def __init__(self) -> None:
        self.sums: Counter[str] = Counter()

    def add(self, rows: Iterable[dict[str, Any]]) -> None:
        """Add rows."""
        for row in rows:
            values = {"rows": 1, "rating": row["rating"], "characters": len(plain(row["completion"]))}
            self.sums.update(values | {"labels": "label" in row, "true": bool(row.get("label"))})

    def as_dict(self) -> dict[str, Any]:
        """Return the statistics; None for a mean of nothing."""
        sums = self.sums
        return {
            "rows": sums["rows"],
            "mean_rating": _share(sums["rating"], sums["rows"]),
            "mean_characters": _share(sums["characters"], sums["rows"]),
            "label_true_fraction": _share(sums["true"], sums["labels"]),
        }


class PreferenceStatistics:
    """Sums over preference rows. Lengths are in characters."""

    def __init__(self) -> None:
        self.histogram = [0] * BINS
        self.sums: Counter[str] = Counter()

    def add(self, rows: Iterable[dict[str, Any]]) -> None:
        """Add rows."""
        for row in rows:
            chosen, rejected = len(plain(row["chosen"])), len(plain(row["rejected"]))
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
                "longer_is_chosen_fraction": _share(sums["longer"], sums["of_unequal_length"]),
            },
        }


def counts_of(counter: Counter[str]) -> dict[str, int]:
    """Return all counts in a fixed order, including those that are 0."""
    return {name: counter[name] for name in COUNTS}


def merged_judge_statistics(shards: Iterable[dict[str, float]]) -> dict[str, Any]:
    """Return the statistics of a judge from the sums (`vars(JudgeStatistics)`) of one or several shards."""
    total = JudgeStatistics()
    for sums in shards:
        for name, value in sums.items():
            setattr(total, name, getattr(total, name) + value)
    # Sums of floats differ in their last digits with the order of the shards.
    return {name: round(v, 6) if isinstance(v, float) else v for name, v in total.as_dict().items()}
