"""Tests of `onetrunk.rewards.shaping` against numbers worked by hand."""

import math

import torch

from onetrunk.rewards import length_penalty, missing_eos_penalty


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
