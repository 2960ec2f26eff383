"""Repeated n-grams against a loop over windows, and by hand."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onetrunk.ppo.monitoring.metrics import repeated_ngrams


def looped(rows, n):
    """Return the same two counts of every row, window by window."""
    repeated, totals = [], []
    for ids in rows:
        windows = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
        repeated.append(sum(window in windows[:i] for i, window in enumerate(windows)))
        totals.append(len(windows))
    return repeated, totals


def padded(rows, fill):
    width = max(map(len, rows))
    return torch.tensor([row + [fill] * (width - len(row)) for row in rows])


def test_by_hand():
    # 5 6 5 6 5 6 has the windows 5656, 6565, 5656: one of three occurred before.
    rows = [[5, 6, 5, 6, 5, 6], [1, 2, 3, 4, 5], [7, 7, 7], [9] * 6]
    repeated, totals = repeated_ngrams(padded(rows, 0), torch.tensor([len(r) for r in rows]))
    assert repeated.tolist() == [1, 0, 0, 2]
    assert totals.tolist() == [3, 2, 0, 3]


@settings(max_examples=200, deadline=None)
@given(
    rows=st.lists(st.lists(st.sampled_from([0, 1, 2, 151_642]), min_size=1, max_size=24), min_size=1, max_size=6),
    n=st.integers(1, 5),
    fill=st.sampled_from([0, 2]),
)
def test_vectorised_equals_the_loop_and_padding_counts_nowhere(rows, n, fill):
    repeated, totals = repeated_ngrams(padded(rows, fill), torch.tensor([len(row) for row in rows]), n)
    assert (repeated.tolist(), totals.tolist()) == looped(rows, n)
