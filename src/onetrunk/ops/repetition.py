"""How much completions repeat themselves: n-grams that occurred before in the same row.

Knows token ids and lengths; no tokenizer and no text.
"""

from __future__ import annotations

import torch
from torch import Tensor


def repeated_ngrams(ids: Tensor, lengths: Tensor, n: int = 4) -> tuple[Tensor, Tensor]:
    """Return how many n-grams of each row occurred before in that row, and how many n-grams it has.

    Windows are numbered by pairs, so that equal numbers mean equal tokens: no hash, no collision.

    Args:
        ids: [R, C] int64, padded on the right with anything.
        lengths: [R] tokens of each row.
        n: tokens of a window, 1 or more.

    Returns:
        Two int64 tensors [R]; a row of fewer than n tokens has 0 of both.

    Raises:
        ValueError: n is below 1.
    """
    if n < 1:
        raise ValueError(f"n is {n}; a window has 1 token or more")
    num_rows, width = ids.shape
    totals = (lengths - n + 1).clamp(min=0)
    if width < n or not num_rows:
        return torch.zeros_like(totals), totals
    numbers = _numbered(ids)
    tokens = numbers
    for shift in range(1, n):
        numbers = _numbered(numbers[:, :-1] * (tokens.max() + 1) + tokens[:, shift:])
    rows = torch.arange(num_rows, device=ids.device)[:, None].expand_as(numbers)
    is_window = torch.arange(numbers.shape[1], device=ids.device) < totals[:, None]
    num_windows = numbers.max() + 1
    distinct = torch.unique(rows[is_window] * num_windows + numbers[is_window]) // num_windows
    return totals - torch.bincount(distinct, minlength=num_rows), totals


def _numbered(codes: Tensor) -> Tensor:
    """Return codes of the same shape from 0 on without gaps, equal where `codes` are: products of two fit int64."""
    return torch.unique(codes, return_inverse=True)[1]
