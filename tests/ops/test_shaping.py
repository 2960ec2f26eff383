"""Penalties and running moments against numbers worked by hand; merged moments are the moments of the whole."""

import json
import math
import statistics

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onetrunk.ops.advantages import RunningMoments, length_penalty, missing_eos_penalty
from onetrunk.ops.masking import masked_moments


def test_only_completions_without_a_stop_token_lose_the_penalty():
    scores = torch.tensor([1.0, 1.0, math.nan])
    given = scores.clone()
    result = missing_eos_penalty(scores, torch.tensor([True, False, False]), 1.5)
    assert result[:2].tolist() == [1.0, -0.5]
    assert result[2].isnan()
    assert scores[:2].equal(given[:2])


def test_the_length_penalty_is_full_at_the_full_length():
    scores = torch.tensor([1.0, 1.0, 1.0, math.nan])
    result = length_penalty(scores, torch.tensor([0, 25, 100, 5]), 100, 0.5)
    # 1 - .5 * 0/100, 1 - .5 * 25/100, 1 - .5 * 100/100
    assert result[:3].tolist() == [1.0, 0.875, 0.5]
    assert result[3].isnan()
    assert result.dtype == torch.float32
    assert scores[:3].tolist() == [1.0, 1.0, 1.0]


def seen(*batches):
    moments = RunningMoments()
    for batch in batches:
        scores = torch.tensor(batch, dtype=torch.float64)
        moments.update(*(float(m) for m in masked_moments(scores, torch.ones_like(scores, dtype=torch.bool))))
    return moments


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.floats(-1e4, 1e4), max_size=8), min_size=1, max_size=6))
def test_merging_any_split_gives_the_moments_of_the_whole(batches):
    moments = seen(*batches)
    whole = [score for batch in batches for score in batch]
    assert moments.count == len(whole)
    if whole:
        # The standard library works in fractions, so these are the exact moments; the rest is float64 rounding.
        assert math.isclose(moments.mean, statistics.mean(whole), rel_tol=1e-9, abs_tol=1e-8)
    if len(whole) > 1:
        assert math.isclose(moments.std, statistics.stdev(whole), rel_tol=1e-6, abs_tol=1e-4)


def test_scores_are_normalized_by_hand_worked_numbers():
    moments = seen([1.0, 2.0], [3.0])  # mean 2, squared differences 1 + 0 + 1, std sqrt(2 / 2) = 1
    assert (moments.count, moments.mean, moments.m2, moments.std) == (3, 2, 2, 1)
    moments = seen([2.0, 4.0], [6.0])  # mean 4, std 2
    scores = torch.tensor([2.0, 10.0, math.nan])
    assert moments.normalize(scores)[:2].tolist() == [-1.0, 3.0]
    assert moments.normalize(scores)[2].isnan()
    assert scores[:2].tolist() == [2.0, 10.0]


def test_equal_or_few_scores_leave_the_scale_as_it_is():
    scores = torch.tensor([3.0, 5.0])
    assert RunningMoments().normalize(scores).tolist() == [3.0, 5.0]
    assert seen([3.0]).normalize(scores).tolist() == [0.0, 2.0]
    assert seen([3.0, 3.0], [3.0]).normalize(scores).tolist() == [0.0, 2.0]


def test_the_state_survives_json_and_goes_on_as_if_never_saved():
    saved = seen([0.1, 0.7, 1e-3])
    resumed = RunningMoments()
    resumed.load_state_dict(json.loads(json.dumps(saved.state_dict())))
    for moments in (saved, resumed):
        moments.update(2, 0.3, 0.01)
    assert resumed == saved
