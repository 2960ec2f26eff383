"""Properties that hold for any input: 200 examples each, in float64 unless rounding is the point.

Properties of one function are in the test file of its module; here are those of a step as a whole, and limits.
"""

import json

import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.testing import assert_close

from onetrunk.ops import (
    AdaptiveKLController,
    bradley_terry_loss,
    kl_estimate,
    masked_whiten,
    policy_loss,
    token_rewards,
)
from onetrunk.ops.masking import masked_moments
from tests.ops.test_losses import EXACT, many

SEEDS = st.integers(0, 2**31)
CLIPS = st.sampled_from([0.1, 0.2, 0.28, 0.5])


@st.composite
def steps(draw):
    """Logprobs, old logprobs and advantages [R, C], and a mask with any gaps."""
    shape, generator = (draw(st.integers(1, 8)), draw(st.integers(1, 9))), torch.Generator().manual_seed(draw(SEEDS))
    logprobs, old_logprobs, advantages = torch.randn(3, *shape, generator=generator, dtype=torch.float64)
    mask = torch.rand(shape, generator=generator) < draw(st.sampled_from([0.2, 0.7, 1.0]))
    return logprobs, old_logprobs, advantages, mask


@many
@given(step=steps(), epsilon=CLIPS, epsilon_high=CLIPS, dual_clip=st.sampled_from([None, 1.5, 3.0]))
def test_the_gradient_is_zero_where_the_ratio_is_clipped_and_that_of_the_ratio_elsewhere(
    step, epsilon, epsilon_high, dual_clip
):
    logprobs, old_logprobs, advantages, mask = step
    leaf = logprobs.clone().requires_grad_()
    loss, stats = policy_loss(leaf, old_logprobs, advantages, mask, epsilon, epsilon_high, dual_clip)
    loss.backward()
    ratio = (logprobs - old_logprobs).exp()
    is_clipped = (advantages > 0) & (ratio > 1 + epsilon_high) | (advantages < 0) & (ratio < 1 - epsilon)
    if dual_clip is not None:
        is_clipped |= (advantages < 0) & (ratio > dual_clip)
    count = max(int(mask.sum()), 1)
    expected = torch.where(mask & ~is_clipped, -advantages * ratio / count, 0.0)
    assert_close(leaf.grad, expected, **EXACT)
    assert leaf.grad[~mask | is_clipped].eq(0).all()
    assert_close(stats["clip_fraction"].item(), (mask & is_clipped).sum().item() / count, **EXACT)


@many
@given(seed=SEEDS, vocab=st.integers(1, 12))
def test_k1_and_k3_are_the_kl_on_average_and_k2_half_the_mean_square(seed, vocab):
    generator = torch.Generator().manual_seed(seed)
    policy, reference = torch.randn(2, vocab, generator=generator, dtype=torch.float64).log_softmax(-1)
    probabilities = policy.exp()
    kl = torch.nn.functional.kl_div(reference, policy, log_target=True, reduction="sum")
    mean = {name: (probabilities * kl_estimate(policy, reference, name)).sum() for name in ("k1", "k2", "k3")}
    assert_close(mean["k1"], kl, **EXACT)
    assert_close(mean["k3"], kl, **EXACT)
    assert_close(mean["k2"], (probabilities * (policy - reference).square()).sum() / 2, **EXACT)
    assert kl >= -1e-12


@many
@given(step=steps(), beta=st.floats(0, 2), estimator=st.sampled_from(["k1", "k2", "k3"]))
def test_the_score_is_added_once_for_any_kl(step, beta, estimator):
    logprobs, ref_logprobs, scores, mask = step
    scores = scores[:, 0]
    rewards = token_rewards(scores, logprobs, ref_logprobs, mask, beta, estimator)
    kl = torch.where(mask, kl_estimate(logprobs, ref_logprobs, estimator), 0.0)
    landed = torch.where(mask.any(1), scores, 0.0)
    assert_close(rewards.sum(1), landed - beta * kl.sum(1), **EXACT)
    assert rewards[~mask].eq(0).all()
    without = rewards + beta * kl
    assert (without.abs() > 1e-9).sum(1).le(1).all()


@many
@given(step=steps(), padding=st.integers(0, 7), seed=SEEDS)
def test_moments_and_whitening_do_not_see_padding_or_order(step, padding, seed):
    x, _, _, mask = step
    wide = torch.cat([x, torch.full((len(x), padding), torch.nan, dtype=x.dtype)], 1).flatten()
    wide_mask = torch.cat([mask, torch.zeros(len(x), padding, dtype=torch.bool)], 1).flatten()
    order = torch.randperm(len(wide), generator=torch.Generator().manual_seed(seed))
    for moved, plain in zip(masked_moments(wide[order], wide_mask[order]), masked_moments(x, mask), strict=True):
        assert_close(moved, plain, **EXACT)
    whitened = torch.zeros_like(wide)
    whitened[order] = masked_whiten(wide[order], wide_mask[order])
    # Few entries that lie close together are divided by a small deviation.
    assert_close(whitened[wide_mask], masked_whiten(x, mask)[mask], rtol=1e-6, atol=1e-6)


@many
@given(
    start=st.floats(1e-4, 10),
    target=st.floats(0.1, 20),
    horizon=st.integers(100, 10_000),
    kls=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=8),
    cut=st.integers(0, 8),
    n=st.integers(1, 100),
)
def test_the_adaptive_coefficient_moves_within_its_clamp_and_resumes_from_json_bit_for_bit(
    start, target, horizon, kls, cut, n
):
    controller, first = (AdaptiveKLController(start, target, horizon) for _ in range(2))
    for kl in kls:
        before = controller.value
        controller.update(kl, n)
        assert abs(controller.value / before - 1) <= 0.2 * n / horizon + 1e-12
        # Down below the target, up above it.
        assert (controller.value - before) * (kl - target) >= 0
        assert controller.value > 0
    for kl in kls[:cut]:
        first.update(kl, n)
    resumed = AdaptiveKLController(1.0, target, horizon)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for kl in kls[cut:]:
        resumed.update(kl, n)
    assert resumed.value == controller.value


@many
@given(seed=SEEDS, n=st.integers(1, 6), shift=st.floats(-50, 50))
def test_the_preference_loss_is_symmetric_blind_to_a_common_shift_and_least_at_the_label(seed, n, shift):
    generator = torch.Generator().manual_seed(seed)
    chosen, rejected = torch.randn(2, n, generator=generator, dtype=torch.float64)
    probability = torch.rand(n, generator=generator, dtype=torch.float64)
    loss = bradley_terry_loss(chosen, rejected, probability)
    assert_close(loss, bradley_terry_loss(rejected, chosen, 1 - probability), **EXACT)
    assert_close(loss, bradley_terry_loss(chosen + shift, rejected + shift, probability), **EXACT)
    assume(bool(((probability > 1e-3) & (probability < 1 - 1e-3)).all()))
    best = torch.logit(probability)
    assert loss >= bradley_terry_loss(best, torch.zeros(n, dtype=torch.float64), probability) - 1e-12
