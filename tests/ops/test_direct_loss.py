"""Direct double-sided importance sampling: by hand, against a loop, against PPO, and in expectation over a bandit."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from onetrunk.ops.losses import direct_policy_loss, kl_loss, policy_loss
from tests.ops.test_losses import EXACT, many, random_step


def gradient_of(loss, leaf):
    (gradient,) = torch.autograd.grad(loss, leaf)
    return gradient


def test_five_tokens_by_hand():
    # Bounds .7 and 6: ratios 1, .71 and 5.9 train, .7 and 6 do not, and stay in the denominator.
    ratios = torch.tensor([[1.0, 0.71, 5.9, 0.7, 6.0]], dtype=torch.float64)
    leaf = ratios.log().requires_grad_()
    advantages = torch.tensor([[1.0, -2.0, 3.0, 4.0, -5.0]], dtype=torch.float64)
    loss, stats = direct_policy_loss(leaf, torch.zeros(1, 5), advantages, torch.ones(1, 5).bool(), 0.3, 5.0)
    assert loss.item() == pytest.approx((-1 + 1.42 - 17.7) / 5)
    assert gradient_of(loss, leaf).flatten().tolist() == pytest.approx([-0.2, 1.42 / 5, -17.7 / 5, 0, 0])
    found = {name: stats[name].item() for name in ("masked_below", "masked_above", "clip_fraction")}
    assert found == pytest.approx({"masked_below": 0.2, "masked_above": 0.2, "clip_fraction": 0.4})
    assert stats["approx_kl"].item() == pytest.approx(sum(r - 1 - math.log(r) for r in ratios.flatten().tolist()) / 5)


@many
@given(seed=st.integers(0, 9999), low=st.sampled_from([0.1, 0.3, 0.8, 1.0]), high=st.sampled_from([0.1, 1.0, 5.0]))
def test_the_gradient_is_that_of_the_weighted_logprob_in_range_and_zero_elsewhere(seed, low, high):
    logprobs, sampled, advantages, _, mask = random_step(seed)
    leaf = logprobs.clone().requires_grad_()
    loss, _ = direct_policy_loss(leaf, sampled, advantages, mask, low, high)
    twin = torch.zeros((), dtype=torch.float64)
    for place in mask.nonzero().tolist():
        ratio = math.exp(logprobs[tuple(place)] - sampled[tuple(place)])
        if 1 - low < ratio < 1 + high:
            twin = twin - ratio * advantages[tuple(place)] * leaf[tuple(place)]
    expected = gradient_of(twin / max(1, int(mask.sum())) + 0 * leaf.sum(), leaf)
    assert_close(gradient_of(loss, leaf), expected, **EXACT)


@many
@given(seed=st.integers(0, 9999))
def test_on_policy_it_is_the_first_step_of_ppo_bit_for_bit(seed):
    logprobs, _, advantages, _, mask = random_step(seed)
    ours, theirs = (logprobs.clone().requires_grad_() for _ in range(2))
    direct, stats = direct_policy_loss(ours, logprobs, advantages, mask, 0.3, 5.0)
    clipped, _ = policy_loss(theirs, logprobs, advantages, mask, 0.2)
    assert direct.item() == clipped.item() and stats["clip_fraction"] == 0
    assert torch.equal(gradient_of(direct, ours), gradient_of(clipped, theirs))


@many
@given(seed=st.integers(0, 9999))
def test_over_samples_of_two_old_policies_it_is_the_gradient_of_the_policy_restricted_to_ratios_in_range(seed):
    generator = torch.Generator().manual_seed(seed)
    scores, *old = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    advantages = torch.randn(4, generator=generator, dtype=torch.float64)
    leaf = scores.clone().requires_grad_()
    policy, old = leaf.log_softmax(0), [x.log_softmax(0) for x in old]
    expected_loss = 0.0
    for sampler in old:
        for action, probability in enumerate(sampler.exp() / len(old)):
            one = (x[action].reshape(1, 1) for x in (policy, sampler, advantages))
            loss, _ = direct_policy_loss(*one, torch.ones(1, 1).bool(), 0.3, 1.0)
            expected_loss = expected_loss + probability * loss
    # d/d score of sum over the actions in range of pi * A * d log pi.
    pi, true = policy.detach().exp(), torch.zeros(4, dtype=torch.float64)
    for sampler in old:
        for action in range(4):
            if 0.7 < pi[action] / sampler[action].exp() < 2.0:
                one_hot = torch.eye(4, dtype=torch.float64)[action]
                true += pi[action] * advantages[action] * (one_hot - pi) / len(old)
    assert_close(gradient_of(expected_loss + 0 * leaf.sum(), leaf), -true, **EXACT)


@many
@given(seed=st.integers(0, 9999))
def test_the_kl_in_the_loss_needs_no_weights_if_the_ratio_is_that_to_the_sampler(seed):
    logprobs, old, sampled, reference, mask = random_step(seed)
    gradients = []
    for before, weights in ((sampled, None), (old, (old - sampled).exp())):
        leaf = logprobs.clone().requires_grad_()
        gradients.append(gradient_of(kl_loss(leaf, before, reference, mask, "k2", weights), leaf))
    assert_close(*gradients, **EXACT)
