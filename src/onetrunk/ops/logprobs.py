"""Logprobs and entropies of target tokens from hidden states: a naive reference and its fused twin.

`token_logprobs` forms all [N, V] logits; `fused_token_logprobs` goes over tiles of them (logprob_tiles.py) and holds
one at a time. The gradient of a token's logprob with respect to its hidden state is one vector, W_y - sum_v p_v W_v.
The fused op computes it in the forward, and its backward multiplies it by the upstream gradient.

Both compute hidden @ weight.T + bias in the dtype of the operands (as the model's own lm_head does, also under
autocast), then in float32 (float64 stays): * logit_scale, softcap cap * tanh(x / cap), / temperature, log-softmax.
That is the order of transformers: Cohere multiplies by its `logit_scale`, Granite divides by its `logits_scaling`
(pass 1 / logits_scaling), Gemma 2 caps after.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from onetrunk.ops.logprob_tiles import Chunk, ShardChunk
from onetrunk.ops.masking import at_least_float32
from onetrunk.ops.running_softmax import Head

# Measured on CPU: products run at full speed if the tiles stay in the cache. A GPU needs larger products.
CHUNK_TOKENS = {"cpu": 1024, "cuda": 8192}
CHUNK_BYTES = {"cpu": 4 * 2**20, "cuda": 128 * 2**20}


def token_logprobs(hidden: Tensor, head: Head, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logprob of every target and the entropy of its distribution, from all [N, V] logits.

    The naive twin of `fused_token_logprobs`; differentiable in every tensor.

    Args:
        hidden: [N, H] states that predict the targets, after the final norm.
        head: whole, in the dtype of hidden.
        targets: [N] int64 token ids.

    Returns:
        logprobs [N] and entropy [N] in nats, both float32 (float64 for float64 input).
    """
    logits = head.transform(at_least_float32(F.linear(hidden, head.weight, head.bias)))
    all_logprobs = F.log_softmax(logits, dim=-1)
    logprobs = all_logprobs.gather(-1, targets[:, None]).squeeze(-1)
    return logprobs, -(all_logprobs.exp() * all_logprobs).sum(-1)


def fused_token_logprobs(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    *,
    chunk_size: int | None = None,
    chunk_bytes: int | None = None,
    entropy_grad: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return what `token_logprobs` returns, tile by tile of tokens and vocabulary, without [N, V] in memory.

    Each tile takes two products if hidden requires grad, one otherwise, and a third with `entropy_grad`; the backward
    takes none. The tiles are the same with and without gradients, so the logprobs are bitwise the same: an unchanged
    policy has ratio 1 exactly. Only the float32 gradient vectors [N, H] are kept for the backward, so memory does not
    grow with the vocabulary.

    Args:
        hidden: [N, H]; the gradient flows here only. N may be 0.
        head: frozen, in the dtype of hidden. With a shard (v rows, v may be 0) all processes of its group make this
            call with the same hidden states and targets, and get the same results and the whole gradient.
        targets: [N] int64 in 0..V-1.
        chunk_size: most tokens of a tile, at least 1; None: chosen by the device. Every chunk reads the head once.
        chunk_bytes: most bytes of a tile's logits in float32 (float64 for float64 input), which sets its number of
            columns; None: chosen by the device.
        entropy_grad: make the entropy differentiable.

    Returns:
        logprobs [N] and entropy [N] in nats, float32 (float64 for float64 input).

    Raises:
        ValueError: weight or bias requires grad, a shape does not fit, or a target is outside the vocabulary (checked
            on a CPU only; elsewhere its logprob is NaN).

    Source: gradient of the log-softmax; forming it in the forward: Liger Kernel (2410.10989).
    """
    return fused_logprobs_and_top1(hidden, head, targets, chunk_size, chunk_bytes, entropy_grad)[:2]


def fused_logprobs_and_top1(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    chunk_size: int | None = None,
    chunk_bytes: int | None = None,
    entropy_grad: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `fused_token_logprobs` returns, and a bool [N]: whether no logit is above that of the target.

    Arguments and errors as there.
    """
    _check_operands(hidden, head, targets)
    head = replace(head, weight=_autocast_once(head.weight), bias=_autocast_once(head.bias))
    device = "cpu" if hidden.device.type == "cpu" else "cuda"
    # Decided here: inside the forward of a Function grad mode is off, and needs_input_grad ignores torch.no_grad().
    wants_grad = torch.is_grad_enabled() and hidden.requires_grad
    sizes = (chunk_size or CHUNK_TOKENS[device], chunk_bytes or CHUNK_BYTES[device])
    return _FusedTokenLogprobs.apply(hidden, targets, head, _Tiling(*sizes, wants_grad, wants_grad and entropy_grad))


@dataclass(frozen=True)
class _Tiling:
    """The tiles of a call, and the gradients that it computes."""

    chunk_size: int
    chunk_bytes: int
    wants_grad: bool
    entropy_grad: bool

    def chunks(self, num_tokens: int) -> list[slice]:
        """Return the tokens of every chunk: as few chunks as possible, of about the same size."""
        count = -(-num_tokens // self.chunk_size)
        size = -(-num_tokens // max(1, count))
        return [slice(start, min(start + size, num_tokens)) for start in range(0, num_tokens, max(1, size))]

    def width(self, num_tokens: int, dtype: torch.dtype) -> int:
        """Return the number of columns of a tile of `num_tokens` tokens."""
        columns = max(1, self.chunk_bytes // (num_tokens * dtype.itemsize))
        return columns - columns % 64 if columns > 64 else columns


class _FusedTokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, targets: Tensor, head: Head, tiling: _Tiling) -> tuple[Tensor, ...]:
        ctx.hidden_dtype = hidden.dtype
        hidden, new_chunk = _autocast_once(hidden), Chunk if head.shard is None else ShardChunk
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logprobs, entropy = (hidden.new_empty(len(hidden), dtype=dtype) for _ in range(2))
        is_top1 = hidden.new_empty(len(hidden), dtype=torch.bool)
        wanted = (tiling.wants_grad, tiling.entropy_grad)
        grads = [torch.empty_like(hidden, dtype=dtype) if is_wanted else None for is_wanted in wanted]
        # The operands have their dtypes already; autocast would cast the sums of a tile.
        with torch.autocast(hidden.device.type, enabled=False):
            for rows in tiling.chunks(len(hidden)):
                width = tiling.width(rows.stop - rows.start, dtype)
                chunk = new_chunk(hidden[rows], targets[rows], head, width, *wanted)
                logprobs[rows], entropy[rows], *chunk_grads = chunk.run()
                is_top1[rows] = chunk.sums.target >= chunk.sums.highest
                for grad, chunk_grad in zip(grads, chunk_grads, strict=True):
                    if grad is not None:
                        grad[rows] = chunk_grad
        ctx.save_for_backward(*(grad for grad in grads if grad is not None))
        constants = (is_top1,) if tiling.entropy_grad else (is_top1, entropy)
        ctx.mark_non_differentiable(*constants)
        return logprobs, entropy, is_top1

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        grad = torch.zeros((), device=grad_logprobs.device)
        for upstream, grads in zip((grad_logprobs, grad_entropy), ctx.saved_tensors, strict=False):
            grad = grad + upstream[:, None] * grads
        return grad.to(ctx.hidden_dtype), None, None, None


def _check_operands(hidden: Tensor, head: Head, targets: Tensor) -> None:
    for name, tensor in (("weight", head.weight), ("bias", head.bias)):
        if tensor is not None and tensor.requires_grad:
            raise ValueError(
                f"the {name} of the head requires grad, but fused_token_logprobs gives gradients to the hidden states "
                f"only; freeze the head with requires_grad_(False), or use token_logprobs"
            )
    if hidden.dim() != 2 or hidden.shape[1] != head.weight.shape[1] or targets.shape != hidden.shape[:1]:
        raise ValueError(
            f"hidden is {list(hidden.shape)}, weight {list(head.weight.shape)} and targets {list(targets.shape)}; "
            f"expected [N, H], [V, H] and [N]"
        )
    if targets.device.type == "cpu" and len(targets) and not 0 <= targets.min() <= targets.max() < head.vocab_size:
        raise ValueError(
            f"targets go from {targets.min()} to {targets.max()}; expected token ids of the head's vocabulary, 0 to "
            f"{head.vocab_size - 1}"
        )


def _autocast_once(tensor: Tensor | None) -> Tensor | None:
    """Return the tensor in the dtype of autocast, if that is on."""
    # Autocast caches no copy of a frozen tensor: it would cast the head again in every product of every tile.
    if tensor is None or tensor.dtype == torch.float64 or not torch.is_autocast_enabled(tensor.device.type):
        return tensor
    return tensor.to(torch.get_autocast_dtype(tensor.device.type))
