"""Logprobs and entropies of given tokens from hidden states: a naive reference and its fused twin.

`token_logprobs` forms all [N, V] logits; `fused_token_logprobs` goes over tiles of them (logprob_tiles.py) and never
holds more than one. The gradient of a token's logprob with respect to its hidden state is one vector,
W_y - sum_v p_v W_v, so the fused op forms it in the forward and its backward multiplies by the upstream number: it
serves any objective over logprobs. Knows hidden states and a frozen head, no model.

Arithmetic, the same in both: hidden @ weight.T + bias in the dtype of the operands (bf16 in, bf16 out, as the model's
own lm_head gives it; autocast acts as it does there), then float32 (float64 stays): * logit_scale, softcap
cap * tanh(x / cap), / temperature, log-softmax. That is the order of transformers: Cohere multiplies by its
`logit_scale`, Granite divides by its `logits_scaling` (pass 1 / logits_scaling), Gemma 2 caps after.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from onetrunk.ops.logprob_tiles import Chunk, Head
from onetrunk.ops.masking import at_least_float32

# Measured on CPU: tiles that stay in the cache keep the products at their full speed. A GPU wants larger products.
CHUNK_TOKENS = {"cpu": 1024, "cuda": 8192}
CHUNK_BYTES = {"cpu": 4 * 2**20, "cuda": 128 * 2**20}


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Return the logprob of every target and the entropy of its distribution, by way of all [N, V] logits.

    The reference that `fused_token_logprobs` is tested against; differentiable in everything.

    Args:
        hidden: [N, H] states that predict the targets, after the final norm.
        weight: [V, H] of the head, in the dtype of hidden.
        targets: [N] int64 token ids.
        temperature: divides the logits, above 0.
        bias: [V] of the head, or None.
        softcap: bound of soft-capping, above 0, or None.
        logit_scale: multiplies the logits before soft-capping.

    Returns:
        logprobs [N] and entropy [N] in nats, both float32 (float64 for float64 input).

    Raises:
        ValueError: temperature or softcap is not above 0.
    """
    Head(weight, bias, temperature, softcap, logit_scale)  # refuses what is out of range
    logits = at_least_float32(F.linear(hidden, weight, bias))
    if logit_scale != 1:
        logits = logits * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if temperature != 1:
        logits = logits / temperature
    all_logprobs = F.log_softmax(logits, dim=-1)
    logprobs = all_logprobs.gather(-1, targets[:, None]).squeeze(-1)
    return logprobs, -(all_logprobs.exp() * all_logprobs).sum(-1)


def fused_token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    *,
    chunk_size: int | None = None,
    chunk_bytes: int | None = None,
    entropy_grad: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return what `token_logprobs` returns, tile by tile of tokens and vocabulary, never holding [N, V].

    Two products per tile where hidden requires grad, one otherwise, and a third with `entropy_grad`; none is done
    again in the backward. Tiles do not depend on whether gradients are formed, so the logprobs are bitwise the same
    with grad and without: a policy that has not moved has ratio 1 exactly. Two to four tensors of a tile's size live
    at a time. The gradient vectors [N, H], in float32, are what is kept for the backward: memory does not grow with
    the vocabulary.

    Args:
        hidden: [N, H]; the gradient flows here only. N may be 0.
        weight: [V, H], frozen, in the dtype of hidden.
        targets: [N] int64 in 0..V-1.
        temperature: as in `token_logprobs`.
        bias: [V], frozen, or None.
        softcap: as in `token_logprobs`.
        logit_scale: as in `token_logprobs`.
        chunk_size: most tokens of a tile; by the device where None. Every chunk reads the head from memory once.
        chunk_bytes: most bytes of a tile's logits in float32 (float64 for float64 input), which sets its columns, at
            least one; by the device where None.
        entropy_grad: True makes the entropy differentiable; otherwise it is a metric without gradient.

    Returns:
        logprobs [N] and entropy [N] in nats, float32 (float64 for float64 input).

    Raises:
        ValueError: weight or bias requires grad, a shape does not fit, a number is out of its range, or (on a CPU,
            where looking costs nothing; elsewhere it gives NaN) a target is.

    Source: gradient of the log-softmax; forming it in the forward: Liger Kernel (2410.10989).
    """
    _check(hidden, weight, targets, bias)
    device = "cpu" if hidden.device.type == "cpu" else "cuda"
    chunk_size = CHUNK_TOKENS[device] if chunk_size is None else chunk_size
    chunk_bytes = CHUNK_BYTES[device] if chunk_bytes is None else chunk_bytes
    for name, number in (("chunk_size", chunk_size), ("chunk_bytes", chunk_bytes)):
        if number < 1:
            raise ValueError(f"{name} is {number}; set it to 1 or more, or None to have it chosen by the device")
    head = Head(_autocast_once(weight), _autocast_once(bias), temperature, softcap, logit_scale)
    # Inside the forward of a Function grad mode is off, and needs_input_grad does not know of torch.no_grad().
    wants_grad = torch.is_grad_enabled() and hidden.requires_grad
    tiling = _Tiling(chunk_size, chunk_bytes, wants_grad, wants_grad and entropy_grad)
    return _FusedTokenLogprobs.apply(hidden, targets, head, tiling)


@dataclass(frozen=True)
class _Tiling:
    """How a pass is cut into tiles, and which gradients it forms."""

    chunk_size: int
    chunk_bytes: int
    wants_grad: bool
    entropy_grad: bool

    def chunks(self, num_tokens: int) -> list[slice]:
        """Return the tokens of every chunk: as few chunks as there can be, of about the same size."""
        count = -(-num_tokens // self.chunk_size)
        size = -(-num_tokens // max(1, count))
        return [slice(start, min(start + size, num_tokens)) for start in range(0, num_tokens, max(1, size))]

    def width(self, num_tokens: int, dtype: torch.dtype) -> int:
        """Return the columns of a tile of so many tokens."""
        columns = max(1, self.chunk_bytes // (num_tokens * dtype.itemsize))
        return columns - columns % 64 if columns > 64 else columns


class _FusedTokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, targets: Tensor, head: Head, tiling: _Tiling) -> tuple[Tensor, Tensor]:
        ctx.hidden_dtype = hidden.dtype
        hidden = _autocast_once(hidden)
        logprobs, entropy = (hidden.new_empty(len(hidden), dtype=_math_dtype(hidden)) for _ in range(2))
        asked = (tiling.wants_grad, tiling.entropy_grad)
        grads = [torch.empty_like(hidden, dtype=logprobs.dtype) if wanted else None for wanted in asked]
        # The operands have their dtypes; autocast would take the sums of a tile to another one.
        with torch.autocast(hidden.device.type, enabled=False):
            for rows in tiling.chunks(len(hidden)):
                width = tiling.width(rows.stop - rows.start, logprobs.dtype)
                chunk = Chunk(hidden[rows], targets[rows], head, width, *asked)
                logprobs[rows], entropy[rows], *of_chunk = chunk.run()
                for all_rows, some in zip(grads, of_chunk, strict=True):
                    if all_rows is not None:
                        all_rows[rows] = some
        ctx.save_for_backward(*(each for each in grads if each is not None))
        if not tiling.entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        grad = torch.zeros((), device=grad_logprobs.device)
        for upstream, grads in zip((grad_logprobs, grad_entropy), ctx.saved_tensors, strict=False):
            grad = grad + upstream[:, None] * grads
        return grad.to(ctx.hidden_dtype), None, None, None


def _check(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None) -> None:
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.requires_grad:
            raise ValueError(
                f"the {name} of the head requires grad, but fused_token_logprobs gives gradients to the hidden states "
                f"only; freeze the head with requires_grad_(False), or use token_logprobs"
            )
    if hidden.dim() != 2 or hidden.shape[1] != weight.shape[1] or targets.shape != hidden.shape[:1]:
        raise ValueError(
            f"hidden is {list(hidden.shape)}, weight {list(weight.shape)} and targets {list(targets.shape)}; "
            f"expected [N, H], [V, H] and [N]"
        )
    if targets.device.type == "cpu" and len(targets) and not 0 <= targets.min() <= targets.max() < len(weight):
        raise ValueError(
            f"targets go from {targets.min()} to {targets.max()}; expected token ids of the head's vocabulary, 0 to "
            f"{len(weight) - 1}"
        )


def _autocast_once(tensor: Tensor | None) -> Tensor | None:
    # Autocast keeps no copy of a frozen tensor: left to it, every product of every tile would cast the head anew.
    if tensor is None or tensor.dtype == torch.float64 or not torch.is_autocast_enabled(tensor.device.type):
        return tensor
    return tensor.to(torch.get_autocast_dtype(tensor.device.type))


def _math_dtype(hidden: Tensor) -> torch.dtype:
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32
