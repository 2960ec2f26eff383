"""Advantages and ratios of episodes: observations are skipped, borders cut no credit, a turn may be one action.

T is a token that was sampled, O an observation; a row of two turns is T T O T T.
"""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from onetrunk.ops import gae, policy_loss
from onetrunk.ops.advantages import turn_gae, with_cut_targets
from onetrunk.ops.losses import ppo_loss
from onetrunk.ops.masking import sum_over_turns
from onetrunk.ops.packing import make_pack
from onetrunk.types import Experience, LossCoefficients, Pack, PackOutput
from tests.ops.test_advantages import GAMMAS, LAMS
from tests.ops.test_losses import EXACT, many

TWO_TURNS = torch.tensor([[0, 0, -1, 1, 1]])


@st.composite
def episodes(draw):
    """Rows of turns with observations between some of them; what stands at observations and padding is random too."""
    rows, width = draw(st.integers(1, 4)), draw(st.integers(1, 24))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 9999)))
    # A turn begins at some tokens, also without an observation before it; its number may leave others out.
    turns = (torch.rand(rows, width, generator=generator) < 0.3).long().cumsum(1) * 2
    is_given = torch.rand(rows, width, generator=generator) < draw(st.sampled_from([0.0, 0.4, 0.9]))
    turns = turns.masked_fill(is_given, -1)
    rewards, values = torch.randn(2, rows, width, generator=generator, dtype=torch.float64)
    bootstrap = torch.randn(rows, generator=generator, dtype=torch.float64)
    return SimpleNamespace(rewards=rewards, values=values, turns=turns, mask=turns >= 0, bootstrap=bootstrap)


def turn_gae_reference(rewards, values, mask, gamma, lam, bootstrap_values=None, *, turn_ids):
    """Return what `turn_gae` returns, by the recursion over turns: its naive twin."""
    rows = len(rewards)
    lams = lam.tolist() if isinstance(lam, torch.Tensor) else [lam] * rows
    advantages, returns = torch.zeros_like(rewards), torch.zeros_like(rewards)
    for row in range(rows):
        turns = {}
        for t in mask[row].nonzero().flatten().tolist():
            turns.setdefault(turn_ids[row, t].item(), []).append(t)
        advantage, following = 0.0, 0.0 if bootstrap_values is None else bootstrap_values[row].item()
        for tokens in reversed(turns.values()):
            value = values[row, tokens[0]].item()
            delta = sum(rewards[row, t].item() for t in tokens) + gamma * following - value
            advantage = delta + gamma * lams[row] * advantage
            following = value
            advantages[row, tokens], returns[row, tokens[0]] = advantage, advantage + value
    return advantages, returns


def row_of(*numbers):
    return torch.tensor([numbers], dtype=torch.float64)


def test_advantages_of_two_turns_by_hand():
    # gamma .5, lam .5; V 2 and 4 at the starts, 8 after the row. R_0 = 1 + 2, R_1 = -1 + 4.
    # delta_1 = 3 + .5 * 8 - 4 = 3, delta_0 = 3 + .5 * 4 - 2 = 3; A_1 = 3, A_0 = 3 + .25 * 3 = 3.75.
    rewards, values = row_of(1, 2, 9, -1, 4), row_of(2, 7, 7, 4, 7)
    for function in (turn_gae, turn_gae_reference):
        advantages, returns = function(
            rewards, values, TWO_TURNS >= 0, 0.5, 0.5, torch.tensor([8.0]), turn_ids=TWO_TURNS
        )
        assert advantages.tolist() == [[3.75, 3.75, 0, 3, 3]]
        assert returns.tolist() == [[5.75, 0, 0, 7, 0]]  # A + V, at the first token of each turn


@many
@given(e=episodes(), gamma=GAMMAS, data=st.data())
def test_advantages_of_turns_are_those_of_the_loop(e, gamma, data):
    lam = torch.tensor([data.draw(LAMS) for _ in e.mask], dtype=torch.float64)
    inputs = (e.rewards, e.values, e.mask, gamma, lam, data.draw(st.sampled_from([None, e.bootstrap])))
    found = zip(turn_gae(*inputs, turn_ids=e.turns), turn_gae_reference(*inputs, turn_ids=e.turns), strict=True)
    for ours, loop in found:
        assert_close(ours, loop, **EXACT)


@many
@given(e=episodes(), gamma=GAMMAS, lam=LAMS)
def test_an_episode_of_one_turn_is_a_bandit_with_a_baseline(e, gamma, lam):
    turns = torch.where(e.mask, 0, -1)
    advantages, returns = turn_gae(e.rewards, e.values, e.mask, gamma, lam, e.bootstrap, turn_ids=turns)
    for row, kept in enumerate(e.mask):
        if kept.any():
            target = e.rewards[row, kept].sum() + gamma * e.bootstrap[row]
            assert_close(advantages[row, kept], (target - e.values[row, kept][0]).expand(kept.sum()), **EXACT)
            assert_close(returns[row, kept][0], target, **EXACT)


def loop_over_turns(logprobs, old_logprobs, advantages, mask, turns, dual_clip, weights):
    """The clipped loss with the ratio of turns, turn by turn; epsilon .2 and .3."""
    terms = []
    for row, kept in enumerate(mask):
        for number in sorted(set(turns[row, kept].tolist())):
            tokens = [t for t in kept.nonzero().flatten().tolist() if turns[row, t] == number]
            logs = [logprobs[row, t] - old_logprobs[row, t] for t in tokens]
            ratio = torch.stack(logs).mean().exp()
            for t in tokens:
                advantage = advantages[row, t]
                term = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.3))
                if dual_clip is not None and advantage < 0:
                    term = torch.minimum(term, -advantage * dual_clip)
                terms.append(term * weights[row, t])
    return sum(terms) / max(1, len(terms))


@many
@given(e=episodes(), dual_clip=st.sampled_from([None, 1.5]))
def test_the_loss_and_its_gradient_with_ratios_of_turns_are_those_of_the_loop(e, dual_clip):
    logprobs = (0.5 * e.rewards).requires_grad_()
    old, advantages, weights = 0.5 * e.values, e.rewards * e.values, e.values.exp()
    loss, _ = policy_loss(logprobs, old, advantages, e.mask, 0.2, 0.3, dual_clip, weights, turn_ids=e.turns)
    expected = loop_over_turns(logprobs, old, advantages, e.mask, e.turns, dual_clip, weights)
    assert_close(loss, torch.as_tensor(expected, dtype=loss.dtype), **EXACT)
    if e.mask.any():
        assert_close(torch.autograd.grad(loss, logprobs), torch.autograd.grad(expected, logprobs), **EXACT)


def test_ratios_of_turns_by_hand():
    # Turn 0: ratios 2 and .5, whose geometric mean is 1; turn 1: 2 and 2. A = 1: -1, -1, and 1.2 instead of 2 twice.
    logprobs = row_of(2, 0.5, 9, 2, 2).log().requires_grad_()
    ones, zeros = torch.ones(1, 5).double(), torch.zeros(1, 5).double()
    loss, stats = policy_loss(logprobs, zeros, ones, TWO_TURNS >= 0, 0.2, turn_ids=TWO_TURNS)
    loss.backward()
    assert loss.item() == pytest.approx(-4.4 / 4) and stats["clip_fraction"] == 0.5
    assert stats["ratio_max"].item() == pytest.approx(2)
    # As of single tokens: (2 - 1 - ln 2) three times, and .5 - 1 + ln 2.
    assert stats["approx_kl"].item() == pytest.approx((3 - 3 * math.log(2) - 0.5 + math.log(2)) / 4)
    # d(-2 r) / d(logprob) = -2 r / 2 at both tokens of turn 0; turn 1 is clipped.
    assert_close(logprobs.grad, row_of(-0.25, -0.25, 0, 0, 0), **EXACT)


@many
@given(e=episodes())
def test_the_first_ratio_of_turns_is_exactly_one_and_has_the_gradient_of_token_ratios(e):
    old = e.values.float()
    gradients = []
    for turn_ids in (None, e.turns):
        logprobs = old.clone().requires_grad_()
        # One advantage for all tokens of a turn, as turn_gae gives it.
        advantages = sum_over_turns(e.rewards, e.mask, e.turns).float()
        loss, stats = policy_loss(logprobs, old, advantages, e.mask, 0.2, turn_ids=turn_ids)
        loss.backward()
        gradients.append(logprobs.grad)
        assert stats["clip_fraction"] == stats["approx_kl"] == 0
        assert stats["ratio_max"] == float(e.mask.any())
    assert_close(*gradients, rtol=1e-6, atol=1e-6)


TRAINED = ("logprobs", "entropy")
CONSTANTS = ("old_logprobs", "old_values", "advantages", "returns", "ref_logprobs", "weights")


@pytest.mark.parametrize(("objective", "unit"), [("clip", "token"), ("clip", "turn"), ("dis", "token")])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_observations_have_no_part_in_any_term_of_the_loss(objective, unit, estimator):
    generator = torch.Generator().manual_seed(0)
    turns = torch.tensor([[0, 0, -1, 1, 1, -1], [0, -1, -1, 1, 2, 2]])
    mask, ids = turns >= 0, torch.zeros(2, 6).long()
    pack = Pack(ids, ids, torch.ones(2).long(), ids, mask, turn_ids=turns)
    clean = {name: torch.randn(2, 6, generator=generator) for name in (*TRAINED, *CONSTANTS)}
    coefficients = LossCoefficients(0.2, None, 1.5, 0.05, 0.7, estimator, unit, objective)
    results = []
    for junk in (0.0, 1e3, math.nan, math.inf):
        tensors = {name: torch.where(mask, x, junk) for name, x in clean.items()}
        trained = [tensors[name].requires_grad_() for name in TRAINED]
        experience = Experience(pack, mask, **{name: tensors[name] for name in CONSTANTS})
        output = PackOutput(**dict(zip(TRAINED, trained, strict=True)))
        loss, stats = ppo_loss(experience, output, coefficients, 9.0)
        results.append((loss, stats, torch.autograd.grad(loss, trained)))
    for result in results[1:]:
        assert_close(result, results[0], rtol=0, atol=0)
    assert all(gradient[~mask].eq(0).all() for gradient in results[0][2])


def test_targets_of_states_that_a_cut_reads_by_hand():
    # Turns of 2 and 1 tokens around two observations, then a turn that the length cuts, with 8 after it.
    turns = torch.tensor([[0, 0, -1, -1, 1, -1, 2, 2, -1]])
    mask = turns >= 0
    rewards = torch.tensor([[1.0, 2, 9, 9, 4, 9, 0.5, 0.25, 9]]).double()
    ends = torch.tensor([[0, 0, 1, 0, 0, 1, 0, 0, 0]]).bool()
    pack = make_pack([[3]], [[4] * 8], 0, 0, [turns[0, :8].tolist()])
    assert pack.turn_ends.equal(ends[:, :8]) and pack.places.ended.tolist() == [2, 5]
    inputs = (rewards, torch.zeros_like(rewards), mask, 1.0, 1.0, torch.tensor([8.0]).double())
    # What is left: 15.75 from the start, 12.75 and 8.75 from the second and the third turn on.
    expected = [[15.75, 14.75, 12.75, 0.0, 12.75, 8.75, 8.75, 8.25, 0.0]]
    _, by_turn = turn_gae(*inputs, turn_ids=turns)
    _, by_token = gae(*inputs)
    assert with_cut_targets(by_turn, rewards, mask, ends, turns).tolist() == expected
    assert with_cut_targets(by_token, rewards, mask, ends, None).tolist() == expected
