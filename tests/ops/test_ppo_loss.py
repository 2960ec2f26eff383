import math
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from onetrunk.ops import PPOCoefs, PPOTensors, kl_estimate, masked_mean, policy_loss, value_loss
from onetrunk.ops import losses as ppo_loss

EXACT = {"rtol": 1e-12, "atol": 1e-12}  # float64
COEFS = PPOCoefs(0.2, 0.3, 1.5, 0.2, 0.4, 0.05, 0.7, "k2")


def random_tensors(seed=0, rows=6, width=5):
    generator = torch.Generator().manual_seed(seed)
    names = "values returns old_values logprobs old_logprobs advantages weights ref_logprobs entropy".split()
    tensors = {name: torch.randn(rows, width, generator=generator, dtype=torch.float64) for name in names}
    for name in ("values", "logprobs", "entropy"):
        tensors[name].requires_grad_()
    return PPOTensors(mask=torch.rand(rows, width, generator=generator) < 0.6, **tensors)


def gradients(loss, tensors):
    return torch.autograd.grad(loss, (tensors.values, tensors.logprobs, tensors.entropy))


def test_the_loss_of_one_token_by_hand():
    def one(x):
        return torch.tensor([[x]], dtype=torch.float64)

    tensors = PPOTensors(
        mask=one(1).bool(), values=one(2.0), returns=one(5.0), advantages=one(2.0), logprobs=one(-1.0),
        old_logprobs=one(-1.0 - math.log(1.5)), ref_logprobs=one(-1.3), entropy=one(0.9),
    )  # fmt: skip
    loss, stats = ppo_loss(tensors, PPOCoefs(clip_low=0.2, value_coef=0.1, entropy_coef=0.5, kl_coef=2.0))
    # -min(2 * 1.5, 2 * 1.2) + .1 * (2 - 5)^2 / 2 - .5 * .9 + 2 * .3
    assert loss.item() == pytest.approx(-2.4 + 0.45 - 0.45 + 0.6, abs=1e-12)
    assert stats["policy"]["clip_fraction"] == 1 and stats["policy"]["entropy"].item() == pytest.approx(0.9)
    assert stats["kl"]["loss"].item() == pytest.approx(0.3) and stats["value"]["error_mean"] == 3


@pytest.mark.parametrize("num_tokens", [None, 77.0, torch.tensor(77)])
def test_the_loss_is_the_weighted_sum_of_the_losses_of_its_terms(num_tokens):
    t = random_tensors()
    loss, stats = ppo_loss(t, COEFS, num_tokens)
    counted = {"mask": t.mask, "num_tokens": num_tokens}
    policy, policy_stats = policy_loss(
        t.logprobs,
        t.old_logprobs,
        t.advantages,
        clip_low=0.2,
        clip_high=0.3,
        dual_clip=1.5,
        weights=t.weights,
        **counted,
    )
    value, value_stats = value_loss(t.values, t.old_values, t.returns, clip=0.2, **counted)
    entropy = masked_mean(t.entropy, **counted)
    kl = masked_mean(kl_estimate(t.logprobs, t.ref_logprobs, "k2"), **counted)
    expected = policy + 0.4 * value - 0.05 * entropy + 0.7 * kl
    assert_close(loss, expected, **EXACT)
    assert_close(gradients(loss, t), gradients(expected, t), **EXACT)
    terms = {"policy": policy_stats | {"entropy": entropy.detach()}, "value": value_stats, "kl": {"loss": kl.detach()}}
    assert_close(stats, terms, **EXACT)
    assert not any(x.requires_grad for group in stats.values() for x in group.values())


def test_what_is_not_given_is_left_out():
    t = random_tensors()
    only_values = PPOTensors(mask=t.mask, values=t.values, returns=t.returns)
    loss, stats = ppo_loss(only_values, PPOCoefs(value_coef=0.4))
    assert_close(loss, 0.4 * value_loss(t.values, None, t.returns, t.mask)[0], **EXACT)
    assert set(stats) == {"value"}
    only_policy = PPOTensors(mask=t.mask, logprobs=t.logprobs, old_logprobs=t.old_logprobs, advantages=t.advantages)
    loss, stats = ppo_loss(only_policy, PPOCoefs(kl_coef=3.0, entropy_coef=3.0))
    assert_close(loss, policy_loss(t.logprobs, t.old_logprobs, t.advantages, t.mask, 0.2)[0], **EXACT)
    assert set(stats) == {"policy"} and "entropy" not in stats["policy"]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_what_stands_where_nothing_counts_touches_neither_loss_nor_gradient(estimator):
    t, coefs = random_tensors(), replace(COEFS, kl_estimator=estimator)
    loss, stats = ppo_loss(t, coefs)
    junk = {name: torch.where(t.mask, x.detach(), torch.nan) for name, x in vars(t).items() if name != "mask"}
    for name in ("values", "logprobs", "entropy"):
        junk[name].requires_grad_()
    dirty = PPOTensors(mask=t.mask, **junk)
    dirty_loss, dirty_stats = ppo_loss(dirty, coefs)
    assert_close((dirty_loss, dirty_stats), (loss, stats), rtol=0, atol=0)
    assert_close(gradients(dirty_loss, dirty), gradients(loss, t), rtol=0, atol=0)


def test_values_that_stay_within_the_clip_range_count_as_not_clipped():
    # V_old + (V - V_old) would not be V to the last bit, and .2% of such values count as clipped
    generator = torch.Generator().manual_seed(0)
    values, returns = torch.randn(2, 1, 10_000, generator=generator)
    old_values = values + 0.15 * (2 * torch.rand(1, 10_000, generator=generator) - 1)
    _, stats = value_loss(values, old_values, returns, torch.ones_like(values).bool(), clip=0.2)
    assert stats["clip_fraction"] == 0


@pytest.mark.parametrize(
    ("left_out", "coefs", "sentence"),
    [
        (["logprobs", "values"], COEFS, "neither logprobs nor values"),
        (["returns"], COEFS, "got values without returns"),
        (["old_values"], COEFS, "got values without old_values"),
        (["old_logprobs", "advantages"], COEFS, "got logprobs without old_logprobs and advantages"),
        (["logprobs"], COEFS, "got entropy without logprobs"),
        ([], PPOCoefs(kl_estimator="k4"), "kl_estimator is 'k4'"),
        ([], PPOCoefs(dual_clip=0.5), "dual_clip is 0.5"),
    ],
)
def test_a_loss_that_lacks_something_or_has_a_wrong_number_is_refused(left_out, coefs, sentence):
    with pytest.raises(ValueError, match=sentence):
        ppo_loss(replace(random_tensors(), **dict.fromkeys(left_out)), coefs)
