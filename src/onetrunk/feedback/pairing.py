"""Which two completions of a prompt are compared: all pairs, the best with the worst, or some at random.

Completions that say the same are one completion here, and those that `reward` would reject as training rows (blank
ones, or with a NUL character) are none: no pair ever holds two equal texts.
What is random is derived from (seed, prompt), so that a prompt's pairs depend on no other prompt. Knows texts and
numbers; no judge.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from onetrunk.randomness import PAIRING_STREAM, generator_of
from onetrunk.row_faults import text_fault

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
