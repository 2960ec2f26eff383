"""Logprobs, entropies and their gradients from tiles of logits that are each computed once.

A tile is some tokens by some columns of the vocabulary. A running softmax needs no tile twice: its sums hold
exp(z - highest) per token and are rescaled where a later tile has a higher logit z. The target's own term stays
outside them: 1 - p_y = (sum over the others) / (sum over all) then has no cancellation as p_y nears 1, also with
bfloat16 products. The gradient of a token's logprob, W_y - sum_v p_v W_v, is a sum over tiles too. From Milakov and
Gimelshein 2018 (1805.02867, online softmax) and Dao et al. 2022 (2205.14135), whose attention is this sum with the
head's rows as keys and as values.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from onetrunk.ops.kernels import runs_kernels
from onetrunk.ops.running_softmax import Head, RunningSums


class Chunk:
    """The logits of some tokens, tile after tile, in buffers that every tile reuses.

    Args:
        hidden: [n, H] in the dtype of the head's weight.
        targets: [n] int64.
        head: the frozen head.
        width: columns of a tile.
        wants_grad: also sum up the gradient vectors of the logprobs.
        entropy_grad: also sum up those of the entropies.
    """

    def __init__(
        self, hidden: Tensor, targets: Tensor, head: Head, width: int, wants_grad: bool, entropy_grad: bool
    ) -> None:
        self.hidden, self.targets, self.head, self.width = hidden, targets, head, min(width, max(1, len(head.weight)))
        self.dtype = torch.promote_types(hidden.dtype, torch.float32)
        self.sums = RunningSums.empty(len(hidden), self.dtype, hidden.device)
        # Sums of the head's rows, weighted by exp(z_v - highest), and by that times (z_v - highest).
        self.rows, self.spread_rows = (
            torch.zeros(hidden.shape, dtype=self.dtype, device=hidden.device) if wanted else None
            for wanted in (wants_grad or entropy_grad, entropy_grad)
        )
        self._buffers: dict[str, Tensor] = {}

    def run(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Return logprobs [n], entropies [n] and the gradients [n, H] of each, None where not wanted."""
        self.add_tiles()
        return self.results()

    def add_tiles(self) -> None:
        """Add every tile of the head to the sums."""
        for start in range(0, len(self.head.weight), self.width):
            self._add_tile(start)

    def target_rows(self) -> Tensor:
        """Return a copy of the head's rows at the targets [n, H]."""
        return self.head.weight[self.targets].to(self.dtype)

    def results(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Return what `run` returns, from the sums over all tiles."""
        logprobs, entropy, total = self.sums.logprobs_and_entropy()
        if self.rows is None:
            return logprobs, entropy, None, None
        damping, target_rows = self.head.damping(self.sums.target), self.target_rows()
        if damping is not None:
            target_rows *= damping[:, None]
        entropy_grads = None
        if self.spread_rows is not None:
            # dH / dz_v = -p_v * (log p_v + H), with log p_v = (z_v - highest) - log(total)
            others = self.spread_rows + (entropy - total.log())[:, None] * self.rows
            entropy_grads = target_rows * (logprobs.exp() * (logprobs + entropy))[:, None] + others / total[:, None]
            entropy_grads *= -self.head.factor
        # d log p_y / dz_v = [v = y] - p_v
        target_rows *= (self.sums.others / total)[:, None]
        logprob_grads = target_rows.addcdiv_(self.rows, total[:, None], value=-1)
        return logprobs, entropy, logprob_grads.mul_(self.head.factor), entropy_grads

    def _add_tile(self, start: int) -> None:
        head, weight = self.head, self.head.weight[start : start + self.width]
        logits = self._buffer("logits", len(weight), weight.dtype)
        if head.bias is None:
            torch.mm(self.hidden, weight.T, out=logits)
        else:
            torch.addmm(head.bias[start : start + self.width], self.hidden, weight.T, out=logits)
        absorb = self._absorb_by_kernel if runs_kernels(logits) else self._absorb
        decay, shift, weights, spread_weights = absorb(logits, self.targets - start)
        if self.spread_rows is not None:
            # With another highest: sum of e^(z-h) * (z-h) -> e^shift * (sum of e^(z-h) * (z-h) + shift * e^(z-h))
            self.spread_rows.addcmul_(self.rows, shift[:, None]).mul_(decay[:, None])
            _add_product(self.spread_rows, spread_weights, weight)
        if self.rows is not None:
            self.rows.mul_(decay[:, None])
            _add_product(self.rows, weights, weight)

    def _absorb(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Add a tile to the sums; return how the sums were rescaled and the weights of the head's rows.

        Args:
            logits: [n, w] raw logits; overwritten.
            targets: [n] columns of the targets, outside 0..w-1 where the target is in another tile.

        Returns:
            decay [n] and shift [n]: shift is the old minus the new highest logit, decay its exp. Then exp(z - highest)
            * damping [n, w] and the same times (z - highest), 0 at the targets, in the dtype of logits; None where no
            gradient is formed.
        """
        width, sums = logits.shape[1], self.sums
        z = logits if logits.dtype == self.dtype else self._buffer("z", width, self.dtype).copy_(logits)
        damping = self._transform(z)
        highest = torch.maximum(sums.highest, z.amax(1))
        shift = sums.highest - highest
        decay, sums.highest = shift.exp(), highest

        is_here = ((targets >= 0) & (targets < width))[:, None]
        column = targets.clamp(0, width - 1)[:, None]
        sums.target = torch.where(is_here, z.gather(1, column), sums.target[:, None])[:, 0]
        probs = torch.exp(z.sub_(highest[:, None]), out=self._buffer("probs", width, self.dtype))
        probs.scatter_(1, column, torch.where(is_here, 0.0, probs.gather(1, column)))
        z *= probs
        sums.spread = decay * (sums.spread + shift * sums.others) + z.sum(1)
        sums.others = decay * sums.others + probs.sum(1)
        if self.rows is None:
            return decay, shift, None, None
        if damping is not None:
            probs *= damping
            z *= damping
        spread_weights = z.to(logits.dtype) if self.spread_rows is not None else None
        return decay, shift, probs if probs.dtype == logits.dtype else logits.copy_(probs), spread_weights

    def _transform(self, z: Tensor) -> Tensor | None:
        """Scale, cap and cool the logits in place; return their damping, or None where it is 1 or not needed."""
        head = self.head
        if head.logit_scale != 1:
            z *= head.logit_scale
        if head.softcap is not None:
            z.div_(head.softcap).tanh_().mul_(head.softcap)
        if head.temperature != 1:
            z /= head.temperature
        return None if self.rows is None else head.damping(z)

    def _absorb_by_kernel(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        from onetrunk.ops.kernels.logprob import absorb

        spread_weights = None
        if self.spread_rows is not None:
            spread_weights = self._buffer("spread_weights", logits.shape[1], logits.dtype)
        decay, shift = absorb(logits, targets, self.sums, self.head, self.rows is not None, spread_weights)
        return decay, shift, logits, spread_weights

    def _buffer(self, name: str, width: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialised [n, width], the same memory for every tile."""
        n = len(self.hidden)
        if name not in self._buffers:
            self._buffers[name] = torch.empty(n * self.width, dtype=dtype, device=self.hidden.device)
        return self._buffers[name][: n * width].view(n, width)


class ShardChunk(Chunk):
    """A chunk over the rows of one process, where the vocabulary is split over several.

    A target outside 0..v-1 belongs to another process. For n tokens the processes exchange the highest logit [n],
    three sums [3, n], and in training the gradient vectors [n, H]: the head is never gathered, and the bytes do not
    grow with the vocabulary. The backward exchanges nothing.

    Source: the split of the softmax: Megatron-LM (1909.08053), section 3.
    """

    def __init__(self, hidden: Tensor, targets: Tensor, head: Head, *args: Any) -> None:
        super().__init__(hidden, targets - head.shard.first, head, *args)

    def run(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        self.add_tiles()
        self._join_sums()
        logprobs, entropy, *grads = self.results()
        wanted = [grad for grad in grads if grad is not None]
        if wanted:
            # Each is a sum over the vocabulary, so those of the processes add up.
            wanted = self._all_reduce(torch.stack(wanted)).unbind()
        return logprobs, entropy, *wanted, *([None] * (2 - len(wanted)))

    @property
    def _is_here(self) -> Tensor:
        """[n] bool: whether this process holds the target's row."""
        return (self.targets >= 0) & (self.targets < len(self.head.weight))

    def _join_sums(self) -> None:
        """Make the sums those over the whole vocabulary, and rescale the sums of rows to the same highest logit."""
        sums = self.sums
        highest = self._all_reduce(sums.highest.clone(), dist.ReduceOp.MAX)
        shift = sums.highest - highest
        decay = shift.exp()
        target = torch.where(self._is_here, sums.target, 0.0)
        joined = torch.stack([sums.others * decay, decay * (sums.spread + shift * sums.others), target])
        others, spread, target = self._all_reduce(joined)
        self.sums = RunningSums(highest, others, spread, target)
        if self.spread_rows is not None:
            self.spread_rows.addcmul_(self.rows, shift[:, None]).mul_(decay[:, None])
        if self.rows is not None:
            self.rows.mul_(decay[:, None])

    def target_rows(self) -> Tensor:
        """Return the head's rows at the targets [n, H], 0 where another process holds them."""
        weight = self.head.weight
        if not len(weight):
            return torch.zeros_like(self.hidden, dtype=self.dtype)
        rows = weight[self.targets.clamp(0, len(weight) - 1)].to(self.dtype)
        return rows.masked_fill_(~self._is_here[:, None], 0.0)

    def _all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        dist.all_reduce(tensor, op=op, group=self.head.shard.group)
        return tensor


def _add_product(total: Tensor, weights: Tensor, rows: Tensor) -> None:
    if total.dtype == rows.dtype:
        total.addmm_(weights, rows)
    else:
        total.add_(weights @ rows)
