import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from onetrunk.ops import bradley_terry_loss, masked_whiten, policy_loss
from onetrunk.ops.losses import direct_policy_loss

EXACT = {"rtol": 1e-9, "atol": 1e-9}  # float64: only the order of a few dozen additions differs
many = settings(max_examples=100, deadline=None)


def random_step(seed, rows=6, width=5):
    generator = torch.Generator().manual_seed(seed)
    tensors = torch.randn(4, rows, width, generator=generator, dtype=torch.float64)
    return (*tensors, torch.rand(rows, width, generator=generator) < 0.6)


def test_the_policy_loss_and_its_clip_fraction_agree_with_the_oracle(oracle):
    expected = oracle.expected
    # The oracle prints advantages with six digits; whitening and averaging keep the error below 1e-6.
    advantages = masked_whiten(oracle.padded(expected["advantages"]), oracle.mask)
    policy, stats = policy_loss(oracle.logprobs, oracle.old_logprobs, advantages, oracle.mask, 0.2)
    assert policy.item() == pytest.approx(expected["policy_loss_eps_0.2_whitened_token_mean"], abs=1e-6)
    assert stats["clip_fraction"].item() == pytest.approx(expected["policy_clip_fraction"], abs=1e-8)


def test_bradley_terry_agrees_with_the_oracle(oracle):
    case = oracle.expected["bradley_terry"]
    chosen, rejected = (torch.tensor(case[name], dtype=torch.float64) for name in ("chosen", "rejected"))
    assert bradley_terry_loss(chosen, rejected).item() == pytest.approx(case["loss"], abs=1e-8)


def test_policy_loss_of_three_tokens_by_hand():
    # ratios 1, 1.5, .5; A 1, 2, -4; clip .2: -1 * 1 = -1; max(-3, -2.4) = -2.4; max(2, 3.2) = 3.2; mean -.2 / 3
    ratios = torch.tensor([[1.0, 1.5, 0.5]], dtype=torch.float64)
    advantages = torch.tensor([[1.0, 2.0, -4.0]])
    loss, stats = policy_loss(ratios.log(), torch.zeros(1, 3), advantages, torch.ones(1, 3).bool(), 0.2)
    assert loss.item() == pytest.approx(-0.2 / 3, abs=1e-12)
    assert stats["loss"] == loss
    assert stats["clip_fraction"].item() == pytest.approx(2 / 3)
    assert stats["ratio_max"].item() == pytest.approx(1.5)
    # k3: (1 - 1 - 0) + (.5 - log 1.5) + (-.5 - log .5) = log(4 / 3)
    assert stats["approx_kl"].item() == pytest.approx(math.log(4 / 3) / 3)


def test_the_log_ratio_is_clamped_at_twenty():
    logprobs, ones = torch.full((1, 1), 30.0, dtype=torch.float64, requires_grad=True), torch.ones(1, 1)
    loss, stats = policy_loss(logprobs, 0 * ones, -ones, ones.bool(), 0.2)
    loss.backward()
    assert loss.item() == pytest.approx(math.exp(20)) and logprobs.grad == 0
    assert stats["ratio_max"].item() == pytest.approx(math.exp(20))


def test_weights_get_no_gradient():
    logprobs, old_logprobs, advantages, weights, mask = random_step(1)
    loss, _ = policy_loss(
        logprobs.requires_grad_(), old_logprobs, advantages, mask, 0.2, weights=weights.requires_grad_()
    )
    loss.backward()
    assert weights.grad is None


OBJECTIVES = [
    partial(policy_loss, epsilon=0.2),
    partial(policy_loss, epsilon=0.2, dual_clip=1.5),
    partial(direct_policy_loss, epsilon_low=0.3, epsilon_high=1.0),
]


@pytest.mark.parametrize("objective", OBJECTIVES, ids=["clip", "dual clip", "dis"])
@many
@given(seed=st.integers(0, 9999), cuts=st.sets(st.integers(1, 5)))
def test_the_losses_gradients_and_stats_of_packs_add_up_to_those_of_the_step(objective, seed, cuts):
    logprobs, old_logprobs, advantages, _, mask = random_step(seed)
    mask[0, 0] = True
    edges = [0, *sorted(cuts), 6]

    def step(parts):
        leaf = logprobs.clone().requires_grad_()
        total, maximum = {}, torch.zeros(())
        for rows in parts:
            pack = (leaf[rows], old_logprobs[rows], advantages[rows], mask[rows])
            policy, stats = objective(*pack, num_tokens=mask.sum())
            policy.backward()
            maximum = torch.maximum(maximum, stats.pop("ratio_max"))
            for name, stat in stats.items():
                total[name] = total.get(name, 0) + stat
        return leaf.grad, {**total, "ratio_max": maximum}

    whole, whole_stats = step([slice(0, 6)])
    split, split_stats = step([slice(a, b) for a, b in zip(edges, edges[1:], strict=False)])
    assert_close(split, whole, **EXACT)
    assert_close(split_stats, whole_stats, **EXACT)
    default, _ = objective(logprobs, old_logprobs, advantages, mask)
    assert_close(whole_stats["loss"], default, **EXACT)


def test_the_loss_of_bfloat16_inputs_is_computed_in_float32():
    *tensors, _, mask = random_step(3)
    low = [x.bfloat16() for x in tensors]
    policy, _ = policy_loss(*low, mask, 0.2)
    assert policy.dtype == torch.float32
    assert torch.equal(policy, policy_loss(*(x.float() for x in low), mask, 0.2)[0])


def test_soft_labels_and_margins_by_hand():
    lead, zero = torch.tensor([2.0], dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    won, lost = math.log(1 + math.exp(-2)), math.log(1 + math.exp(2))
    soft = bradley_terry_loss(lead, zero, probability=torch.tensor([0.75]))
    assert soft.item() == pytest.approx(0.75 * won + 0.25 * lost)
    # A margin of 2 uses up the lead of 2: log 2.
    assert bradley_terry_loss(lead, zero, margin=torch.tensor([2.0])).item() == pytest.approx(math.log(2))
