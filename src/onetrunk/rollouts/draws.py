"""Random draws that depend on a row alone: the uniforms of a key, and one token per uniform.

One uniform per (key, token) and the inverse of the cumulative distribution: the same draw whatever rows stand beside.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from onetrunk.randomness import generator_of
from onetrunk.types import RowKey


def row_uniforms(key: RowKey, count: int) -> np.ndarray:
    """Return `count` float64 uniforms in [0, 1), one per completion token; a longer call starts with a shorter one's.

    Args:
        key: non-negative integers below 2**32. Keys of one length never collide; (1, 2) and (1, 2, 0) do.
        count: tokens.
    """
    return generator_of(key).random(count)


def inverse_cdf(logprobs: Tensor, uniforms: Tensor) -> Tensor:
    """Draw one token per row: the first whose cumulative probability exceeds the row's uniform.

    The cumulative sum is float64 and is compared with uniform * total, so that float32 probabilities that do not add
    up to 1 leave no gap at the end. Tokens of probability 0 are never drawn, whatever a parallel sum rounds to.

    Args:
        logprobs: [b, V], log-softmax; -inf where a token is ruled out. Each row has a probability above 0.
        uniforms: [b] float64 in [0, 1).

    Returns:
        [b] int64 token ids.
    """
    probs = logprobs.exp()
    cdf = probs.cumsum(-1, dtype=torch.float64)
    possible = probs > 0
    hit = possible & (cdf > uniforms[:, None] * cdf[:, -1:])
    first_hit = hit.byte().argmax(-1)
    last_possible = probs.shape[-1] - 1 - possible.flip(-1).byte().argmax(-1)
    return torch.where(hit.any(-1), first_hit, last_possible)
