"""Compare vocabulary-parallel logprobs with those of the whole head; run by every process of a gloo group."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from onetrunk.ops import fused_token_logprobs, token_logprobs
from onetrunk.ops.vocab_parallel import VocabShard, logprobs_and_top1, vocab_parallel_logprobs
from tests.ops.test_logprobs import WAYS, case

# Vocabularies of even shares, of a short last share, and (with 4 processes) of an empty last share.
VOCABS = (12, 11, 5)
TOKENS, WIDTH = 7, 5


def share(vocab: int, rank: int, world_size: int) -> slice:
    """Return the rows of a process, as torch.chunk divides them."""
    size = -(-vocab // world_size)
    return slice(min(rank * size, vocab), min((rank + 1) * size, vocab))


def results(function: Any, case_of: tuple, with_entropy: bool, **more: Any) -> list[torch.Tensor]:
    """Return logprobs, entropies, and the gradient of an objective of them."""
    hidden, weight, targets, options = case_of
    logprobs, entropy = function(hidden, weight, targets, **options, **more)
    objective = (torch.linspace(-1, 2, len(targets), dtype=logprobs.dtype) * logprobs).sum()
    if with_entropy:
        objective = objective + (torch.linspace(1, -0.5, len(targets), dtype=logprobs.dtype) * entropy).sum()
    return [logprobs.detach(), entropy.detach(), torch.autograd.grad(objective, hidden)[0]]


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest entry."""
    return ((found - expected).abs().max() / expected.abs().max()).item()


def largest_error(rank: int, world_size: int, dtype: torch.dtype) -> float:
    """Return the largest error against the whole head, over all options, vocabularies and tile sizes."""
    errors = [0.0]
    for vocab in VOCABS:
        rows = share(vocab, rank, world_size)
        for way in WAYS:
            for with_entropy in (False, True):
                whole = case(TOKENS, WIDTH, vocab, dtype=dtype, **way)
                expected = results(token_logprobs, whole, with_entropy)
                hidden, weight, targets, options = case(TOKENS, WIDTH, vocab, dtype=dtype, **way)
                if "bias" in options:
                    options["bias"] = options["bias"][rows]
                own = (hidden, weight[rows], targets, options)
                shard = VocabShard(rows.start, vocab)
                for sizes in ({}, {"chunk_size": 3, "chunk_bytes": 3 * 8 * 2}):
                    kwargs = {"shard": shard, "entropy_grad": with_entropy, **sizes}
                    found = results(vocab_parallel_logprobs, own, with_entropy, **kwargs)
                    errors += [relative_error(a, b) for a, b in zip(found, expected, strict=True)]
    return max(errors)


def traffic(rank: int, world_size: int, vocab: int, with_grad: bool, entropy_grad: bool) -> dict[str, Any]:
    """Return the collectives of a forward and backward in float32: their names and elements."""
    hidden, weight, targets, _ = case(TOKENS, WIDTH, vocab, dtype=torch.float32)
    rows, seen, original = share(vocab, rank, world_size), [], dist.all_reduce

    def counting(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append(list(tensor.shape))
        return original(tensor, *args, **kwargs)

    dist.all_reduce = counting
    try:
        with torch.set_grad_enabled(with_grad):
            shard = VocabShard(rows.start, vocab)
            logprobs, entropy = vocab_parallel_logprobs(
                hidden, weight[rows], targets, shard, entropy_grad=entropy_grad
            )
        in_forward = len(seen)
        if with_grad:
            (logprobs.sum() + entropy.sum() * entropy_grad).backward()
    finally:
        dist.all_reduce = original
    return {"shapes": seen, "in_backward": len(seen) - in_forward}


def half_precision_error(rank: int, world_size: int) -> float:
    """Return the largest difference of logprobs from a whole bfloat16 head."""
    hidden, weight, targets, _ = case(64, 32, 256, dtype=torch.bfloat16)
    rows = share(256, rank, world_size)
    expected, _ = fused_token_logprobs(hidden, weight, targets)
    found, _ = vocab_parallel_logprobs(hidden, weight[rows], targets, VocabShard(rows.start, 256))
    return (found - expected).abs().max().item()


def message_of(rank: int, world_size: int, **changes: Any) -> str:
    hidden, weight, targets, _ = case()
    rows = share(11, rank, world_size)
    try:
        vocab_parallel_logprobs(hidden, weight[rows], targets, VocabShard(rows.start, 11), **changes)
    except ValueError as error:
        return str(error)
    return ""


def work(rank: int, folder: str, world_size: int) -> None:
    """Write what differs from one process into `folder`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    hidden, weight, targets, _ = case()
    rows = share(11, rank, world_size)
    shard = VocabShard(rows.start, 11)
    no_tokens, _ = vocab_parallel_logprobs(hidden[:0], weight[rows], targets[:0], shard)
    with torch.no_grad():
        scored, _ = vocab_parallel_logprobs(hidden, weight[rows], targets, shard)
    trained, _ = vocab_parallel_logprobs(hidden, weight[rows], targets, shard)
    gathered = [torch.empty_like(scored) for _ in range(world_size)]
    dist.all_gather(gathered, scored)
    _, _, is_top1 = logprobs_and_top1(hidden, weight[rows], targets, shard)
    # The target is the token with the highest logit in every second row.
    highest = (hidden @ weight.T).argmax(dim=1)
    chosen = torch.where(torch.arange(len(targets)) % 2 == 0, highest, (highest + 1) % 11)
    top1 = [found.tolist() for found in (is_top1, logprobs_and_top1(hidden, weight[rows], chosen, shard)[2])]
    facts = {
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
        "messages": [
            message_of(rank, world_size, temperature=0.0),
            message_of(rank, world_size, softcap=-1.0),
        ],
    }
    (Path(folder) / f"rank{rank}.json").write_text(json.dumps(facts))
    dist.destroy_process_group()
