"""Repeated n-grams against a loop over windows, and by hand."""

import pytest
import torch
from accelerate import Accelerator
from hypothesis import given, settings
from hypothesis import strategies as st

from onetrunk.ppo.monitoring.metrics import repeated_ngrams, rollout_metrics
from onetrunk.ppo.rollout import PromptBatch, ScoredRollout
from onetrunk.rewards.reward import Scores
from onetrunk.types import Rollout

SCORES = Scores(torch.tensor([1.0, 2.0]), {})


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


def test_the_turns_of_an_episode_count_each_for_itself():
    # 5 6 7 8 comes in two turns; the observation 9 stands between 3 4 and 1 2, which are no window of four.
    turn_ids = [[0] * 5 + [-1] + [1] * 4 + [-1] + [2] * 2 + [-1] + [3] * 2, [0] * 5]
    ids = [[5, 6, 7, 8, 5, 9, 5, 6, 7, 8, 9, 3, 4, 9, 1, 2], [7] * 5]
    rollout = Rollout([[1]] * 2, ids, [], [True] * 2, turn_ids=turn_ids)
    assert rollout.sampled_turns == [(0, [5, 6, 7, 8, 5]), (0, [5, 6, 7, 8]), (0, [3, 4]), (0, [1, 2]), (1, [7] * 5)]
    scored = ScoredRollout(PromptBatch(["a"] * 2, [[1]] * 2, {}, [(0,), (1,)]), rollout, ["a"] * 2, SCORES)
    assert scored.lengths.tolist() == [13, 5]
    # Windows: 2 + 1 + 0 + 0 and 2, of which one occurred before in its turn.
    assert rollout_metrics(scored, (), Accelerator(cpu=True))["completion/repeated_ngrams"] == pytest.approx(1 / 5)


@settings(max_examples=200, deadline=None)
@given(
    rows=st.lists(st.lists(st.sampled_from([0, 1, 2, 151_642]), min_size=1, max_size=24), min_size=1, max_size=6),
    n=st.integers(1, 5),
    fill=st.sampled_from([0, 2]),
)
def test_vectorised_equals_the_loop_and_padding_counts_nowhere(rows, n, fill):
    repeated, totals = repeated_ngrams(padded(rows, fill), torch.tensor([len(row) for row in rows]), n)
    assert (repeated.tolist(), totals.tolist()) == looped(rows, n)
