"""How a row draws its tokens: uniforms from its key, the inverse of the cumulative distribution, and what ends it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor, TopKLogitsWarper, TopPLogitsWarper

from onetrunk.rollouts.base import SamplingParams
from onetrunk.types import RowKey
from onetrunk.utils.randomness import generator_of

# A row continues; its last token was a stop token; its logits are wrong (two ways).
RUNNING, STOPPED, NOT_FINITE, NO_TOKEN_LEFT = range(4)
FAULTS = {
    NOT_FINITE: "policy logits are not finite at {}; look for a non-finite weight after the last update, or for an"
    " overflow in float16",
    NO_TOKEN_LEFT: "logits_processor left no token to draw, or a score that is not finite, at {}; let at least one"
    " token keep a finite score",
}


def row_uniforms(key: RowKey, count: int) -> np.ndarray:
    """Return `count` float64 uniforms in [0, 1), one per completion token; a longer list starts with a shorter one.

    Args:
        key: non-negative integers below 2**32. Keys of one length never collide; (1, 2) and (1, 2, 0) do.
        count: tokens.
    """
    return generator_of(key).random(count)


def inverse_cdf(logprobs: Tensor, uniforms: Tensor) -> Tensor:
    """Draw one token per row: the first whose cumulative probability exceeds the row's uniform.

    The float64 cumulative sum is compared with uniform * total, so float32 probabilities that do not add up to 1 leave
    no gap at the end. Tokens of probability 0 are never drawn, whatever a parallel sum rounds to.

    Args:
        logprobs: [b, V], log-softmax; -inf at excluded tokens. Each row has a probability above 0.
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


def truncation(params: SamplingParams) -> tuple[LogitsProcessor, ...]:
    """Return what gives tokens that `params` excludes the score -inf, in order; empty if it excludes none."""
    if not params.truncates:
        return ()
    top_k = (TopKLogitsWarper(params.top_k),) if params.top_k else ()
    return (*top_k, TopPLogitsWarper(params.top_p)) if params.top_p < 1 else top_k


def draw(scores: Tensor, uniforms: Tensor | None, warpers: tuple[LogitsProcessor, ...] = ()) -> tuple[Tensor, Tensor]:
    """Return a token of every row and its logprob, both [b].

    Args:
        scores: [b, V] float32 logits, after temperature and processors.
        uniforms: [b] float64; None: the most probable token.
        warpers: of `truncation`; the logprobs are those among the tokens that they leave.
    """
    for warp in warpers:
        scores = warp(None, scores)
    logprobs = scores.log_softmax(-1)
    tokens = logprobs.argmax(-1) if uniforms is None else inverse_cdf(logprobs, uniforms)
    return tokens, logprobs.gather(-1, tokens[:, None])[:, 0]


def status_of(tokens: Tensor, logprobs: Tensor, logits: Tensor, stop_ids: Tensor) -> Tensor:
    """Return RUNNING, STOPPED, NOT_FINITE or NO_TOKEN_LEFT for each row, [b] int64."""
    status = torch.where(torch.isin(tokens, stop_ids), STOPPED, RUNNING)
    status = status.masked_fill(~logprobs.isfinite(), NO_TOKEN_LEFT)
    is_finite = logits.sum(-1, dtype=torch.float64).isfinite()  # float64: the sum of float32 numbers can't overflow.
    return status.masked_fill(~is_finite, NOT_FINITE)
