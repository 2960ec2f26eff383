"""Importance weights: against a loop, by hand, and unbiased where every outcome can be enumerated."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from onetrunk.ops.losses import effective_share, importance_sums, importance_weights, kl_loss, policy_loss

SEEDS = st.integers(0, 2**31)
BOUNDS = st.sampled_from([(None, 3.0), (0.5, 2.0), (0.8, None), (None, 0.7)])
many = settings(max_examples=100, deadline=None)


def naive(log_ratio, counts, mode, low, high):
    """Return the weight of a token, and whether its ratio is out of bounds."""
    ratio = math.exp(log_ratio)
    bound = high if high is not None and ratio > high else low if low is not None and ratio < low else None
    if not counts or bound is None:
        return (ratio if counts else 0.0), False
    return (0.0 if mode == "token_mask" else bound), True


@many
@given(seed=SEEDS, mode=st.sampled_from(["token_truncate", "token_mask"]), bounds=BOUNDS)
def test_the_weights_and_their_sums_equal_a_loop_over_tokens(seed, mode, bounds):
    generator = torch.Generator().manual_seed(seed)
    old, sampled = torch.randn(2, 4, 5, generator=generator, dtype=torch.float64)
    mask = torch.rand(4, 5, generator=generator) < 0.7
    tokens = zip((old - sampled).flatten().tolist(), mask.flatten().tolist(), strict=True)
    pairs = torch.tensor([naive(*token, mode, *bounds) for token in tokens], dtype=torch.float64)
    expected, flags = pairs.view(4, 5, 2).unbind(-1)
    importance = importance_weights(old, sampled, mask, mode, *bounds)
    assert_close(importance.weights, expected)
    assert importance.is_clipped.equal(flags.bool())
    sums = torch.stack([expected.sum(1), expected.square().sum(1), flags.sum(1), mask.sum(1)])
    assert_close(importance_sums(importance, mask), sums, check_dtype=False)


def test_weights_by_hand():
    # Ratios e^(ln 2) = 2, e^(-ln 4) = 1/4, e^(ln 8) = 8; the last column is padding.
    old = torch.tensor([[math.log(2.0), -math.log(4.0), math.log(8.0), 7.0]])
    mask = torch.tensor([[True, True, True, False]])
    zeros = torch.zeros(1, 4)
    truncated = importance_weights(old, zeros, mask, "token_truncate", 0.5, 3.0)
    assert_close(truncated.weights, torch.tensor([[2.0, 0.5, 3.0, 0.0]]))
    assert truncated.is_clipped.tolist() == [[False, True, True, False]]
    masked = importance_weights(old, zeros, mask, "token_mask", 0.5, 3.0)
    assert_close(masked.weights, torch.tensor([[2.0, 0.0, 0.0, 0.0]]))
    # (2 + .5 + 3)^2 / (3 * (4 + .25 + 9)) = 30.25 / 39.75; one weight of three: 1/3.
    assert effective_share(*importance_sums(truncated, mask)[:, 0][[0, 1, 3]]).item() == pytest.approx(30.25 / 39.75)
    assert effective_share(*importance_sums(masked, mask)[:, 0][[0, 1, 3]]).item() == pytest.approx(1 / 3)


def test_a_sampler_that_is_infinitely_wrong_gives_a_finite_weight():
    old, sampled = torch.tensor([[-400.0, 0.0]]), torch.tensor([[0.0, -400.0]])
    weights = importance_weights(old, sampled, torch.ones(1, 2, dtype=torch.bool), clip_max=None).weights
    assert weights.isfinite().all() and 0 < weights[0, 0] < 1e-8 and weights[0, 1] > 1e8


def bandit_gradient(logits, old_logprobs, sampler, advantages, clip_max):
    """Return the exact mean over the sampler of the gradient of the weighted loss of one token."""
    total = torch.zeros_like(logits)
    for action in range(len(logits)):
        policy = logits.clone().requires_grad_()
        logprob = policy.log_softmax(-1)[action].reshape(1, 1)
        mask = torch.ones(1, 1, dtype=torch.bool)
        weights = None
        if clip_max is not False:
            pair = old_logprobs[action].reshape(1, 1), sampler[action].reshape(1, 1)
            weights = importance_weights(*pair, mask, clip_max=clip_max).weights
        old, advantage = old_logprobs[action].reshape(1, 1), advantages[action].reshape(1, 1)
        loss, _ = policy_loss(logprob, old, advantage, mask, 0.2, weights=weights)
        loss.backward()
        total += sampler[action].exp() * policy.grad
    return total


@many
@given(seed=SEEDS, arms=st.integers(2, 7))
def test_on_a_bandit_the_weighted_gradient_of_any_sampler_is_the_on_policy_gradient(seed, arms):
    """Every action is enumerated: nothing is drawn, so the means are exact and the bound is rounding."""
    generator = torch.Generator().manual_seed(seed)
    logits, other, advantages = torch.randn(3, arms, generator=generator, dtype=torch.float64)
    policy, sampler = logits.log_softmax(-1), other.log_softmax(-1)
    expected = bandit_gradient(logits, policy, policy, advantages, clip_max=False)
    assert_close(bandit_gradient(logits, policy, sampler, advantages, clip_max=None), expected, atol=1e-12, rtol=1e-9)
    # Without weights the gradient is that of another objective.
    uncorrected = bandit_gradient(logits, policy, sampler, advantages, clip_max=False)
    assert (uncorrected - expected).abs().max() > 1e-6


@many
@given(seed=SEEDS, arms=st.integers(2, 7), estimator=st.sampled_from(["k2", "k3"]))
def test_on_a_bandit_the_kl_in_the_loss_has_the_gradient_of_the_exact_kl_for_any_sampler_in_any_epoch(
    seed, arms, estimator
):
    """Current policy, policy at the start of the update, sampler and reference all differ."""
    generator = torch.Generator().manual_seed(seed)
    logits, *others = torch.randn(4, arms, generator=generator, dtype=torch.float64)
    old, sampler, reference = (other.log_softmax(-1) for other in others)
    logits.requires_grad_()
    policy = logits.log_softmax(-1)
    # Every arm is a row of one token, drawn with the sampler's probability.
    mask = torch.ones(arms, 1, dtype=torch.bool)
    columns = [x[:, None] for x in (policy, old, reference)]
    importance = importance_weights(columns[1], sampler[:, None], mask, clip_max=None)
    drawn = sampler.exp()[:, None]
    kl = kl_loss(*columns, mask, estimator, importance.weights * drawn, num_tokens=1)
    start, end = (policy, reference) if estimator == "k2" else (reference, policy)
    expected = (start.exp() * (start - end)).sum()
    gradient, exact = (torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (kl, expected))
    assert_close(gradient, exact, atol=1e-12, rtol=1e-9)
    if estimator == "k3":
        assert_close(kl.detach(), (policy.exp() * (policy - reference)).sum().detach(), atol=1e-12, rtol=1e-9)
    # Without weights it is the gradient of another function.
    uncorrected = kl_loss(columns[0], columns[0].detach(), columns[2], mask, estimator, drawn, num_tokens=1)
    assert (torch.autograd.grad(uncorrected, logits)[0] - exact).abs().max() > 1e-6
