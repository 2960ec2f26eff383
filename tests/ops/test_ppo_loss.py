import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close

from onetrunk.ops import kl_estimate, policy_loss
from onetrunk.ops.losses import kl_loss, ppo_loss
from onetrunk.ops.masking import masked_mean
from onetrunk.types import Experience, LossCoefficients, PackOutput

EXACT = {"rtol": 1e-12, "atol": 1e-12}  # float64
COEFS = LossCoefficients(0.2, 0.3, 1.5, 0.05, 0.7, "k2")
CONSTANTS = "old_logprobs old_values advantages returns ref_logprobs weights".split()


def loss_of(tensors, coefficients, num_tokens=None):
    """Return the PPO loss and stats of tensors by name, `mask` among them; those that are missing are None."""
    output = PackOutput(**{name: tensors.get(name) for name in ("logprobs", "entropy")})
    constants = {name: tensors.get(name) for name in CONSTANTS}
    experience = Experience(pack=None, loss_mask=tensors["mask"], **constants)
    return ppo_loss(experience, output, coefficients, num_tokens)


def random_tensors(seed=0, rows=6, width=5):
    generator = torch.Generator().manual_seed(seed)
    names = "returns old_values logprobs old_logprobs advantages weights ref_logprobs entropy".split()
    tensors = {name: torch.randn(rows, width, generator=generator, dtype=torch.float64) for name in names}
    for name in ("logprobs", "entropy"):
        tensors[name].requires_grad_()
    return SimpleNamespace(mask=torch.rand(rows, width, generator=generator) < 0.6, **tensors)


def gradients(loss, tensors):
    return torch.autograd.grad(loss, (tensors.logprobs, tensors.entropy))


def test_the_loss_of_one_token_by_hand():
    def one(x):
        return torch.tensor([[x]], dtype=torch.float64)

    tensors = dict(
        mask=one(1).bool(), advantages=one(2.0), logprobs=one(-1.0), old_logprobs=one(-1.0 - math.log(1.5)),
        ref_logprobs=one(-1.3), entropy=one(0.9),
    )  # fmt: skip
    loss, stats = loss_of(tensors, LossCoefficients(epsilon=0.2, entropy_coef=0.5, kl_weight=2.0))
    # -min(2 * 1.5, 2 * 1.2) - .5 * .9 + 2 * (1.5 * .3)
    assert loss.item() == pytest.approx(-2.4 - 0.45 + 0.9, abs=1e-12)
    assert stats["policy"]["clip_fraction"] == 1 and stats["policy"]["entropy"].item() == pytest.approx(0.9)
    assert stats["kl"]["loss"].item() == pytest.approx(0.45) and set(stats) == {"policy", "kl"}


@pytest.mark.parametrize("num_tokens", [None, 77.0, torch.tensor(77)])
def test_the_loss_is_the_weighted_sum_of_the_losses_of_its_terms(num_tokens):
    t = random_tensors()
    loss, stats = loss_of(vars(t), COEFS, num_tokens)
    counted = {"mask": t.mask, "num_tokens": num_tokens}
    clip = {"epsilon": 0.2, "epsilon_high": 0.3, "dual_clip": 1.5}
    policy, policy_stats = policy_loss(t.logprobs, t.old_logprobs, t.advantages, weights=t.weights, **clip, **counted)
    entropy = masked_mean(t.entropy, **counted)
    kl = kl_loss(t.logprobs, t.old_logprobs, t.ref_logprobs, estimator="k2", weights=t.weights, **counted)
    expected = policy - 0.05 * entropy + 0.7 * kl
    assert_close(loss, expected, **EXACT)
    assert_close(gradients(loss, t), gradients(expected, t), **EXACT)
    terms = {"policy": policy_stats | {"entropy": entropy.detach()}, "kl": {"loss": kl.detach()}}
    assert_close(stats, terms, **EXACT)
    assert not any(x.requires_grad for group in stats.values() for x in group.values())


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_a_token_of_the_kl_counts_by_its_ratio_and_its_weight_which_get_no_gradient(estimator):
    t = random_tensors(1)
    loss = kl_loss(t.logprobs, t.old_logprobs, t.ref_logprobs, t.mask, estimator, t.weights)
    expected, tokens = 0.0, t.mask.nonzero().tolist()
    for i, j in tokens:
        factor = math.exp(t.logprobs[i, j].item() - t.old_logprobs[i, j].item()) * t.weights[i, j].item()
        expected = expected + factor * kl_estimate(t.logprobs[i, j], t.ref_logprobs[i, j], estimator) / len(tokens)
    assert_close(loss, expected, **EXACT)
    assert_close(torch.autograd.grad(loss, t.logprobs), torch.autograd.grad(expected, t.logprobs), **EXACT)


def test_what_is_not_given_is_left_out():
    t = random_tensors()
    names = ("mask", "logprobs", "old_logprobs", "advantages")
    only_policy = {name: getattr(t, name) for name in names}
    loss, stats = loss_of(only_policy, LossCoefficients(kl_weight=3.0, entropy_coef=3.0))
    assert_close(loss, policy_loss(t.logprobs, t.old_logprobs, t.advantages, t.mask, 0.2)[0], **EXACT)
    assert set(stats) == {"policy"} and "entropy" not in stats["policy"]
    assert "kl" not in loss_of(vars(t), replace(COEFS, kl_weight=0.0))[1]


def test_a_token_that_is_not_finite_shows_in_the_loss_and_in_its_own_gradient():
    t = random_tensors()
    row, column = t.mask.nonzero()[0].tolist()
    t.logprobs.data[row, column] = torch.nan
    loss, _ = loss_of(vars(t), COEFS)
    gradient, _ = gradients(loss, t)
    assert loss.isnan() and gradient[row, column].isnan() and gradient.isnan().sum() == 1


def test_a_pack_without_a_counted_token_gives_a_loss_of_zero():
    t = random_tensors()
    t.mask[:] = False
    loss, stats = loss_of(vars(t), COEFS)
    assert loss == 0 and not any(gradient.any() for gradient in gradients(loss, t))
    assert not any(x.any() for group in stats.values() for x in group.values())


def test_a_small_kl_keeps_its_digits_in_float32():
    # exp(d) - 1 - d in float32 at d = 1e-4 would be 0 or 1e-7; it is d^2 / 2 = 5e-9
    d = torch.full((1, 4), 1e-4)
    zero = torch.zeros_like(d)
    tensors = dict(mask=zero == 0, logprobs=d, **dict.fromkeys(CONSTANTS, zero))
    del tensors["weights"]
    _, stats = loss_of(tensors, LossCoefficients(kl_estimator="k3", kl_weight=1.0))
    for kl in (stats["policy"]["approx_kl"], stats["kl"]["loss"]):
        assert kl.item() == pytest.approx(5e-9, rel=1e-3)


@pytest.mark.parametrize(
    ("left_out", "coefs", "message"),
    [
        (["logprobs"], COEFS, "got no logprobs; run the model with the role policy"),
        ([], LossCoefficients(kl_weight=0.1, kl_estimator="k4"), "kl_estimator is 'k4'"),
        ([], LossCoefficients(dual_clip=1), "dual_clip is 1"),
    ],
)
def test_a_loss_that_lacks_something_or_has_a_wrong_number_is_rejected(left_out, coefs, message):
    with pytest.raises(ValueError, match=message):
        loss_of(vars(random_tensors()) | dict.fromkeys(left_out), coefs)
