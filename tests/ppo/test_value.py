"""The value: how its head is fitted, what its metrics say, and what a cut completion is bootstrapped with."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator

from onetrunk.models.value_head import ValueHead
from onetrunk.ops.packing import make_pack
from onetrunk.ppo.experience import ExperienceStream
from onetrunk.ppo.monitoring.alarm_rules import RULES
from onetrunk.ppo.monitoring.alarms import useless_rollouts
from onetrunk.ppo.monitoring.metrics import value_metrics
from onetrunk.ppo.packs import RolloutPack
from onetrunk.ppo.value_fit import BATCH_SIZE, FULL_ROLLOUT, ValueFit
from onetrunk.types import Experience, PackOutput
from tests.ppo.support import Recorder, differ, logged, make_config, make_trainer, trained
from tests.ppo.test_episodes_in_training import Words, words_trainer


class Processes:
    """Processes that are threads of this one; `sum` adds what all of them pass, in their order."""

    def __init__(self, count=1):
        self.barrier, self.parts, self.num_sums = threading.Barrier(count), {}, 0
        self.num_processes = count

    def sum(self, tensor):
        self.parts[threading.get_ident()] = tensor.clone()
        self.barrier.wait(timeout=60)
        total = sum(self.parts[thread] for thread in sorted(self.parts))
        self.num_sums += self.barrier.wait(timeout=60) == 0
        return total


def a_pack_of(states, returns, lengths, trains=None):
    """Return what is fitted of one pack: completions of given lengths with values to be read off the states [K, H]."""
    pack = make_pack([[5]] * len(lengths), [[6] * length for length in lengths], 0)
    mask = pack.completion_mask
    targets = torch.zeros(mask.shape).masked_scatter(mask, returns)
    loss_mask = mask if trains is None else mask & torch.tensor(trains)[:, None]
    item = RolloutPack(pack, list(range(len(lengths))), None, output=PackOutput(value_states=states))
    zeros = torch.zeros(mask.shape)
    return [item], [Experience(pack, loss_mask, zeros, zeros, zeros, targets)]


def data(num_tokens, seed=0):
    states = torch.randn(num_tokens, 8, generator=torch.Generator().manual_seed(seed))
    return states, states[:, 0].abs() + 2


def fit_of(tmp_path, rows=FULL_ROLLOUT, processes=None):
    head = ValueHead(8, 16).requires_grad_(False)
    return ValueFit(head, make_config(tmp_path, rollout_batch_size=rows), processes or Processes())


def test_tokens_that_do_not_train_have_no_part_in_the_fit(tmp_path):
    states, returns = data(40)
    spoiled = torch.cat([returns[:30], torch.full((10,), torch.inf)])
    heads = []
    for lengths, targets, trains in (([30, 10], spoiled, [True, False]), ([30], returns[:30], None)):
        fit = fit_of(tmp_path)
        fit.fit(*a_pack_of(states[: sum(lengths)], targets, lengths, trains), list(range(len(lengths))), 0)
        heads.append(fit.head)
    for own, expected in zip(heads[0].parameters(), heads[1].parameters(), strict=True):
        assert torch.equal(own, expected)


def test_two_processes_fit_as_one_does(tmp_path):
    states, returns = data(60)
    alone, processes = fit_of(tmp_path), Processes(2)
    alone.fit(*a_pack_of(states, returns, [10, 20, 30]), [0, 1, 2], 0)
    fits = [fit_of(tmp_path, processes=processes) for _ in range(2)]
    second = (torch.cat([x[30:], x[:10]]) for x in (states, returns))
    parts = a_pack_of(states[10:30], returns[10:30], [20]), a_pack_of(*second, [30, 10])
    with ThreadPoolExecutor(2) as pool:
        errors = list(pool.map(lambda fit, part, rows: fit.fit(*part, rows, 0), fits, parts, ([1], [2, 0])))
    assert errors[0] == errors[1]
    for one, other, expected in zip(*(f.head.parameters() for f in (*fits, alone)), strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("rows", "tokens", "steps"),
    [(1, 1024, 1), (32, 1024, 10), (128, 1024, 40), (512, 1024, 40), (128, 64, 40 * 64 // BATCH_SIZE)],
)
def test_a_rollout_of_few_completions_or_few_tokens_gets_fewer_steps(tmp_path, rows, tokens, steps):
    fit = fit_of(tmp_path, rows)
    fit.fit(*a_pack_of(*data(tokens), [tokens]), [0], 0)
    # One sum is that of the returns; 40 steps of 512 tokens would draw each of 64 tokens 320 times.
    assert fit.data_parallel.num_sums - 1 == steps


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_the_head_learns_what_is_not_linear_in_the_states_at_any_scale_of_the_returns(tmp_path, scale):
    (states, returns), fit = data(600), fit_of(tmp_path)
    packs = a_pack_of(states, returns * scale, [300, 300])
    errors = [fit.fit(*packs, [0, 1], i) for i in range(8)]
    assert errors[-1] < 0.5 * errors[0]
    assert (fit.head(states) / scale - returns).square().mean() < 0.5 * returns.var()
    assert not any(p.requires_grad or p.grad is not None for p in fit.head.parameters())


def test_new_moments_change_no_value_except_those_of_a_new_head():
    states, _ = data(20)
    head = ValueHead(8, 16)
    head.rescale(3.0, 2.0)
    assert torch.equal(head(states), torch.full((20,), 3.0))
    torch.nn.init.normal_(head.linear.weight)
    before = head(states)
    head.rescale(-40.0, 0.5)
    torch.testing.assert_close(head(states), before, atol=1e-4, rtol=1e-5)


def test_returns_that_are_all_equal_are_learnt_without_a_scale(tmp_path):
    states, fit = data(30)[0], fit_of(tmp_path)
    fit.fit(*a_pack_of(states, torch.full((30,), 7.0), [30]), [0], 0)
    assert (fit.head(states) - 7).abs().max() < 0.1


def test_a_head_of_another_size_is_refused(tmp_path):
    ValueHead(8, 16).save(tmp_path)
    with pytest.raises(ValueError, match="it was trained on another base model"):
        ValueHead(9, 16).load(tmp_path)


def test_how_well_values_predict_and_what_they_take_from_the_variance_by_hand():
    pack = make_pack([[5]] * 2, [[6, 7], [8]], 0)
    mask = pack.completion_mask
    values, returns = torch.tensor([[1.0, 2.0], [5.0, 9.0]]), torch.tensor([[2.0, 4.0], [9.0, 9.0]])
    plain = torch.tensor([[3.0, 4.0], [9.0, 7.0]])
    experience = Experience(pack, mask, values, values, returns - values, values)
    found = value_metrics([experience], [returns], [plain], Accelerator(cpu=True))
    # Observed returns 2, 4, 9: mean 5, squares 9 + 1 + 16 = 26. Errors 1, 2, 4: mean 7/3, squares 21 - 49/3 = 14/3.
    assert found["value/explained_variance"] == pytest.approx(1 - (14 / 3) / 26)
    # Without a critic 3, 4, 9: mean 16/3, squares 106 - 256/3 = 62/3.
    assert found["value/variance_ratio"] == pytest.approx((14 / 3) / (62 / 3))
    same = torch.ones_like(returns)
    assert math.isnan(value_metrics([experience], [same], [plain], Accelerator(cpu=True))["value/explained_variance"])


LENGTHS = (12, 35, 128, 512)
SETTINGS = (
    {"lam": 0.95},
    {"length_adaptive_lam": 0.05},
    {"lam": 0.9, "gae_unit": "turn"},
    {"lam": 0.95, "lam_value": 1.0, "truncated_completions": "bootstrap"},
)


def of_critic(stream, length, values_of):
    """Return the value metrics of 64 rows whose score arrives at the end, under a critic; rows have four turns."""
    draw = torch.Generator().manual_seed(length)
    pack = make_pack([[5]] * 64, [[6] * length] * 64, 0, turn_ids=[[4 * t // length for t in range(length)]] * 64)
    scores, mask = torch.randn(64, generator=draw), pack.completion_mask
    values = values_of(scores, torch.randn(64, length, generator=draw))
    output = PackOutput(logprobs=torch.zeros(64, length), values=values, next_values=values[:, -1])
    # A KL per token of about what a run has.
    rewards = 0.01 * torch.randn(64, length, generator=draw)
    rewards[:, -1] += scores
    item = RolloutPack(pack, list(range(64)), None, output=output, rewards=rewards, loss_mask=mask)
    rows = SimpleNamespace(stopped=torch.arange(64) % 4 > 0)
    experiences = stream.add_advantages([item], rows)
    return value_metrics(experiences, *stream.without_critic([item], rows), Accelerator(cpu=True))


CRITICS = {
    "zeros": lambda scores, noise: torch.zeros_like(noise),
    "noise": lambda scores, noise: noise,
    "knows the score": lambda scores, noise: scores[:, None].expand_as(noise),
}


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_critic_of_zeros_or_noise_is_seen_at_any_length_and_one_that_knows_the_score_too(tmp_path, settings):
    stream = make_trainer(tmp_path, **settings).get_train_dataloader()
    for length in LENGTHS:
        dead, wild, good = (of_critic(stream, length, kind) for kind in CRITICS.values())
        assert dead == {"value/explained_variance": pytest.approx(0, abs=1e-6), "value/variance_ratio": 1.0}
        assert wild["value/explained_variance"] < 0
        assert good["value/explained_variance"] > 0.7 and good["value/variance_ratio"] < 0.5
        for metrics, is_useless in ((dead, True), (wild, True), (good, False)):
            values = [metrics["value/explained_variance"]] * 8
            assert bool(useless_rollouts(values, 8, RULES["useless_values"].limit)[0]) == is_useless


def test_the_first_values_of_a_run_have_ratio_one_however_scores_and_rewards_are_scaled(tmp_path):
    scaled = {"normalize_scores": True, "whiten_rewards": True, "beta": 0.5, "length_penalty": 0.1, "lam": 0.9}
    trainer = trained(tmp_path, num_rollouts=1, **scaled)
    assert logged(trainer, "value/variance_ratio") == [1.0]
    assert logged(trainer, "value/explained_variance") == [pytest.approx(0, abs=1e-6)]


def test_the_head_is_fitted_between_rollouts_and_pretraining_keeps_the_policy(tmp_path):
    recorder = Recorder()
    settings = {"num_rollouts": 3, "num_ppo_epochs": 3, "value_pretraining_rollouts": 1, "weight_decay": 0.1}
    trainer = trained(tmp_path, callbacks=[recorder], **settings)
    first, head = recorder.first, trainer.model.value_head
    assert all("lora_" in name and ".default." in name for name in first)
    assert differ(recorder.weights[2], first) == set()
    assert differ(recorder.weights[-1], first) == set(first)
    assert head.linear.weight.any() and not any(p.requires_grad for p in head.parameters())
    assert trainer.state.global_step == 9 and len(logged(trainer, "policy/loss")) == 6
    assert len(logged(trainer, "value/loss")) == 3 and not any(logged(trainer, "policy/skipped_steps"))


def test_the_first_values_are_zero_and_later_ones_explain_returns_that_can_be_known(tmp_path):
    def of_the_prompt(prompts, **kwargs):
        return [float(len(prompt)) for prompt in prompts]

    settings = {"num_rollouts": 8, "rollout_batch_size": 128, "beta": 0.0, "learning_rate": 1e-6}
    trainer = trained(tmp_path, reward=of_the_prompt, **settings)
    explained, ratio = logged(trainer, "value/explained_variance"), logged(trainer, "value/variance_ratio")
    # Zeros explain nothing; after a while the prompt says what the return will be.
    assert explained[0] == 0 and min(explained[4:]) > 0.3
    assert max(ratio[4:]) < 0.7


class OneIsLeft(Words):
    """Ends with the reward 1 after three turns; half of the episodes are cut before, after the first or second."""

    def step(self, action):
        observation, *_ = super().step(action)
        is_over = self.turn == 3
        return observation, float(is_over), is_over, self.seed % 4 == self.turn, {}


class KeepsAfter(ExperienceStream):
    """Keeps what cut rows are bootstrapped with."""

    def advantages(self, pack, output, rewards, stopped):
        if output.values.any():  # Not those of the comparison with a critic of zeros.
            self.trainer.after.append(output.next_values[~stopped])
        return super().advantages(pack, output, rewards, stopped)


@pytest.mark.parametrize("gae_unit", ["token", "turn"])
def test_the_value_after_a_cut_between_turns_is_what_is_left(tmp_path, gae_unit):
    # From every state the rest is worth 1, so every value is.
    settings = {"truncated_completions": "bootstrap", "gamma": 1.0, "lam": 1.0, "beta": 0.0, "learning_rate": 0.0}
    settings |= {"rollout_batch_size": 16, "num_rollouts": 6, "num_minibatches": 1, "num_ppo_epochs": 1}
    # As many steps of the value as a rollout of 128 completions has.
    settings |= {"max_completion_length": 40, "value_steps": 160}
    trainer = words_trainer(tmp_path, OneIsLeft, gae_unit=gae_unit, **settings)
    trainer.stream_class, trainer.after = KeepsAfter, []
    trainer.train()
    after = torch.cat(trainer.after[-(len(trainer.after) // 6) :])
    # Never fitted, it stays near 0.
    assert len(after) > 4
    assert abs(after.mean() - 1) < 0.15 and after.std() < 0.15, (after.mean(), after.std())


class Observes(ExperienceStream):
    """Keeps the returns that the metrics observe, and those that the value is fitted to, where values train."""

    def add_advantages(self, packs, sampled):
        experiences = super().add_advantages(packs, sampled)
        observed, _ = self.without_critic(packs, sampled)
        for returns, experience in zip(observed, experiences, strict=True):
            self.trainer.returns.append(
                (returns[experience.value_tokens], experience.returns[experience.value_tokens])
            )
        return experiences


@pytest.mark.parametrize("gae_unit", ["token", "turn"])
@pytest.mark.parametrize("truncated", ["bootstrap", "terminal"])
def test_with_lam_1_the_metrics_observe_the_returns_of_the_fit_wherever_values_train(tmp_path, gae_unit, truncated):
    settings = {"truncated_completions": truncated, "gamma": 0.9, "lam": 1.0, "beta": 0.1, "max_completion_length": 40}
    trainer = words_trainer(tmp_path, OneIsLeft, gae_unit=gae_unit, rollout_batch_size=16, **settings)
    trainer.stream_class, trainer.returns = Observes, []
    trainer.train()
    assert trainer.returns
    for observed, fitted in trainer.returns:
        torch.testing.assert_close(observed, fitted)
