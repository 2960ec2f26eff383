"""Penalties on completions that did not stop, or that are long: tensors in, tensors out, nothing changed in place.

A row without a score (NaN) stays without one.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def missing_eos_penalty(scores: Tensor, stopped: Tensor, penalty: float) -> Tensor:
    """Subtract `penalty` from the score of every completion that was cut off before a stop token.

    Args:
        scores: [n] one raw number per completion.
        stopped: [n] bool, True where the completion ended at a stop token.
        penalty: in units of the score, not negative.

    Returns:
        [n] of the dtype of `scores`.
    """
    _check("missing_eos_penalty", scores, stopped, penalty)
    return torch.where(stopped.bool(), scores, scores - penalty)


def length_penalty(scores: Tensor, lengths: Tensor, max_completion_length: int, penalty: float) -> Tensor:
    """Subtract `penalty * length / max_completion_length` from every score.

    Args:
        scores: [n] one raw number per completion.
        lengths: [n] tokens of the completion, the stop token included.
        max_completion_length: tokens of the longest completion that can be.
        penalty: in units of the score, at the full length; not negative.

    Returns:
        [n] of the dtype of `scores`.
    """
    _check("length_penalty", scores, lengths, penalty)
    if max_completion_length < 1:
        raise ValueError(f"max_completion_length must be at least 1 token, got {max_completion_length}")
    return scores - penalty * lengths.to(scores.dtype) / max_completion_length


def _check(name: str, scores: Tensor, per_row: Tensor, penalty: float) -> None:
    if scores.shape != per_row.shape:
        raise ValueError(
            f"{name}: scores {tuple(scores.shape)} and {tuple(per_row.shape)} differ; give one entry per row"
        )
    if not (math.isfinite(penalty) and penalty >= 0):
        raise ValueError(
            f"{name} must be a finite number of at least 0, got {penalty}; it is subtracted from the score"
        )
