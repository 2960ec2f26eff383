"""Uniforms of a row and the inverse of its cumulative distribution."""

import math

import numpy as np
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from onetrunk.rollouts.decoding import inverse_cdf, row_uniforms

LARGEST = float(np.nextafter(1.0, 0.0))
INF = math.inf


def test_hand_worked_draws_fall_into_the_bin_that_holds_the_uniform():
    # probabilities .2 .3 .5, cumulative .2 .5 1: below .2 -> 0, from there below .5 -> 1, the rest -> 2
    logprobs = torch.tensor([0.2, 0.3, 0.5]).log().expand(6, 3)
    uniforms = torch.tensor([0.0, 0.19, 0.21, 0.49, 0.51, LARGEST], dtype=torch.float64)
    assert inverse_cdf(logprobs, uniforms).tolist() == [0, 0, 1, 1, 2, 2]


def test_the_edges_of_the_unit_interval_skip_tokens_that_are_ruled_out():
    # probabilities 0 .5 0 .5 0: 0 -> the first possible token, just below 1 -> the last, .5 -> the upper of the two
    logprobs = torch.tensor([0.0, 0.5, 0.0, 0.5, 0.0]).log().expand(3, 5)
    uniforms = torch.tensor([0.0, 0.5, LARGEST], dtype=torch.float64)
    assert inverse_cdf(logprobs, uniforms).tolist() == [1, 3, 3]


@settings(max_examples=300, deadline=None)
@given(
    logits=st.lists(st.one_of(st.floats(-200, 200, width=32), st.just(-INF)), min_size=1, max_size=20),
    uniform=st.floats(0, 1, exclude_max=True),
)
@example(logits=[-INF, 0.0], uniform=0.0)
@example(logits=[0.0, -INF], uniform=LARGEST)
@example(logits=[-INF, 3.0, -200.0, -INF], uniform=LARGEST)
@example(logits=[0.0] * 7 + [-INF], uniform=LARGEST)
def test_a_token_of_probability_zero_is_never_drawn(logits, uniform):
    if max(logits) == -INF:
        logits = [*logits, 0.0]
    logprobs = torch.tensor([logits], dtype=torch.float32).log_softmax(-1)
    token = inverse_cdf(logprobs, torch.tensor([uniform], dtype=torch.float64)).item()
    assert logprobs[0, token].exp() > 0


def test_a_cumulative_sum_that_rounds_upwards_over_ruled_out_tokens_still_draws_a_possible_one(monkeypatch):
    """A parallel sum may round cdf[i] above cdf[i - 1] where token i has probability 0; here it does, by force."""
    sequential = torch.Tensor.cumsum

    def parallel(self, dim, dtype):
        return sequential(self, dim, dtype=dtype) + torch.arange(self.shape[-1], dtype=dtype) * 1e-3

    monkeypatch.setattr(torch.Tensor, "cumsum", parallel)
    logprobs = torch.tensor([[0.5, 0.0, 0.5, 0.0, 0.0]]).log()
    uniforms = torch.linspace(0, LARGEST, 101, dtype=torch.float64)
    assert inverse_cdf(logprobs.expand(101, 5), uniforms).tolist() == [0] * 50 + [2] * 51


def test_float32_probabilities_that_miss_one_leave_no_gap_at_the_end():
    logprobs = torch.full((1, 3), math.log(0.3))  # adds up to .9
    assert inverse_cdf(logprobs, torch.tensor([0.65], dtype=torch.float64)).item() == 1  # .65 * .9 = .585 < .6
    assert inverse_cdf(logprobs, torch.tensor([LARGEST], dtype=torch.float64)).item() == 2


def test_a_row_draws_its_own_uniforms_and_a_longer_completion_only_adds_to_them():
    first = row_uniforms((7, 3, 0), 16)
    assert first.tolist() == row_uniforms((7, 3, 0), 64)[:16].tolist()
    others = [row_uniforms(key, 16) for key in [(7, 3, 1), (7, 4, 0), (8, 3, 0), (3, 7, 0)]]
    assert not any(np.isin(first, other).any() for other in others)
    assert ((first >= 0) & (first < 1)).all()
