"""Pairs: each once, never of equal texts, the same for the same seed and prompt."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onetrunk.feedback.preferences import all_pairs, best_worst_pair, distinct
from onetrunk.stages.prefs.arguments import check_pairing

texts = st.lists(st.sampled_from(["a", "b", " a ", "c", "", "  ", "d"]), max_size=7)
words = st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))


@given(texts, words)
def test_all_pairs_cover_each_pair_of_different_texts_once(completions, words):
    pairs = all_pairs(completions, words)
    found = [frozenset((completions[i].strip(), completions[j].strip())) for i, j in pairs]
    different = {text.strip() for text in completions if text.strip()}
    assert sorted(map(sorted, found)) == sorted(map(sorted, combinations(different, 2)))
    assert pairs == all_pairs(completions, words)


@given(texts, words, st.integers(1, 10))
def test_random_pairs_are_some_of_all_pairs_each_at_most_once(completions, words, count):
    pairs = all_pairs(completions, words, count)
    every = [frozenset(pair) for pair in all_pairs(completions, words)]
    assert len({frozenset(pair) for pair in pairs}) == len(pairs) == min(count, len(every))
    assert {frozenset(pair) for pair in pairs} <= set(every)
    assert pairs == all_pairs(completions, words, count)


def test_random_pairs_and_their_order_differ_between_seeds_and_prompts():
    completions = [f"text {i}" for i in range(10)]
    assert len({tuple(all_pairs(completions, (seed, 5), 3)) for seed in range(20)}) > 15
    # Either of two comes first about as often: 500 coins, 6 standard deviations
    first = sum(all_pairs(["a", "b"], (0, prompt)) == [(0, 1)] for prompt in range(500))
    assert 180 < first < 320


@given(texts, st.lists(st.none() | st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=7, max_size=7), words)
def test_best_and_worst_are_the_extremes_among_the_rated(completions, ratings, words):
    pairs = best_worst_pair(completions, ratings, words)
    rated = [ratings[i] for i in distinct(completions) if ratings[i] is not None]
    if len(set(rated)) < 2:
        assert pairs == []
        return
    (pair,) = pairs
    assert sorted(ratings[i] for i in pair) == [min(rated), max(rated)]
    assert completions[pair[0]].strip() != completions[pair[1]].strip()


def test_distinct_keeps_the_first_of_each_text_and_none_that_no_training_row_may_hold():
    assert distinct(["b", " a", "", "a ", "b", "c", "d\0"]) == [0, 1, 5]


@pytest.mark.parametrize(
    ("pairing", "num", "per_prompt", "message"),
    [
        ("some", 2, None, "all, best_worst, random"),
        ("all", 1, None, "set 2 or more"),
        ("best_worst", 1, None, "set 2 or more"),
        ("random", 4, None, "set pairs_per_prompt"),
        ("all", 4, 2, "only there"),
        ("random", 4, 0, "1 or more"),
    ],
)
def test_settings_without_a_pair_are_refused(pairing, num, per_prompt, message):
    with pytest.raises(ValueError, match=message):
        check_pairing(pairing, num, per_prompt)
