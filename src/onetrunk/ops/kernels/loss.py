"""The Triton kernel of the PPO loss: every term, its stats and every gradient in one pass over the tokens.

`losses.ppo_loss` holds its naive twin. A block of tokens writes its own sums, which are then added up in a
fixed order: no atomics, the same result every time. Tested in Triton's interpreter and compiled for NVIDIA GPUs; not
yet run on hardware.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from onetrunk.types import Experience, LossCoefficients, PackOutput

BLOCK = 1024
# In the order in which `_ppo_terms` stores them, each with the tensor that it needs.
SUMS = {
    "policy/loss": "logprobs", "policy/clip_fraction": "logprobs", "policy/ratio_mean": "logprobs",
    "policy/ratio_max": "logprobs", "policy/approx_kl": "logprobs", "policy/entropy": "entropy",
    "kl/loss": "ref_logprobs",
    "value/loss": "values", "value/clip_fraction": "values",
}  # fmt: skip
INDEX = {name: index for index, name in enumerate(SUMS)}
TRAINED = ("logprobs", "entropy", "values")
INPUTS = ("logprobs", "old_logprobs", "advantages", "weights", "ref_logprobs", "entropy")
INPUTS += ("values", "old_values", "returns")
ESTIMATORS = {"k1": 1, "k2": 2, "k3": 3}


def fused_loss(
    experience: Experience,
    output: PackOutput,
    coefficients: LossCoefficients,
    num_tokens: float | Tensor | None,
    log_ratio_limit: float,
) -> tuple[Tensor, dict[str, dict[str, Tensor]]]:
    """Return the loss and the detached stats of `losses.ppo_loss`, without the moments of the values.

    The arguments are those of `losses.ppo_loss`; the log ratio is clamped to plus and minus `log_ratio_limit`.
    """
    mask = experience.loss_mask
    tensors = {name: getattr(output if name in TRAINED else experience, name) for name in INPUTS}
    if output.logprobs is None or not coefficients.beta:
        tensors["ref_logprobs"] = None
    constants = {name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None}
    trained = [constants.pop(name, None) for name in TRAINED]
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in trained if tensor is not None), torch.float32)
    denominator = mask.sum().clamp(min=1) if num_tokens is None else num_tokens
    if not isinstance(denominator, Tensor):
        denominator = torch.full((), denominator, dtype=dtype, device=mask.device)
    denominator = denominator.detach().to(mask.device, dtype)
    loss, sums = _FusedLoss.apply(*trained, constants, mask.contiguous(), denominator, coefficients, log_ratio_limit)
    stats: dict[str, dict[str, Tensor]] = {}
    for name, value in zip(SUMS, sums.unbind(), strict=True):
        if tensors[SUMS[name]] is not None:
            group, key = name.split("/")
            stats.setdefault(group, {})[key] = value
    return loss, stats


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logprobs: Tensor | None,
        entropy: Tensor | None,
        values: Tensor | None,
        constants: dict[str, Tensor],
        mask: Tensor,
        denominator: Tensor,
        coefficients: LossCoefficients,
        log_ratio_limit: float,
    ) -> tuple[Tensor, Tensor]:
        trained = zip(TRAINED, (logprobs, entropy, values), strict=True)
        tensors = constants | {name: tensor for name, tensor in trained if tensor is not None}
        grads = {name: torch.empty_like(mask, dtype=denominator.dtype) for name in TRAINED if name in tensors}
        sums = _launch(tensors, grads, mask, denominator, coefficients, log_ratio_limit)
        ctx.save_for_backward(*grads.values())
        ctx.dtypes = {name: tensors[name].dtype for name in grads}
        sums = sums / torch.where(_is_ratio_max(sums), 1.0, denominator)
        loss = sums[INDEX["policy/loss"]] + coefficients.value_coef * sums[INDEX["value/loss"]]
        if coefficients.entropy_coef:
            loss = loss - coefficients.entropy_coef * sums[INDEX["policy/entropy"]]
        if coefficients.beta:
            loss = loss + coefficients.beta * sums[INDEX["kl/loss"]]
        ctx.mark_non_differentiable(sums)
        return loss, sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        names = list(ctx.dtypes)
        grads = {name: (grad_loss * g).to(ctx.dtypes[name]) for name, g in zip(names, ctx.saved_tensors, strict=True)}
        return *(grads.get(name) for name in TRAINED), None, None, None, None, None


def _is_ratio_max(sums: Tensor) -> Tensor:
    return torch.arange(len(SUMS), device=sums.device) == INDEX["policy/ratio_max"]


def _launch(
    tensors: dict[str, Tensor],
    grads: dict[str, Tensor],
    mask: Tensor,
    denominator: Tensor,
    coefficients: LossCoefficients,
    log_ratio_limit: float,
) -> Tensor:
    """Fill the gradients and return the sums [len(SUMS)] over the counted tokens."""
    c, size = coefficients, mask.numel()
    blocks = max(1, triton.cdiv(size, BLOCK))
    partial = torch.zeros(blocks, len(SUMS), dtype=denominator.dtype, device=mask.device)
    # A tensor, not a constant: an adaptive beta would compile a new kernel at every rollout.
    beta = torch.full((), c.beta, dtype=denominator.dtype, device=mask.device)
    _ppo_terms[(blocks,)](
        mask,
        *(tensors.get(name, mask) for name in INPUTS),
        *(grads.get(name, mask) for name in TRAINED),
        partial,
        denominator,
        beta,
        size,
        EPSILON=c.epsilon,
        EPSILON_HIGH=c.epsilon if c.epsilon_high is None else c.epsilon_high,
        LIMIT=log_ratio_limit,
        DUAL_CLIP=c.dual_clip or 0.0,
        VALUE_CLIP=-1.0 if c.value_clip is None else c.value_clip,
        VALUE_COEF=c.value_coef,
        ENTROPY_COEF=c.entropy_coef,
        ESTIMATOR=ESTIMATORS[c.kl_estimator],
        HAS_POLICY="logprobs" in tensors,
        HAS_WEIGHTS="weights" in tensors,
        HAS_REFERENCE="ref_logprobs" in tensors,
        HAS_ENTROPY="entropy" in tensors,
        HAS_VALUES="values" in tensors,
        IS_DOUBLE=denominator.dtype == torch.float64,
        NUM_SUMS=len(SUMS),
        BLOCK=BLOCK,
        enable_fp_fusion=False,
    )
    sums = partial.sum(0)
    return torch.where(_is_ratio_max(sums), partial.amax(0), sums)


@triton.jit
def _excess(x):
    """Return exp(x) - 1 - x; by its series where the difference would cancel (the first term left out is 1e-11)."""
    series = 1.0 + x / 9 * (1.0 + x / 10 * (1.0 + x / 11))
    series = 1.0 + x / 5 * (1.0 + x / 6 * (1.0 + x / 7 * (1.0 + x / 8 * series)))
    series = x * x / 2 * (1.0 + x / 3 * (1.0 + x / 4 * series))
    return tl.where(tl.abs(x) < 0.25, series, tl.exp(x) - 1.0 - x)


@triton.jit
def _clamped(x, low, high):
    """Return x within its bounds; NaN stays NaN, which a minimum of hardware would hide."""
    return tl.where(x < low, low, tl.where(x > high, high, x))


@triton.jit
def _kept(pointer, at, counts, dtype: tl.constexpr):
    """Return the counted entries, and 0 where none counts."""
    return tl.where(counts, tl.load(pointer + at, mask=counts, other=0.0).to(dtype), 0.0)


@triton.jit
def _policy_term(
    logprobs_ptr, old_logprobs_ptr, advantages_ptr, weights_ptr, ref_logprobs_ptr, grads_ptr, sums_ptr,
    at, exists, counts, num_tokens, beta,
    EPSILON: tl.constexpr, EPSILON_HIGH: tl.constexpr, LIMIT: tl.constexpr, DUAL_CLIP: tl.constexpr,
    ESTIMATOR: tl.constexpr, HAS_WEIGHTS: tl.constexpr, HAS_REFERENCE: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    logprobs = _kept(logprobs_ptr, at, counts, dtype)
    log_ratio = logprobs - _kept(old_logprobs_ptr, at, counts, dtype)
    is_outside = (log_ratio > LIMIT) | (log_ratio < -LIMIT)
    log_ratio = _clamped(log_ratio, -LIMIT, LIMIT)
    ratio = tl.exp(log_ratio)
    advantages = _kept(advantages_ptr, at, counts, dtype)
    unclipped = -advantages * ratio
    clipped = -advantages * _clamped(ratio, 1 - EPSILON, 1 + EPSILON_HIGH)
    is_clipped = clipped > unclipped
    losses = tl.where(is_clipped, clipped, unclipped)
    if DUAL_CLIP > 0:
        is_above = (advantages < 0) & (losses > -advantages * DUAL_CLIP)
        losses = tl.where(is_above, -advantages * DUAL_CLIP, losses)
        is_clipped = is_clipped | is_above
    # d ratio / d logprobs = ratio
    grads = tl.where(is_clipped | is_outside, 0.0, unclipped)
    if HAS_WEIGHTS:
        weights = _kept(weights_ptr, at, counts, dtype)
        losses *= weights
        grads *= weights
    tl.store(sums_ptr + 0, tl.sum(losses, 0))
    tl.store(sums_ptr + 1, tl.sum(is_clipped.to(dtype), 0))
    tl.store(sums_ptr + 2, tl.sum(tl.where(counts, ratio, 0.0), 0))
    tl.store(sums_ptr + 3, tl.max(tl.where(counts, ratio, 0.0), 0))
    tl.store(sums_ptr + 4, tl.sum(_excess(log_ratio), 0))
    if HAS_REFERENCE:
        gap = logprobs - _kept(ref_logprobs_ptr, at, counts, dtype)
        kl, slope = _kl_and_slope(gap, ESTIMATOR)
        grads += beta * tl.where(counts, slope, 0.0)
        tl.store(sums_ptr + 6, tl.sum(kl, 0))
    tl.store(grads_ptr + at, grads / num_tokens, mask=exists)


@triton.jit
def _kl_and_slope(gap, ESTIMATOR: tl.constexpr):
    if ESTIMATOR == 1:
        kl = gap
        slope = tl.full(gap.shape, 1.0, gap.dtype)
    elif ESTIMATOR == 2:
        kl = gap * gap / 2
        slope = gap
    else:
        kl = _excess(-gap)
        slope = gap - kl
    return kl, slope


@triton.jit
def _value_term(
    values_ptr, old_values_ptr, returns_ptr, grads_ptr, sums_ptr, at, exists, counts, num_tokens,
    VALUE_CLIP: tl.constexpr, VALUE_COEF: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    values, returns = _kept(values_ptr, at, counts, dtype), _kept(returns_ptr, at, counts, dtype)
    error = returns - values
    losses = error * error
    is_clipped = losses < 0
    if VALUE_CLIP >= 0:
        old_values = _kept(old_values_ptr, at, counts, dtype)
        moved = _clamped(values, old_values - VALUE_CLIP, old_values + VALUE_CLIP) - returns
        is_clipped = moved * moved > losses
        losses = tl.where(is_clipped, moved * moved, losses)
    tl.store(sums_ptr + 7, tl.sum(losses / 2, 0))
    tl.store(sums_ptr + 8, tl.sum(is_clipped.to(dtype), 0))
    tl.store(grads_ptr + at, tl.where(is_clipped, 0.0, -VALUE_COEF * error) / num_tokens, mask=exists)


@triton.jit
def _ppo_terms(
    mask_ptr, logprobs_ptr, old_logprobs_ptr, advantages_ptr, weights_ptr, ref_logprobs_ptr, entropy_ptr,
    values_ptr, old_values_ptr, returns_ptr, logprob_grads_ptr, entropy_grads_ptr, value_grads_ptr,
    partial_ptr, denominator_ptr, beta_ptr, size,
    EPSILON: tl.constexpr, EPSILON_HIGH: tl.constexpr, LIMIT: tl.constexpr, DUAL_CLIP: tl.constexpr,
    ESTIMATOR: tl.constexpr, VALUE_CLIP: tl.constexpr, VALUE_COEF: tl.constexpr, ENTROPY_COEF: tl.constexpr,
    HAS_POLICY: tl.constexpr, HAS_WEIGHTS: tl.constexpr, HAS_REFERENCE: tl.constexpr, HAS_ENTROPY: tl.constexpr,
    HAS_VALUES: tl.constexpr, IS_DOUBLE: tl.constexpr, NUM_SUMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = tl.float64 if IS_DOUBLE else tl.float32
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exists = at < size
    counts = tl.load(mask_ptr + at, mask=exists, other=0) != 0
    num_tokens = tl.load(denominator_ptr)
    sums_ptr = partial_ptr + tl.program_id(0) * NUM_SUMS
    if HAS_POLICY:
        _policy_term(
            logprobs_ptr, old_logprobs_ptr, advantages_ptr, weights_ptr, ref_logprobs_ptr, logprob_grads_ptr, sums_ptr,
            at, exists, counts, num_tokens, tl.load(beta_ptr),
            EPSILON, EPSILON_HIGH, LIMIT, DUAL_CLIP, ESTIMATOR, HAS_WEIGHTS, HAS_REFERENCE, dtype,
        )  # fmt: skip
    if HAS_ENTROPY:
        tl.store(sums_ptr + 5, tl.sum(_kept(entropy_ptr, at, counts, dtype), 0))
        tl.store(entropy_grads_ptr + at, tl.where(counts, -ENTROPY_COEF / num_tokens, 0.0), mask=exists)
    if HAS_VALUES:
        _value_term(
            values_ptr, old_values_ptr, returns_ptr, value_grads_ptr, sums_ptr, at, exists, counts, num_tokens,
            VALUE_CLIP, VALUE_COEF, dtype,
        )  # fmt: skip
