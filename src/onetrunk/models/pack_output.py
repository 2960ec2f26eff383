"""What a pass of roles over a pack answers. Knows shapes; no model."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class PackOutput(NamedTuple):
    """What the roles say of a pack, float32 [R, C] and 0 outside the completions; None for a role that was not asked.

    Args:
        logprobs: of the completion tokens under the policy, after temperature.
        entropy: of the policy's distribution at each token, nats.
        values: of the state that predicts each token.
        next_values: [R] value of the state after the last completion token.
        ref_logprobs: of the completion tokens under the reference.
        scores: [R] of prompt and completion under the reward adapter.
        states: [R, T, H] what the layers below the cut made of the pack, in the trunk's dtype.
    """

    logprobs: Tensor | None = None
    entropy: Tensor | None = None
    values: Tensor | None = None
    next_values: Tensor | None = None
    ref_logprobs: Tensor | None = None
    scores: Tensor | None = None
    states: Tensor | None = None


def spread(flat: Tensor, rows: Tensor, columns: Tensor, mask: Tensor) -> Tensor:
    """Return [R, C] with the N entries of `flat` at (rows, columns), 0 elsewhere."""
    return flat.new_zeros(mask.shape).index_put((rows, columns), flat)
