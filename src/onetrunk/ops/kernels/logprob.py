"""The Triton kernel that adds a tile of logits to the running sums and turns the tile into weights.

One program per token: two reads of the token's row (the second from the cache) and one write in place, instead of the
ten elementwise passes of its naive twin, `Chunk._absorb` in logprob_tiles.py. Tested in Triton's interpreter, compiled
for NVIDIA GPUs (scripts/bench/kernel_registers.py), and run on an H200, then with 4 warps.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from onetrunk.ops.running_softmax import Head, RunningSums

BLOCK = 4096
# Fused multiply-adds would round differently with and without the weights: logprobs are bitwise the same. With 4 warps
# a thread needs more than its 255 registers.
OPTIONS = {"enable_fp_fusion": False, "num_warps": 8}


def block_of(width: int) -> int:
    """Return the columns that a program reads at once of a tile of `width` columns."""
    return min(BLOCK, triton.next_power_of_2(width))


def absorb(
    logits: Tensor, targets: Tensor, sums: RunningSums, head: Head, wants_weights: bool, spread_weights: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Add a tile to the sums in place, and replace the logits by the weights of the head's rows.

    Args:
        logits: [n, w] contiguous raw logits; overwritten by exp(z - highest) * damping, 0 at targets.
        targets: [n] int64 columns of the targets, outside 0..w-1 where the target is in another tile.
        sums: sums over the earlier tiles, updated in place.
        head: transformations of the logits.
        wants_weights: False leaves the logits unchanged, where no gradient is formed.
        spread_weights: [n, w] contiguous, filled with the weights times (z - highest); None: not needed.

    Returns:
        decay [n] and shift [n]: shift is the old minus the new highest logit, decay its exp.
    """
    decay, shift = torch.empty_like(sums.highest), torch.empty_like(sums.highest)
    n, width = logits.shape
    _absorb_row[(n,)](
        logits,
        logits if spread_weights is None else spread_weights,
        targets,
        sums.highest,
        sums.others,
        sums.spread,
        sums.target,
        decay,
        shift,
        width,
        LOGIT_SCALE=head.logit_scale,
        SOFTCAP=head.softcap or 0.0,
        TEMPERATURE=head.temperature,
        HAS_WEIGHTS=wants_weights,
        HAS_SPREAD=spread_weights is not None,
        IS_DOUBLE=sums.highest.dtype == torch.float64,
        BLOCK=block_of(width),
        **OPTIONS,
    )
    return decay, shift


@triton.jit
def _transformed(x, LOGIT_SCALE: tl.constexpr, SOFTCAP: tl.constexpr, TEMPERATURE: tl.constexpr):
    """Return the scaled, capped and cooled logits, and the factor by which the cap lowers their slope."""
    z = x * LOGIT_SCALE
    damping = tl.full(x.shape, 1.0, x.dtype)
    if SOFTCAP > 0:
        # tanh(u) = (1 - e) / (1 + e) with e = exp(-2|u|), and the sign of u: nothing overflows
        u = z / SOFTCAP
        e = tl.exp(-2.0 * tl.abs(u))
        tanh = tl.where(u < 0, -1.0, 1.0) * (1.0 - e) / (1.0 + e)
        damping = 1.0 - tanh * tanh
        z = tanh * SOFTCAP
    return z / TEMPERATURE, damping


@triton.jit
def _absorb_row(
    logits_ptr, spread_weights_ptr, targets_ptr, highest_ptr, others_ptr, spread_ptr, target_ptr, decay_ptr, shift_ptr,
    width, LOGIT_SCALE: tl.constexpr, SOFTCAP: tl.constexpr, TEMPERATURE: tl.constexpr, HAS_WEIGHTS: tl.constexpr,
    HAS_SPREAD: tl.constexpr, IS_DOUBLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = tl.float64 if IS_DOUBLE else tl.float32
    row = tl.program_id(0)
    base = row.to(tl.int64) * width
    target = tl.load(targets_ptr + row)
    before = tl.load(highest_ptr + row)

    highest = before
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + base + columns, mask=columns < width, other=0.0).to(dtype)
        z, _ = _transformed(x, LOGIT_SCALE, SOFTCAP, TEMPERATURE)
        highest = tl.maximum(highest, tl.max(tl.where(columns < width, z, -float("inf")), 0))

    others = before * 0.0
    spread = before * 0.0
    target_logit = before * 0.0
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + base + columns, mask=columns < width, other=0.0).to(dtype)
        z, damping = _transformed(x, LOGIT_SCALE, SOFTCAP, TEMPERATURE)
        target_logit += tl.sum(tl.where(columns == target, z, 0.0), 0)
        below = z - highest
        weights = tl.where((columns < width) & (columns != target), tl.exp(below), 0.0)
        others += tl.sum(weights, 0)
        spread += tl.sum(weights * below, 0)
        weights *= damping
        if HAS_WEIGHTS:
            tl.store(logits_ptr + base + columns, weights, mask=columns < width)
        if HAS_SPREAD:
            tl.store(spread_weights_ptr + base + columns, weights * below, mask=columns < width)

    shift = before - highest
    decay = tl.exp(shift)
    others_before = tl.load(others_ptr + row)
    spread_before = tl.load(spread_ptr + row)
    tl.store(spread_ptr + row, decay * (spread_before + shift * others_before) + spread)
    tl.store(others_ptr + row, decay * others_before + others)
    tl.store(highest_ptr + row, highest)
    tl.store(decay_ptr + row, decay)
    tl.store(shift_ptr + row, shift)
    tl.store(target_ptr + row, target_logit, mask=(target >= 0) & (target < width))
