"""Logprobs and entropies over a head whose rows (the vocabulary) are split over processes.

Every process runs the tiles of its own rows (logprob_tiles.py). For a chunk of n tokens the processes exchange the
highest logit [n], three sums [3, n], and in training the gradient vectors [n, H]: the head is never gathered, and the
bytes do not grow with the vocabulary. The backward exchanges nothing. The split of the softmax: Megatron-LM
(1909.08053), section 3.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from onetrunk.ops.logprob_tiles import Chunk
from onetrunk.ops.running_softmax import Head, RunningSums


class ShardChunk(Chunk):
    """A chunk over the rows of one process; a target outside 0..v-1 belongs to another process."""

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
