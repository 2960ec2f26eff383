"""Logprobs and entropies of given tokens from hidden states: a naive reference and its fused twin.

`token_logprobs` forms all [N, V] logits; `fused_token_logprobs` goes over chunks of tokens and never holds more than a
chunk. The gradient of a token's logprob with respect to its hidden state is one vector, W_y - sum_v p_v W_v, so the
fused op forms it in the forward and its backward multiplies by the upstream number: it serves any objective over
logprobs. Knows hidden states and a frozen head, no model.

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

from onetrunk.ops.masking import at_least_float32

CHUNK_BYTES = 64 * 2**20


@dataclass(frozen=True)
class _Head:
    """A frozen language-model head and what is done to its logits; fields as in `token_logprobs`."""

    weight: Tensor
    bias: Tensor | None
    temperature: float
    softcap: float | None
    logit_scale: float

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"temperature is {self.temperature}; logprobs need a temperature above 0")
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"softcap is {self.softcap}; set a number above 0, or None for no soft-capping")

    def logits(self, hidden: Tensor) -> Tensor:
        """Return [N, V] logits after scale, softcap and temperature, in float32 at least."""
        logits = at_least_float32(F.linear(hidden, self.weight, self.bias))
        if self.logit_scale != 1:
            logits = logits * self.logit_scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits if self.temperature == 1 else logits / self.temperature

    def pull_back(self, grad_logits: Tensor, logits: Tensor) -> Tensor:
        """Return the gradient [N, H] with respect to the hidden states of a function of `logits`."""
        if self.softcap is not None:
            # d tanh(u) / du = 1 - tanh(u)^2, and tanh(u) = logits * temperature / softcap
            grad_logits = grad_logits * (1 - (logits * (self.temperature / self.softcap)) ** 2)
        product = at_least_float32(grad_logits.to(self.weight.dtype) @ self.weight)
        return product * (self.logit_scale / self.temperature)


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
    logits = _Head(weight, bias, temperature, softcap, logit_scale).logits(hidden)
    return _logprobs_and_entropy(logits, targets)[:2]


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
    chunk_bytes: int = CHUNK_BYTES,
    entropy_grad: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return what `token_logprobs` returns, chunk by chunk of tokens, never holding [N, V].

    Two products per chunk where hidden requires grad, one otherwise, and a third with `entropy_grad`. Chunks do not
    depend on whether gradients are formed, so the logprobs are bitwise the same with grad and without: a policy that
    has not moved has ratio 1 exactly. About four tensors of a chunk's size live at a time. The gradient vectors
    [N, H], in float32, are what is kept for the backward.

    Args:
        hidden: [N, H]; the gradient flows here only. N may be 0.
        weight: [V, H], frozen, in the dtype of hidden.
        targets: [N] int64.
        temperature: as in `token_logprobs`.
        bias: [V], frozen, or None.
        softcap: as in `token_logprobs`.
        logit_scale: as in `token_logprobs`.
        chunk_size: tokens per chunk; from chunk_bytes where None.
        chunk_bytes: most bytes of one chunk's logits in float32 (float64 for float64 input); at least one token.
        entropy_grad: True makes the entropy differentiable; otherwise it is a metric without gradient.

    Returns:
        logprobs [N] and entropy [N] in nats, float32 (float64 for float64 input).

    Raises:
        ValueError: weight or bias requires grad, a shape does not fit, or a number is out of its range.

    Source: gradient of the log-softmax; forming it in the forward: Liger Kernel (2410.10989).
    """
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
    head = _Head(_autocast_once(weight), _autocast_once(bias), temperature, softcap, logit_scale)
    if chunk_size is None:
        chunk_size = max(1, chunk_bytes // (weight.shape[0] * _math_dtype(hidden).itemsize))
    if chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size}; set at least 1 token, or None to take it from chunk_bytes")
    # Inside the forward of a Function grad mode is off, and needs_input_grad does not know of torch.no_grad().
    wants_grad = torch.is_grad_enabled() and hidden.requires_grad
    return _FusedTokenLogprobs.apply(hidden, targets, head, chunk_size, wants_grad, wants_grad and entropy_grad)


class _FusedTokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        targets: Tensor,
        head: _Head,
        chunk_size: int,
        wants_grad: bool,
        entropy_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropy = (hidden.new_empty(len(hidden), dtype=_math_dtype(hidden)) for _ in range(2))
        logprob_grads = torch.empty_like(hidden, dtype=logprobs.dtype) if wants_grad else None
        entropy_grads = torch.empty_like(hidden, dtype=logprobs.dtype) if entropy_grad else None
        for start in range(0, len(hidden), chunk_size):
            rows = slice(start, start + chunk_size)
            logits = head.logits(hidden[rows])
            logprobs[rows], entropy[rows], all_logprobs, probs = _logprobs_and_entropy(logits, targets[rows])
            if entropy_grads is not None:
                # dH / dz_v = -p_v * (log p_v + H)
                entropy_grads[rows] = head.pull_back(-probs * (all_logprobs + entropy[rows, None]), logits)
            if logprob_grads is not None:
                # d log p_y / dz_v = [v = y] - p_v, one difference before the product: no cancellation as p_y nears 1
                grad = probs.neg_().scatter_add_(1, targets[rows, None], torch.ones_like(probs[:, :1]))
                logprob_grads[rows] = head.pull_back(grad, logits)
        ctx.save_for_backward(*(grads for grads in (logprob_grads, entropy_grads) if grads is not None))
        ctx.hidden_dtype = hidden.dtype
        if not entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        grad = torch.zeros((), device=grad_logprobs.device)
        for upstream, grads in zip((grad_logprobs, grad_entropy), ctx.saved_tensors, strict=False):
            grad = grad + upstream[:, None] * grads
        return grad.to(ctx.hidden_dtype), None, None, None, None, None


def _autocast_once(tensor: Tensor | None) -> Tensor | None:
    # Autocast keeps no copy of a frozen tensor: left to it, every product of every chunk would cast the head anew.
    if tensor is None or tensor.dtype == torch.float64 or not torch.is_autocast_enabled(tensor.device.type):
        return tensor
    return tensor.to(torch.get_autocast_dtype(tensor.device.type))


def _math_dtype(hidden: Tensor) -> torch.dtype:
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


def _logprobs_and_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    all_logprobs = F.log_softmax(logits, dim=-1)
    probs = all_logprobs.exp()
    logprobs = all_logprobs.gather(-1, targets[:, None]).squeeze(-1)
    return logprobs, -(probs * all_logprobs).sum(-1), all_logprobs, probs
