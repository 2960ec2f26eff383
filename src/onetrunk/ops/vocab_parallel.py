"""Logprobs and entropies over a head whose rows (the vocabulary) are split over processes.

Every process runs the tiles of its own rows (logprob_tiles.py). For a chunk of n tokens the processes exchange the
highest logit [n], three sums [3, n], and in training the gradient vectors [n, H]: the head is never gathered, and the
bytes do not grow with the vocabulary. The backward exchanges nothing. The split of the softmax: Megatron-LM
(1909.08053), section 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from onetrunk.ops.logprob_tiles import Chunk
from onetrunk.ops.logprobs import autocast_once, check_operands, logprobs_by_tiles
from onetrunk.ops.running_softmax import Head, RunningSums


@dataclass(frozen=True)
class VocabShard:
    """The rows of the head that this process holds.

    Args:
        first: vocabulary id of its first row.
        vocab_size: rows of all processes.
        group: the processes that hold the head together; None: all.
    """

    first: int
    vocab_size: int
    group: dist.ProcessGroup | None = None


def vocab_shard(weight: Tensor) -> VocabShard | None:
    """Return the rows of a divided head that this process holds; None if it holds the head whole."""
    if not isinstance(weight, DTensor):
        return None
    mesh = weight.device_mesh
    step = -(-weight.shape[0] // mesh.size())
    return VocabShard(min(mesh.get_local_rank() * step, weight.shape[0]), weight.shape[0], mesh.get_group())


def vocab_parallel_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    shard: VocabShard,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    *,
    chunk_size: int | None = None,
    chunk_bytes: int | None = None,
    entropy_grad: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return what `fused_token_logprobs` returns over the whole head, the same on every process of the group.

    All processes of the group must call it with the same hidden states and targets. The gradient of the hidden states
    is whole on each of them.

    Args:
        hidden: [N, H]; the gradient flows here only. N may be 0.
        weight: [v, H], the rows of this process, frozen; v may be 0.
        targets: [N] int64 ids of the whole vocabulary.
        shard: which rows these are, and the processes that hold the others.
        bias: [v] of those rows, or None.
        temperature, softcap, logit_scale, chunk_size, chunk_bytes, entropy_grad: as in `fused_token_logprobs`.

    Raises:
        ValueError: as `fused_token_logprobs`.
    """
    options = (temperature, bias, softcap, logit_scale)
    sizes = {"chunk_size": chunk_size, "chunk_bytes": chunk_bytes, "entropy_grad": entropy_grad}
    return logprobs_and_top1(hidden, weight, targets, shard, *options, **sizes)[:2]


def logprobs_and_top1(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    shard: VocabShard,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    *,
    chunk_size: int | None = None,
    chunk_bytes: int | None = None,
    entropy_grad: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `vocab_parallel_logprobs` returns, and a bool [N]: whether no logit is above that of the target.

    Arguments and errors as there.
    """
    check_operands(hidden, weight, targets, bias, shard.vocab_size)
    head = _HeadShard(autocast_once(weight), autocast_once(bias), temperature, softcap, logit_scale, shard)
    return logprobs_by_tiles(hidden, targets, head, chunk_size, chunk_bytes, entropy_grad, _ShardChunk)


@dataclass(frozen=True)
class _HeadShard(Head):
    shard: VocabShard


class _ShardChunk(Chunk):
    """A chunk over the rows of one process; a target outside 0..v-1 belongs to another process."""

    head: _HeadShard

    def __init__(self, hidden: Tensor, targets: Tensor, head: _HeadShard, *args: Any) -> None:
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
