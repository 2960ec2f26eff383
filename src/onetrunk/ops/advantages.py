"""From scores to advantages: penalties, KL estimators and controllers, per-token rewards, GAE.

Tensors are [R, C] as in types.py: column t belongs to the t-th completion token, values[t] is the value of the state
that predicts it, the score of a completion arrives at its last counted token. Results are 0 outside the mask. Math
from Schulman et al. 2016 (GAE, 1506.02438), Schulman 2020 "Approximating KL Divergence", and Ziegler et al. 2019
(1909.08593) for the adaptive coefficient.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from onetrunk.ops.masking import at_least_float32, merge_moments, sum_over_turns, turn_starts, widest_dtype
from onetrunk.utils.files import read_number

KL_ERROR_LIMIT = 0.2
# Tokens of a block in `gae`: small enough that its matrix stays in the cache.
BLOCK = 64
SMALLEST_STD = 1e-8


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """Return an estimate of KL(policy || reference) at every sampled token.

    Args:
        logprobs: any shape, of the policy that sampled the tokens.
        ref_logprobs: the same shape, of the reference.
        estimator: with d = logprobs - ref_logprobs, "k1": d, "k2": d^2 / 2, "k3": exp(-d) - 1 + d.

    Source: Schulman 2020, http://joschu.net/blog/kl-approx.html.
    """
    log_ratio = at_least_float32(logprobs) - at_least_float32(ref_logprobs)
    if estimator == "k1":
        kl = log_ratio
    elif estimator == "k2":
        kl = log_ratio**2 / 2
    elif estimator == "k3":
        kl = torch.expm1(-log_ratio) + log_ratio
    else:
        raise ValueError(f"kl_estimator is {estimator!r}; expected k1, k2 or k3")
    return kl.to(logprobs.dtype)


def token_rewards(
    scores: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor | None,
    mask: Tensor,
    beta: float,
    estimator: str = "k1",
    dense: Tensor | None = None,
) -> Tensor:
    """Return r_t = -beta * kl_t + dense_t, and at the last counted token the rest of the score in place of dense_t.

    Args:
        scores: [R], one per completion; unused where a row's mask is empty.
        logprobs: [R, C] of the policy at rollout time.
        ref_logprobs: [R, C] of the reference; None leaves the KL term out.
        mask: [R, C] bool.
        beta: coefficient of the KL term; 0 leaves it out.
        estimator: see `kl_estimate`.
        dense: [R, C], the part of the score that arrives at each token; None: all of it arrives at the last one.

    Source: Ziegler et al. 2019, equation 2, spread over tokens as in Huang et al. 2023.
    """
    is_last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)
    inside = torch.zeros_like(scores)[:, None] if dense is None else torch.where(mask & ~is_last, dense, 0.0)
    rewards = torch.where(is_last, (at_least_float32(scores) - inside.sum(1))[:, None], inside)
    if ref_logprobs is not None and beta != 0:
        kl = kl_estimate(at_least_float32(logprobs), ref_logprobs, estimator)
        rewards = rewards - beta * torch.where(mask, kl, 0.0)
    return rewards.to(logprobs.dtype)


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    gamma: float,
    lam: float | Tensor,
    bootstrap_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return generalised advantages and the returns that they imply.

    delta_t = r_t + gamma * V_{t+1} - V_t, A_t = delta_t + gamma * lam * A_{t+1}, R_t = A_t + V_t, where t + 1 is the
    next COUNTED token: a masked gap inside a completion (tool output) is skipped. Computed as products of blocks of
    tokens with a matrix of powers of gamma * lam, in float64 where the device has it: at lam near 1, rounding lam to
    float32 would show in the fifth digit.

    Args:
        rewards: [R, C], the score included.
        values: [R, C], values[t] is V of the state that predicts token t.
        mask: [R, C] bool.
        gamma: discount, 0..1.
        lam: 0..1, one number or a tensor [R] (see `length_adaptive_lam`).
        bootstrap_values: [R], V after the last counted token, of completions that were cut off; 0 where None.

    Returns:
        advantages [R, C] and returns [R, C], both 0 outside the mask.

    Source: Schulman et al. 2016, equations 11 to 16.
    """
    dtype, work = rewards.dtype, widest_dtype(rewards.device)
    rows, width = mask.shape
    rewards, values = (torch.where(mask, x.to(work), 0.0) for x in (rewards, values))
    before = F.pad(mask, (1, 0)).cumsum(1)  # counted tokens before each, and the count of all in the last column
    lengths = before[:, -1:]
    # Counted tokens move together to the left; all others are 0 and share the last column.
    places = torch.where(mask, before[:, :-1], width)
    in_order = values.new_zeros(rows, width + 1).scatter_(1, places, values)
    if bootstrap_values is not None:
        in_order.scatter_(1, lengths, bootstrap_values.to(work)[:, None])
    deltas = (
        torch.zeros_like(in_order).scatter_(1, places, rewards) + F.pad(gamma * in_order[:, 1:], (0, 1)) - in_order
    )
    deltas = torch.where(torch.arange(width + 1, device=mask.device) < lengths, deltas, 0.0)
    lam = lam.to(values.device, work) if isinstance(lam, Tensor) else values.new_full((1,), lam)
    decay = gamma * lam.reshape(-1, 1)
    advantages = _discounted_sums(deltas, decay).gather(1, places)
    return advantages.to(dtype), (advantages + values).to(dtype)


def gae_reference(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    gamma: float,
    lam: float | Tensor,
    bootstrap_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return what `gae` returns, by the recursion over tokens: its naive twin."""
    rows = len(rewards)
    lams = lam.tolist() if isinstance(lam, Tensor) else [lam] * rows
    advantages, returns = torch.zeros_like(rewards), torch.zeros_like(rewards)
    for row in range(rows):
        advantage = 0.0
        following = 0.0 if bootstrap_values is None else bootstrap_values[row].item()
        for t in reversed(mask[row].nonzero().flatten().tolist()):
            value = values[row, t].item()
            delta = rewards[row, t].item() + gamma * following - value
            advantage = delta + gamma * lams[row] * advantage
            following = value
            advantages[row, t], returns[row, t] = advantage, advantage + value
    return advantages, returns


def turn_gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    gamma: float,
    lam: float | Tensor,
    bootstrap_values: Tensor | None = None,
    *,
    turn_ids: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return advantages and returns where a turn is one action; gamma and lam are then per turn.

    delta_k = R_k + gamma * V_{k+1} - V_k, with R_k the sum of the rewards of turn k and V_k the value at its first
    counted token. All tokens of a turn have its advantage. An episode of one turn is a bandit with a baseline.

    Args:
        rewards, values, mask, gamma, lam, bootstrap_values: as in `gae`.
        turn_ids: [R, C] int64, number of the turn of each counted token.

    Returns:
        advantages [R, C], 0 outside the mask, and returns [R, C], 0 everywhere but at the first token of a turn.

    Source: Turn-PPO, 2512.17008, generalised advantage estimation over turns.
    """
    starts = turn_starts(mask, turn_ids)
    sums = sum_over_turns(rewards, mask, turn_ids)
    advantages, returns = gae(sums, values, starts, gamma, lam, bootstrap_values)
    return sum_over_turns(advantages, mask, turn_ids), returns


def with_cut_targets(returns: Tensor, rewards: Tensor, mask: Tensor, ends: Tensor, turn_ids: Tensor | None) -> Tensor:
    """Return the returns with those of every state from which a cut-off completion may be bootstrapped.

    An end of a turn returns what the start of the next turn does: no reward arrives between the two. With returns of
    turns, the other tokens of a turn return what its start does, less the rewards before them.

    Args:
        returns: [R, C] of `gae`, or of `turn_gae` with `turn_ids`.
        rewards, mask: as in `gae`.
        ends: [R, C] bool, between counted tokens.
    """
    if turn_ids is not None:
        before = F.pad(torch.where(mask, rewards, 0.0).cumsum(1), (1, 0))[:, :-1]
        starts = turn_starts(mask, turn_ids)
        returns = sum_over_turns(torch.where(starts, returns + before, 0.0), mask, turn_ids) - before
    width = mask.shape[1]
    columns = torch.where(mask, torch.arange(width, device=mask.device), width - 1)
    following = columns.flip(1).cummin(1).values.flip(1)
    return torch.where(mask | ends, returns.gather(1, following), 0.0)


def length_adaptive_lam(lengths: Tensor, alpha: float) -> Tensor:
    """Return lam = 1 - 1 / (alpha * length) of every row, at least 0.

    Args:
        lengths: [R], counted tokens of each completion, or turns of each episode; 0 gives 0.
        alpha: above 0; the paper takes .05.

    Source: VAPO, 2504.05118, length-adaptive GAE: 1 / (1 - lam), the sum of the weights, grows as alpha * length.
    """
    if not alpha > 0:
        raise ValueError(f"alpha of the length-adaptive lambda is {alpha}; set a number above 0, such as .05")
    return (1 - 1 / (alpha * lengths.float())).clamp(min=0)


class KLController:
    """The KL coefficient, at least 0; this one stays constant."""

    def __init__(self, beta: float) -> None:
        if not beta >= 0:
            raise ValueError(f"beta is {beta}; the KL coefficient must be 0 or above")
        self.value = float(beta)

    def update(self, kl: float, n: int) -> None:
        """Change nothing; see `AdaptiveKLController.update`."""

    def state_dict(self) -> dict[str, float]:
        """Return the coefficient, ready for JSON; everything else belongs to the config."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Change nothing: a fixed coefficient is the config's."""


class AdaptiveKLController(KLController):
    """A KL coefficient that follows a target KL.

    Args:
        init: the coefficient at the start, at least 0.
        target: KL per completion, in nats: the sum over tokens, averaged over rows.
        horizon: completions over which an error of 1 would double the coefficient.

    Source: Ziegler et al. 2019, section 2.2.
    """

    def __init__(self, init: float, target: float, horizon: float) -> None:
        if not (target > 0 and horizon > 0):
            raise ValueError(f"kl_target is {target} and kl_horizon {horizon}; set both above 0")
        super().__init__(init)
        self.target, self.horizon = target, horizon

    def update(self, kl: float, n: int) -> None:
        """Move the coefficient by 1 + clip(kl / target - 1, +-.2) * n / horizon.

        Args:
            kl: KL per completion, in nats, averaged over completions.
            n: number of these completions.

        Raises:
            RuntimeError: kl is not finite.
        """
        kl = float(kl)
        if not math.isfinite(kl):
            raise RuntimeError(f"the KL to the reference is {kl}, so the KL coefficient has nothing to follow")
        error = max(-KL_ERROR_LIMIT, min(KL_ERROR_LIMIT, kl / self.target - 1))
        self.value *= 1 + error * n / self.horizon

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Take the coefficient from a `state_dict`."""
        self.value = read_number(state["value"])


def _discounted_sums(x: Tensor, decay: Tensor) -> Tensor:
    """Return y[t] = x[t] + decay * y[t + 1] for x [R, C] and a decay [R, 1] or [1, 1]."""
    rows, width = x.shape
    block = min(BLOCK, max(1, width))
    steps = torch.arange(block + 1, device=x.device)
    powers = decay**steps
    # triangle[s, t] = decay^(s - t) from s = t on, and 0 before
    ahead = steps[:block, None] - steps[:block]
    triangle = torch.where(ahead >= 0, powers[:, ahead.clamp(min=0)], 0.0)
    within = F.pad(x, (0, -width % block)).view(rows, -1, block)
    within = within @ (triangle[0] if len(triangle) == 1 else triangle)
    if within.shape[1] > 1:
        # The end of a block lacks the whole sum at the start of the next block.
        following = F.pad(_discounted_sums(within[:, :, 0], powers[:, -1:])[:, 1:], (0, 1))
        within = within + following[:, :, None] * powers[:, None, 1:].flip(2)
    return within.reshape(rows, -1)[:, :width]


def missing_eos_penalty(scores: Tensor, stopped: Tensor, penalty: float) -> Tensor:
    """Subtract `penalty` from the score of every completion that was cut off before a stop token.

    Args:
        scores: [n] one raw number per completion.
        stopped: [n] bool, True where the completion ended at a stop token.
        penalty: what is subtracted, in units of the score; not negative.
    """
    return torch.where(stopped.bool(), scores, scores - penalty)


def length_penalty(scores: Tensor, lengths: Tensor, max_completion_length: int, penalty: float) -> Tensor:
    """Subtract `penalty * length / max_completion_length` from every score.

    Args:
        scores: [n] one raw number per completion.
        lengths: [n] tokens of the completion, including the stop token.
        max_completion_length: tokens of the longest possible completion.
        penalty: what is subtracted at the full length, in units of the score; not negative.
    """
    return scores - penalty * lengths.to(scores.dtype) / max_completion_length


@dataclass
class RunningMoments:
    """Moments of all scores so far, merged batch by batch and saved in the checkpoint.

    Args:
        count: number of scores.
        mean: their mean.
        m2: sum of squared differences from the mean.
    """

    count: float = 0.0
    mean: float = 0.0
    m2: float = 0.0

    @property
    def std(self) -> float:
        """The unbiased standard deviation; 0 before the second score."""
        return math.sqrt(self.m2 / (self.count - 1)) if self.count > 1 else 0.0

    def update(self, count: float, mean: float, m2: float) -> None:
        """Merge the moments of more scores; a count of 0 changes nothing."""
        if count:
            parts = torch.tensor([[self.count, self.mean, self.m2], [count, mean, m2]], dtype=torch.float64)
            self.count, self.mean, self.m2 = map(float, merge_moments([tuple(part) for part in parts]))

    @property
    def scale(self) -> float:
        """What `normalize` divides by: the standard deviation, or 1 while it is 0."""
        return self.std if self.std > SMALLEST_STD else 1.0

    def normalize(self, scores: Tensor) -> Tensor:
        """Return (`scores` - mean) / std; NaN stays NaN.

        Does not divide while there are fewer than two scores or all are equal.
        """
        return (scores - self.mean) / self.scale

    def state_dict(self) -> dict[str, float]:
        """Return count, mean and m2 as floats, which JSON stores exactly."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore the moments of a `state_dict`."""
        self.count, self.mean, self.m2 = (read_number(state[name]) for name in ("count", "mean", "m2"))
