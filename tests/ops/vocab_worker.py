"""Compare vocabulary-parallel logprobs with those of the whole head; run by every process of a gloo group."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from onetrunk.ops import Head, fused_token_logprobs, token_logprobs
from onetrunk.ops.logprobs import fused_logprobs_and_top1
from onetrunk.ops.running_softmax import VocabShard
from tests.ops.test_logprobs import WAYS, case

# Vocabularies of even shares, of a short last share, and (with 4 processes) of an empty last share.
VOCABS = (12, 11, 5)
TOKENS, WIDTH = 7, 5


def share(head: Head, rank: int, world_size: int) -> Head:
    """Return a head with the rows of a process, as torch.chunk divides them."""
    vocab = len(head.weight)
    size = -(-vocab // world_size)
    rows = slice(min(rank * size, vocab), min((rank + 1) * size, vocab))
    bias = None if head.bias is None else head.bias[rows]
    return replace(head, weight=head.weight[rows], bias=bias, shard=VocabShard(rows.start, vocab))


def results(function: Any, operands: tuple, with_entropy: bool, **sizes: Any) -> list[torch.Tensor]:
    """Return logprobs, entropies, and the gradient of an objective of them."""
    hidden, head, targets = operands
    logprobs, entropy = function(hidden, head, targets, **sizes)
    objective = (torch.linspace(-1, 2, len(targets), dtype=logprobs.dtype) * logprobs).sum()
    if with_entropy:
        objective = objective + (torch.linspace(1, -0.5, len(targets), dtype=logprobs.dtype) * entropy).sum()
    return [logprobs.detach(), entropy.detach(), torch.autograd.grad(objective, hidden)[0]]


def largest_error(rank: int, world_size: int, dtype: torch.dtype) -> float:
    """Return the largest difference from the whole head, relative to the largest entry, over all options, vocabularies
    and tile sizes."""
    errors = []
    for vocab, way, with_entropy in itertools.product(VOCABS, WAYS, (False, True)):
        hidden, head, targets = case(TOKENS, WIDTH, vocab, dtype=dtype, **way)
        expected = results(token_logprobs, (hidden, head, targets), with_entropy)
        for sizes in ({}, {"chunk_size": 3, "chunk_bytes": 3 * 8 * 2}):
            own = (hidden, share(head, rank, world_size), targets)
            found = results(fused_token_logprobs, own, with_entropy, entropy_grad=with_entropy, **sizes)
            errors += [(a - b).abs().max() / b.abs().max() for a, b in zip(found, expected, strict=True)]
    return torch.stack(errors).max().item()  # NaN if any is: Python's `max` would leave it out.


def traffic(rank: int, world_size: int, vocab: int, with_grad: bool, entropy_grad: bool) -> dict[str, Any]:
    """Return the collectives of a forward and backward in float32: their names and elements."""
    hidden, head, targets = case(TOKENS, WIDTH, vocab, dtype=torch.float32)
    own, seen, original = share(head, rank, world_size), [], dist.all_reduce

    def counting(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append(list(tensor.shape))
        return original(tensor, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", counting)
        with torch.set_grad_enabled(with_grad):
            logprobs, entropy = fused_token_logprobs(hidden, own, targets, entropy_grad=entropy_grad)
        in_forward = len(seen)
        if with_grad:
            (logprobs.sum() + entropy.sum() * entropy_grad).backward()
    return {"shapes": seen, "in_backward": len(seen) - in_forward}


def half_precision_error(rank: int, world_size: int) -> float:
    """Return the largest difference of logprobs from a whole bfloat16 head."""
    hidden, head, targets = case(64, 32, 256, dtype=torch.bfloat16)
    expected, _ = fused_token_logprobs(hidden, head, targets)
    found, _ = fused_token_logprobs(hidden, share(head, rank, world_size), targets)
    return (found - expected).abs().max().item()


def work(rank: int, folder: str, world_size: int) -> dict[str, Any]:
    """Return what differs from one process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    hidden, head, targets = case()
    own = share(head, rank, world_size)
    no_tokens, _ = fused_token_logprobs(hidden[:0], own, targets[:0])
    with torch.no_grad():
        scored, _ = fused_token_logprobs(hidden, own, targets)
    trained, _ = fused_token_logprobs(hidden, own, targets)
    gathered = [torch.empty_like(scored) for _ in range(world_size)]
    dist.all_gather(gathered, scored)
    # The target is the token with the highest logit in every second row.
    highest = (hidden @ head.weight.T).argmax(dim=1)
    chosen = torch.where(torch.arange(len(targets)) % 2 == 0, highest, (highest + 1) % 11)
    top1 = [fused_logprobs_and_top1(hidden, own, ids)[2].tolist() for ids in (targets, chosen)]
    return {
        "top1": [top1[0] == (targets == highest).tolist(), top1[1] == [i % 2 == 0 for i in range(len(targets))]],
        "float64": largest_error(rank, world_size, torch.float64),
        "float32": largest_error(rank, world_size, torch.float32),
        "bfloat16": half_precision_error(rank, world_size),
        "scoring": traffic(rank, world_size, 11, False, False),
        "update": traffic(rank, world_size, 11, True, False),
        "with entropy": traffic(rank, world_size, 11, True, True),
        "larger vocabulary": traffic(rank, world_size, 4096, True, False),
        "no tokens": len(no_tokens),
        "ratio is 1": torch.equal(scored, trained.detach()),
        "ranks agree": all(torch.equal(other, scored) for other in gathered),
    }
