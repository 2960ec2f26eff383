"""Samples of another distribution than the trainer's, an older or a truncated one: weights, `dis`, what is logged."""

import math
from dataclasses import replace

import pytest
import torch
from datasets import Dataset

from onetrunk.models.trunk import TrunkModel
from onetrunk.ppo.experience import ExperienceStream
from onetrunk.rollouts.base import VersionedBackend
from onetrunk.rollouts.local import LocalBackend
from tests.fakes import CannedBackend, CopyBackend
from tests.ppo import support
from tests.ppo.support import SGD, base_model, logged, lora, make_trainer, prompts, trained, trained_weights
from tests.ppo.test_schedules import ahead, sampler
from tests.ppo.test_shaping import moved_policy
from tests.tiny import tiny_tokenizer

ESS, CLIPPED = "sampling/effective_sample_size", "sampling/clipped_weights"


class Shifted(CopyBackend):
    """Reports logprobs that are too large by `shift`; with `turns` every second token's is too small instead."""

    def __init__(self, shift, turns=False):
        super().__init__(TrunkModel(base_model(), lora()))
        self.shift, self.turns = shift, turns

    def generate_as(self, *args):
        rollout = super().generate_as(*args)
        shifted = []
        for logprobs in rollout.sampler_logprobs:
            signs = (-1.0) ** torch.arange(len(logprobs)) if self.turns else torch.ones(len(logprobs))
            shifted.append(logprobs + self.shift * signs)
        return replace(rollout, sampler_logprobs=shifted)


def recorded(folder, backend, **settings):
    """Return a trainer that has trained, and the experiences of all its rollouts."""
    made = []

    class Recording(ExperienceStream):
        def make_rollout(self):
            experiences = super().make_rollout()
            made.extend(experiences)
            return experiences

    trainer = make_trainer(folder, rollout_backend=backend, **settings)
    trainer.stream_class = Recording
    trainer.train()
    return trainer, made


def test_a_known_shift_of_the_logprobs_gives_the_known_weights(tmp_path):
    # The sampler claims twice the probability, so each token weighs 1/2: all equal, which is an effective share of 1.
    trainer, experiences = recorded(tmp_path, Shifted(math.log(2)), num_rollouts=2)
    for experience in experiences:
        mask = experience.pack.completion_mask
        torch.testing.assert_close(experience.weights, 0.5 * mask, atol=1e-4, rtol=0)
    assert logged(trainer, ESS) == pytest.approx([1, 1], abs=1e-4)
    assert logged(trainer, CLIPPED) == [0, 0]
    gap = "sampling/logprob_gap_"
    for name in (f"{gap}mean", f"{gap}max"):
        assert logged(trainer, name) == pytest.approx([math.log(2)] * 2, abs=1e-4)


@pytest.mark.parametrize(("mode", "large"), [("token_truncate", 2.0), ("token_mask", 0.0)])
def test_bounds_apply_by_mode_and_are_logged(tmp_path, mode, large):
    # Ratios are 1/4 and 4 in turns; 4 is beyond the bound 2.
    prefix = "vllm_importance_sampling"
    settings = {f"{prefix}_mode": mode, f"{prefix}_clip_max": 2.0}
    trainer, experiences = recorded(tmp_path, Shifted(math.log(4), turns=True), **settings)
    weights, clipped = [], 0
    for experience in experiences:
        mask = experience.loss_mask
        odd = (torch.arange(mask.shape[1]) % 2 == 1).expand_as(mask)
        expected = torch.where(odd, large, 0.25) * mask
        torch.testing.assert_close(experience.weights, expected, atol=1e-3, rtol=0)
        weights += expected[mask].tolist()
        clipped += int((odd & mask).sum())
    share = sum(weights) ** 2 / (len(weights) * sum(w * w for w in weights))
    assert logged(trainer, ESS) == pytest.approx([share], abs=1e-3)
    assert logged(trainer, CLIPPED) == pytest.approx([clipped / len(weights)])


class EvenDraws(CannedBackend):
    """Draws each of some tokens once, as completions of one token, and says that all were equally likely."""

    def generate(self, prompt_ids, params, keys):
        rows = super().generate(prompt_ids, params, keys)
        logprob = -math.log(len(self.completions))
        return replace(rows, sampler_logprobs=[torch.tensor([logprob]) for _ in rows.completion_ids])


@pytest.mark.parametrize("top_p", [1.0, 0.7])
def test_the_kl_of_a_rollout_is_that_of_the_policy_whatever_sampled_it(tmp_path, top_p):
    """The sampler draws each of its tokens once, so the mean over the rollout is its exact mean.

    If it draws from the whole vocabulary, as older weights do, the KL is exact. If it draws from a nucleus, the part
    of the tokens outside is missing.
    """
    trainer = make_trainer(tmp_path / "exact")
    moved_policy(trainer)
    prompt = prompts(1)
    ids = torch.tensor([tiny_tokenizer()(prompt["prompt"][0])["input_ids"]])
    with torch.no_grad():
        policy = trainer.model(input_ids=ids).logits[0, -1].log_softmax(-1)
        with trainer.model.as_role("reference"):
            k1 = policy - trainer.model(input_ids=ids).logits[0, -1].log_softmax(-1)
    order = policy.argsort(descending=True)
    before = policy[order].exp().cumsum(0) - policy[order].exp()
    kept, left = order[before < top_p], order[before >= top_p]
    exact, missing, unweighted = ((policy.exp() * k1).sum(), (policy.exp() * k1)[left].sum(), k1[kept].mean())

    settings = {"top_p": top_p, "rollout_batch_size": len(kept), "dataset": prompt}
    settings |= {"eval_dataset": Dataset.from_dict({"prompt": prompt["prompt"][:] * len(kept)})}
    settings |= {"vllm_importance_sampling_correction": True, "vllm_importance_sampling_clip_max": 1e4}
    trainer = make_trainer(tmp_path, rollout_backend=EvenDraws([[int(token)] for token in kept]), **settings)
    moved_policy(trainer)
    evaluated = trainer.evaluate()["eval_kl/ref"]
    trainer.train()
    (kl,) = logged(trainer, "kl/ref")
    assert exact > 0.1 and kl == pytest.approx((exact - missing).item(), abs=1e-5)
    assert abs(unweighted - exact) > 3 * abs(kl - exact)
    # An evaluation samples from the weights that it measures, so only truncation needs weights.
    assert evaluated == pytest.approx(kl if top_p < 1 else unweighted.item(), abs=1e-5)


# --- role and version ------------------------------------------------------------------------------------------


def test_a_versioned_backend_is_asked_by_role_and_version(tmp_path):
    backend = Shifted(0.0)
    assert isinstance(backend, VersionedBackend) and not isinstance(LocalBackend(), VersionedBackend)
    trainer = make_trainer(
        tmp_path, rollout_backend=backend, eval_dataset=prompts(3), num_rollouts=2, num_ppo_epochs=2, eval_steps=3,
        eval_strategy="steps",
    )  # fmt: skip
    before = trainer.evaluate_reference()
    trainer.train()
    after = trainer.evaluate()
    assert [(role, version) for role, version, _ in backend.calls] == [
        ("reference", 0), ("policy", 0), ("policy", 2), ("policy", 3), ("policy", 4), ("policy", 4),
    ]  # fmt: skip
    # The same numbers as with the sampler that shares the trainer's weights.
    local = make_trainer(tmp_path / "local", eval_dataset=prompts(3), num_rollouts=2, num_ppo_epochs=2)
    assert local.evaluate_reference()["score/mean"] == before["score/mean"]
    local.train()
    assert local.evaluate()["eval_score/mean"] == pytest.approx(after["eval_score/mean"], abs=0.05)
    assert after["eval_sampling/logprob_gap_max"] < 1e-4


def test_samples_of_another_version_are_not_trained_on(tmp_path):
    class Late(Shifted):
        def generate_as(self, *args):
            return replace(super().generate_as(*args), policy_version=7)

    trainer = make_trainer(tmp_path, rollout_backend=Late(0.0))
    support.require_refusal(trainer, RuntimeError, "samples of policy version 7, and version 0 was asked for")


# --- truncated sampling ----------------------------------------------------------------------------------------


def test_a_token_weighs_what_its_nucleus_has_of_the_vocabulary_and_the_first_ratio_is_1(tmp_path):
    trainer, experiences = recorded(tmp_path, None, top_k=3, num_rollouts=2, num_ppo_epochs=2, temperature=0.8)
    # Of the first rollout, when the policy is still the base.
    first = experiences[: len(experiences) // 2]
    base = make_trainer(tmp_path / "base").model
    for experience in first:
        pack, mask = experience.pack, experience.pack.completion_mask
        for row, length in enumerate(mask.sum(1).tolist()):
            real = pack.attention_mask[row].bool()
            ids = pack.input_ids[row][real]
            with torch.no_grad():
                logits = base(input_ids=ids[None]).logits[0, len(ids) - length - 1 : -1]
            share = (logits / 0.8).softmax(-1).topk(3).values.sum(-1)
            assert share.max() < 0.9
            torch.testing.assert_close(experience.weights[row, :length], share, atol=1e-4, rtol=0)
    # No weight is above 1, so none is clipped.
    assert logged(trainer, CLIPPED) == [0, 0]
    assert all(0.5 < share < 1 for share in logged(trainer, ESS))
    # The mean of -log S.
    gap = -torch.cat([e.weights[e.pack.completion_mask].log() for e in first]).mean().item()
    assert logged(trainer, "sampling/logprob_gap_mean")[0] == pytest.approx(gap, abs=1e-4)
    assert logged(trainer, "policy/ratio_max")[0] == 1.0


def test_evaluations_are_truncated_as_training_is(tmp_path):
    calls = []

    class Recording(LocalBackend):
        def generate(self, prompt_ids, params, keys, **keywords):
            calls.append((params.top_p, params.top_k))
            return super().generate(prompt_ids, params, keys, **keywords)

    make_trainer(tmp_path, rollout_backend=Recording(), eval_dataset=prompts(3), top_p=0.7, top_k=4).evaluate()
    assert calls == [(0.7, 4)]


# --- policy_objective dis --------------------------------------------------------------------------------------


def test_on_samples_of_the_policy_itself_the_first_step_of_dis_is_that_of_ppo(tmp_path):
    runs = [trained(tmp_path / name, policy_objective=name, **SGD) for name in ("clip", "dis")]
    # The sampler's logprobs are those of decoding, which round differently.
    clip, dis = (trained_weights(run.model) for run in runs)
    assert all(torch.allclose(clip[name], dis[name], atol=2e-5) for name in clip)
    assert logged(runs[1], "policy/masked_below") == logged(runs[1], "policy/masked_above") == [0]


@pytest.mark.parametrize(("high", "above"), [(5.0, 0.0), (2.5, 1.0)])
def test_the_ratio_of_dis_is_that_to_the_sampler_and_what_is_out_of_bounds_is_logged(tmp_path, high, above):
    # The sampler claims 4 times the probability of every other token and a quarter of the rest: ratios 1/4 and 4.
    backend = Shifted(math.log(4), turns=True)
    trainer, experiences = recorded(tmp_path, backend, policy_objective="dis", dis_epsilon_high=high)
    assert all(experience.weights is None for experience in experiences)
    masks = [experience.loss_mask for experience in experiences]
    even = sum(int(mask[:, ::2].sum()) for mask in masks) / sum(int(mask.sum()) for mask in masks)
    assert 0 < even < 1
    assert logged(trainer, "policy/masked_below") == pytest.approx([even])
    assert logged(trainer, "policy/masked_above") == pytest.approx([above * (1 - even)])
    outside = even + above * (1 - even)
    assert logged(trainer, "policy/clip_fraction") == pytest.approx([outside])
    assert logged(trainer, "sampling/masked_at_staleness_0") == pytest.approx([outside])
    assert "sampling/effective_sample_size" not in trainer.state.log_history[0]


def test_dis_compares_rows_sampled_ahead_with_the_version_that_drew_them(tmp_path):
    trainer = ahead(tmp_path, sampler(), "async", max_staleness=2, policy_objective="dis")
    trainer.train()
    names = {name for log in trainer.state.log_history for name in log if name.startswith("sampling/masked_at")}
    assert {f"sampling/masked_at_staleness_{age}" for age in (0, 1, 2)} == names
    fresh, *_, stale = logged(trainer, "sampling/staleness_max")
    assert (fresh, stale) == (0, 2)
