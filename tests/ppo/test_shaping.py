"""From scores to advantages, with numbers worked by hand on canned completions.

Unless a test says otherwise gamma and lambda are 1, there is no KL term, the values are 0 and nothing is whitened:
then the advantage of every token of a row is the row's score.
"""

import pytest
import torch
from datasets import Dataset

from onetrunk.models.adapters import POLICY, adapter_parameters
from tests.fakes import CannedBackend
from tests.ppo.support import logged, make_trainer, prompts, trained
from tests.tiny import tiny_tokenizer

PLAIN = {"gamma": 1.0, "lam": 1.0, "beta": 0.0, "whiten_advantages": False, "max_completion_length": 4}
ENDS, CUT = [5, 6, 1], [5, 6, 7, 8]


def by_row(experiences, name):
    """Return the entries at completion tokens of every row, shortest completions last."""
    rows = []
    for experience in experiences:
        mask = experience.pack.completion_mask
        rows += [getattr(experience, name)[i][mask[i]] for i in range(len(mask))]
    return rows


def rollout(tmp_path, *, scores=(3.0, 1.0), backend=None, value=0.0, **settings):
    """Return the experiences of one rollout of two rows with given scores, longest rows first."""
    settings = {"dataset": Dataset.from_dict({"prompt": ["the cat"] * 2}), "rollout_batch_size": 2, **settings}
    settings = {**PLAIN, "rollout_backend": backend or CannedBackend([CUT, ENDS]), **settings}
    trainer = make_trainer(tmp_path, reward=lambda prompts, **kw: list(scores), **settings)
    with torch.no_grad():
        trainer.model.value_head.linear.bias.fill_(value)
    return trainer.get_train_dataloader().make_rollout()


def check(rows, *expected):
    # float32 through a float64 scan.
    assert len(rows) == len(expected)
    for row, numbers in zip(rows, expected, strict=True):
        torch.testing.assert_close(row, torch.tensor(numbers), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("settings", "advantages", "returns"),
    [
        ({}, (3.0, 1.0), (3.0, 1.0)),
        # The cut row goes on with V = 2: return 3 + 2; the row that ended does not.
        ({"value": 2.0, "truncated_completions": "bootstrap"}, (3.0, -1.0), (5.0, 1.0)),
        ({"missing_eos_penalty": 0.5}, (2.5, 1.0), (2.5, 1.0)),
        # 3 - 1 * 4/4 and 1 - 1 * 3/4.
        ({"length_penalty": 1.0}, (2.0, 0.25), (2.0, 0.25)),
    ],
    ids=["the score", "with the value behind a cut", "less the penalty of a cut", "less the penalty of the length"],
)
def test_what_a_row_earns_stands_at_its_last_token_and_reaches_every_token_before(
    tmp_path, settings, advantages, returns
):
    experiences = rollout(tmp_path, **settings)
    for name, (cut, ended) in (("advantages", advantages), ("returns", returns)):
        check(by_row(experiences, name), [cut] * 4, [ended] * 3)


def test_mask_leaves_a_cut_completion_out_of_the_loss_and_of_the_moments(tmp_path):
    settings = {"truncated_completions": "mask", "whiten_advantages": True, "gamma": 0.5}
    experiences = rollout(tmp_path, **settings)
    masks = by_row(experiences, "loss_mask")
    assert [m.tolist() for m in masks] == [[False] * 4, [True] * 3]
    # Of the row that ended: .25, .5, 1; mean .5833, unbiased variance (.1111 + .0069 + .1736) / 2 = .1458.
    advantages = by_row(experiences, "advantages")[1]
    expected = (torch.tensor([0.25, 0.5, 1.0]) - 7 / 12) / 0.1458333**0.5
    torch.testing.assert_close(advantages, expected, atol=1e-5, rtol=1e-5)


def test_normalize_scores_remembers_the_rollouts_before(tmp_path):
    given, settings = iter([[1.0, 3.0], [5.0, 7.0]]), {**PLAIN, "rollout_batch_size": 2, "normalize_scores": True}
    settings["rollout_backend"] = CannedBackend([ENDS])
    trainer = make_trainer(tmp_path, reward=lambda prompts, **kw: next(given), **settings)
    stream = trainer.get_train_dataloader()
    stream.make_rollout()
    # 1, 3, 5, 7: mean 4, sum of squares 9 + 1 + 1 + 9 = 20, variance 20/3.
    returns = stream.make_rollout()[0].returns[:, 0].sort().values
    torch.testing.assert_close(returns, torch.tensor([1.0, 3.0]) / (20 / 3) ** 0.5)


def test_whiten_rewards_scales_by_the_deviation_of_the_token_rewards_and_keeps_their_mean(tmp_path):
    # Token rewards 0 0 0 3 and 0 0 1: mean 4/7, sum of squares 10 - 16/7, over 6 gives variance 9/7.
    experiences = rollout(tmp_path, whiten_rewards=True)
    scale, mean = (9 / 7) ** -0.5, 4 / 7
    token = {r: (r - mean) * scale + mean for r in (0.0, 1.0, 3.0)}
    last = by_row(experiences, "advantages")
    assert last[0][3].item() == pytest.approx(token[3.0], rel=1e-5)
    assert last[1][2].item() == pytest.approx(token[1.0], rel=1e-5)
    assert last[1][0].item() == pytest.approx(token[1.0] + 2 * token[0.0], rel=1e-4)


def test_lam_is_for_advantages_and_lam_value_for_returns(tmp_path):
    # lambda 0: A = r + V' - V, so only the last token: 1 - 2 = -1 and 3 - 2 = 1. Returns at lambda 1: the score.
    experiences = rollout(tmp_path, value=2.0, lam=0.0, lam_value=1.0)
    check(by_row(experiences, "advantages"), [0.0, 0.0, 0.0, 1.0], [0.0, 0.0, -1.0])
    check(by_row(experiences, "returns"), [3.0] * 4, [1.0] * 3)
    experiences = rollout(tmp_path, value=2.0, lam=1.0, lam_value=0.0)
    check(by_row(experiences, "advantages"), [1.0] * 4, [-1.0] * 3)
    check(by_row(experiences, "returns"), [2.0, 2.0, 2.0, 3.0], [2.0, 2.0, 1.0])


def test_whiten_advantages_over_the_whole_rollout(tmp_path):
    experiences = rollout(tmp_path, whiten_advantages=True, per_device_train_batch_size=1)
    values = torch.cat(by_row(experiences, "advantages"))
    assert len(experiences) == 2 and len(values) == 7
    assert values.mean().item() == pytest.approx(0, abs=1e-6)
    assert values.std().item() == pytest.approx(1, abs=1e-4)


def moved_policy(trainer):
    """Give the policy an adapter that is not zero, so that its KL to the base is not either."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in adapter_parameters(trainer.model, POLICY).items():
        if "lora_B" in name:
            parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator)


def test_the_kl_is_taken_off_the_reward_of_its_token(tmp_path):
    settings = {**PLAIN, "beta": 0.5, "rollout_batch_size": 2}
    trainer = make_trainer(tmp_path, reward=lambda prompts, **kw: [3.0, 1.0], **settings)
    moved_policy(trainer)
    for e in trainer.get_train_dataloader().make_rollout():
        kl = (e.old_logprobs - e.ref_logprobs) * e.pack.completion_mask
        assert kl.abs().max() > 1e-2
        later = kl.flip(1).cumsum(1).flip(1)
        score = (e.advantages + 0.5 * later)[:, 0]
        assert sorted(score.tolist()) == pytest.approx([1.0, 3.0], abs=1e-5)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_with_kl_in_loss_the_reward_is_the_score_alone(tmp_path, estimator):
    settings = {**PLAIN, "beta": 0.5, "kl_in_loss": True, "kl_estimator": estimator}
    trainer = make_trainer(tmp_path, reward=lambda prompts, **kw: [3.0] * 4, **settings)
    moved_policy(trainer)
    advantages = torch.cat(by_row(trainer.get_train_dataloader().make_rollout(), "advantages"))
    assert torch.equal(advantages, torch.full_like(advantages, 3.0))


def test_kl_target_moves_beta_by_the_rule_of_ziegler(tmp_path):
    settings = {"beta": 0.5, "kl_target": 2.0, "kl_horizon": 40, "num_rollouts": 3, "num_ppo_epochs": 2}
    trainer = trained(tmp_path, **settings)
    beta, kl = logged(trainer, "kl/beta"), logged(trainer, "kl/ref")
    # The KL of the first rollout is 0: the error is clipped to -.2; 4 completions of a horizon of 40.
    assert beta[:2] == pytest.approx([0.5, 0.5 * (1 - 0.2 * 4 / 40)])
    error = max(-0.2, min(0.2, kl[1] / 2.0 - 1))
    assert beta[2] == pytest.approx(beta[1] * (1 + error * 4 / 40))


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_the_loss_of_a_rollout_has_the_kl_with_the_beta_that_is_logged_for_it(tmp_path, estimator):
    settings = {"beta": 0.5, "kl_target": 1e-3, "kl_horizon": 4, "kl_in_loss": True, "kl_estimator": estimator}
    trainer = make_trainer(tmp_path, num_rollouts=2, num_ppo_epochs=2, **settings)
    moved_policy(trainer)
    trainer.train()
    beta = [b for b in logged(trainer, "kl/beta") for _ in range(2)]
    figures = zip(*(logged(trainer, n) for n in ("loss", "policy/loss", "kl/loss")), beta, strict=True)
    assert beta[2] > 1.1 * beta[0]
    for loss, policy, kl, coefficient in figures:
        assert kl > 1e-3 and loss == pytest.approx(policy + coefficient * kl, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("is_canned", [True, False])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_padding_with_the_end_token_gives_the_same_experiences_bit_by_bit(tmp_path, family, is_canned):
    # Completions with an end token inside the pack's width, and one that is cut.
    backend = CannedBackend([[5, 6, 1], [7, 8, 9, 10, 11, 12], [1], [5, 1]]) if is_canned else None
    made, pad_ids = [], []
    for pad_token in ("<pad>", "<eos>"):
        tokenizer = tiny_tokenizer()
        tokenizer.pad_token = pad_token
        settings = {"beta": 0.5, "per_device_train_batch_size": 4, "truncated_completions": "bootstrap"}
        trainer = make_trainer(
            tmp_path, model=family, dataset=prompts(4), rollout_backend=backend, tokenizer=tokenizer, **settings
        )
        moved_policy(trainer)
        # Unequal weights: the states behind a LayerNorm without shift sum to zero, and equal weights would read that.
        weight = trainer.model.value_head.linear.weight
        with torch.no_grad():
            weight.copy_(torch.linspace(-0.2, 0.4, weight.numel()).view_as(weight))
        made.append(trainer.get_train_dataloader().make_rollout())
        pad_ids.append([e.pack.input_ids[e.pack.attention_mask == 0].unique().tolist() for e in made[-1]])
    assert pad_ids == [[[0]], [[1]]]
    for plain, same in zip(*made, strict=True):
        assert torch.equal(plain.pack.completion_mask, same.pack.completion_mask)
        for name in ("old_logprobs", "old_values", "advantages", "returns", "ref_logprobs"):
            assert torch.equal(getattr(plain, name), getattr(same, name)), name
            assert getattr(plain, name).abs().max() > 1e-2
