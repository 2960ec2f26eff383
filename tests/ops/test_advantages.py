import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from onetrunk.ops import AdaptiveKLController, gae, kl_estimate, token_rewards
from onetrunk.ops.advantages import KLController, gae_reference, length_adaptive_lam
from tests.ops.test_losses import EXACT, many

ORACLE = {"rtol": 0, "atol": 1e-6}  # the oracle is printed with six digits
LAMS = st.sampled_from([0.0, 0.1, 0.5, 0.95, 1.0])
GAMMAS = st.sampled_from([0.0, 0.9, 1.0])


@st.composite
def episodes(draw):
    """Rewards, values, a mask with any gaps (empty rows too) and bootstrap values, in float64."""
    rows, width, seed = draw(st.integers(1, 4)), draw(st.integers(1, 33)), draw(st.integers(0, 9999))
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, rows, width, generator=generator, dtype=torch.float64)
    mask = torch.rand(rows, width, generator=generator) < draw(st.sampled_from([0.1, 0.6, 1.0]))
    return rewards, values, mask, torch.randn(rows, generator=generator, dtype=torch.float64)


def explicit_sum(rewards, values, gamma, lam, bootstrap):
    """A_t = sum over l of (gamma * lam)^l * delta_{t+l}, of one row without gaps."""
    following = torch.cat([values[1:], bootstrap[None]])
    deltas = rewards + gamma * following - values
    steps = range(len(deltas))
    return torch.tensor(
        [sum((gamma * lam) ** (s - t) * deltas[s].item() for s in steps if s >= t) for t in steps], dtype=torch.float64
    )


def test_kl_estimates_agree_with_the_oracle(oracle):
    for estimator, expected in oracle.expected["kl_row_3"].items():
        kl = kl_estimate(oracle.old_logprobs[2, :2], oracle.ref_logprobs[2, :2], estimator)
        assert_close(kl, torch.tensor(expected, dtype=torch.float64), **ORACLE)


def test_token_rewards_agree_with_the_oracle(oracle):
    rewards = token_rewards(oracle.scores, oracle.old_logprobs, oracle.ref_logprobs, oracle.mask, 0.1)
    assert_close(rewards, oracle.padded(oracle.expected["token_rewards_k1"]), **ORACLE)


@pytest.mark.parametrize("function", [gae, gae_reference])
def test_advantages_and_returns_agree_with_the_oracle(oracle, function):
    rewards = oracle.padded(oracle.expected["token_rewards_k1"])
    advantages, returns = function(rewards, oracle.old_values, oracle.mask, 1.0, 0.95)
    assert_close(advantages, oracle.padded(oracle.expected["advantages"]), **ORACLE)
    assert_close(returns, oracle.padded(oracle.expected["returns"]), **ORACLE)


@many
@given(first=st.floats(-30, 0), second=st.floats(-30, 0))
def test_k2_and_k3_are_never_negative_and_all_are_zero_at_equal_logprobs(first, second):
    policy, reference = torch.tensor([first, second, first]).double(), torch.tensor([second, first, first]).double()
    for estimator in ("k1", "k2", "k3"):
        assert kl_estimate(policy, reference, estimator)[2] == 0
    assert (kl_estimate(policy, reference, "k2") >= 0).all()
    # exp(-d) - 1 + d cancels down to the rounding of d
    assert (kl_estimate(policy, reference, "k3") >= -1e-14).all()


def test_without_reference_or_beta_there_is_no_kl_term_even_where_the_kl_is_infinite():
    scores, logprobs, mask = torch.tensor([3.0]), torch.zeros(1, 2), torch.ones(1, 2).bool()
    assert token_rewards(scores, logprobs, None, mask, 0.1).tolist() == [[0, 3]]
    assert token_rewards(scores, logprobs, torch.full((1, 2), -torch.inf), mask, 0.0).tolist() == [[0, 3]]


def test_garbage_outside_the_mask_reaches_neither_rewards_nor_advantages():
    nan = float("nan")
    mask = torch.tensor([[True, False, True], [False, False, False]])
    rewards = token_rewards(
        torch.tensor([3.0, nan]), torch.tensor([[1.0, nan, 2.0]] * 2), torch.tensor([[0.0, 0.0, 0.0]] * 2), mask, 1.0
    )
    assert rewards.tolist() == [[-1, 0, 1], [0, 0, 0]]  # -1 * 1 and 3 - 1 * 2
    advantages, returns = gae(torch.tensor([[1.0, nan, 1.0]] * 2), torch.tensor([[0.0, nan, 0.0]] * 2), mask, 1.0, 1.0)
    assert advantages.tolist() == returns.tolist() == [[2, 0, 1], [0, 0, 0]]


def test_advantages_of_three_tokens_by_hand_with_a_gap_and_a_bootstrap_value():
    # gamma .5, lam .5; the second column is cut out. delta_2 = 1 + .5 * 8 - 2 = 3, delta_1 = 0 + .5 * 2 - 4 = -3,
    # delta_0 = 1 + .5 * 4 - 1 = 2; A_2 = 3, A_1 = -3 + .25 * 3 = -2.25, A_0 = 2 + .25 * -2.25 = 1.4375.
    rewards, values = torch.tensor([[1.0, 9.0, 0.0, 1.0]]), torch.tensor([[1.0, 9.0, 4.0, 2.0]])
    mask = torch.tensor([[True, False, True, True]])
    advantages, returns = gae(rewards, values, mask, 0.5, 0.5, bootstrap_values=torch.tensor([8.0]))
    assert advantages.tolist() == [[1.4375, 0, -2.25, 3]]
    assert returns.tolist() == [[2.4375, 0, 1.75, 5]]  # A + V


@pytest.mark.parametrize("function", [gae, gae_reference])
@many
@given(episode=episodes(), gamma=GAMMAS, data=st.data())
def test_advantages_are_the_explicit_sum_over_the_counted_tokens_also_with_a_lambda_per_row(
    function, episode, gamma, data
):
    rewards, values, mask, bootstrap = episode
    lam = torch.tensor([data.draw(LAMS) for _ in mask], dtype=torch.float64)
    advantages, returns = function(rewards, values, mask, gamma, lam, bootstrap)
    for row, kept in enumerate(mask):
        expected = explicit_sum(rewards[row, kept], values[row, kept], gamma, lam[row].item(), bootstrap[row])
        assert_close(advantages[row, kept], expected, **EXACT)
        assert_close(returns[row, kept], expected + values[row, kept], **EXACT)
        assert advantages[row, ~kept].eq(0).all() and returns[row, ~kept].eq(0).all()


@pytest.mark.parametrize(("gamma", "lam"), [(0.99, 0.95), (1.0, 0.0), (1.0, 0.999), (1.0, 1.0)])
def test_float32_advantages_of_4096_tokens_are_within_1e_5_of_the_float64_loop(gamma, lam):
    generator = torch.Generator().manual_seed(0)
    rewards, values = 0.1 * torch.randn(2, 4096, generator=generator), torch.randn(2, 4096, generator=generator)
    rewards[:, -1] += 1
    mask = torch.rand(2, 4096, generator=generator) < 0.95
    loop = gae_reference(rewards.double(), values.double(), mask, gamma, lam)
    for ours, expected in zip(gae(rewards, values, mask, gamma, lam), loop, strict=True):
        assert ours.dtype == torch.float32
        assert_close(ours.double(), expected, rtol=0, atol=1e-5)


def test_the_dtype_of_the_rewards_is_that_of_the_result_and_arguments_stay_as_they_were():
    rewards, values = torch.ones(1, 4, dtype=torch.bfloat16), torch.ones(1, 4, dtype=torch.bfloat16)
    mask = torch.tensor([[True, True, False, False]])
    advantages, returns = gae(rewards, values, mask, 1.0, 0.95)
    assert advantages.dtype == returns.dtype == torch.bfloat16
    assert token_rewards(torch.ones(1), rewards, values, mask, 0.1).dtype == torch.bfloat16
    assert rewards.eq(1).all() and values.eq(1).all()


def test_length_adaptive_lambda_by_hand():
    # alpha .05: 1 - 1 / (.05 * 400) = .95; 1 - 1 / (.05 * 40) = .5; 1 - 1 / (.05 * 10) = -1, clamped to 0; 0 for none
    lam = length_adaptive_lam(torch.tensor([400, 40, 10, 0]), 0.05)
    assert_close(lam, torch.tensor([0.95, 0.5, 0.0, 0.0]))
    with pytest.raises(ValueError, match="above 0"):
        length_adaptive_lam(torch.tensor([4]), 0.0)


def test_the_adaptive_controller_agrees_with_the_oracle(oracle):
    for kl, expected in oracle.expected["adaptive_kl_beta_0.2_target_6_horizon_10000_n_64"].items():
        controller = AdaptiveKLController(0.2, target=6, horizon=10_000)
        controller.update(float(kl), 64)
        assert controller.value == pytest.approx(expected, abs=1e-9)


def test_controllers_reject_a_kl_or_settings_they_cannot_use():
    with pytest.raises(RuntimeError, match="is nan"):
        AdaptiveKLController(0.2, target=6, horizon=100).update(float("nan"), 1)
    with pytest.raises(ValueError, match="set both above 0"):
        AdaptiveKLController(0.2, target=0, horizon=100)
    with pytest.raises(ValueError, match="beta is -1"):
        KLController(-1)
