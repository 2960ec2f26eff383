"""What an iteration must cost at least on this machine: its FLOPs and bytes over the measured ceilings.

The arithmetic counts real tokens alone (no padding), frozen weights without gradient and, below the cut, nothing after
sampling; LoRA's own products, some 3%, are left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from onetrunk.costs import ModelShape
from onetrunk.plan.costs import forward_flops, head_flops


@dataclass(frozen=True)
class Ceilings:
    """What this machine reaches at best: FLOPs of a matrix product and bytes copied (read and written), per second."""

    flops: float
    bandwidth: float


@dataclass(frozen=True)
class Iteration:
    """What one iteration works on.

    Args:
        policy, reward: configs; no reward: an adapter on the policy's trunk scores.
        trained_layers: of the policy, from the top.
        epochs: PPO epochs.
        prompts, completions: tokens of every row.
        itemsize: bytes of a weight; 0.5 in 4 bit.
    """

    policy: Any
    reward: Any
    trained_layers: int
    epochs: int
    prompts: Sequence[int]
    completions: Sequence[int]
    itemsize: float


def measure_ceilings(device: str, dtype: torch.dtype, now: Callable[[], float] = time.perf_counter) -> Ceilings:
    """Return the best of five matrix products and copies, timed with the clock of the phases."""
    size, num_bytes = (8192, 2**30) if device == "cuda" else (1536, 2**27)
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    product = _best_seconds(lambda: torch.mm(left, right), now)
    copy = _best_seconds(lambda: target.copy_(source), now)
    return Ceilings(flops=2.0 * size**3 / product, bandwidth=2.0 * num_bytes / copy)


def _best_seconds(run: Callable[[], Any], now: Callable[[], float]) -> float:
    seconds = []
    for _ in range(6):
        start = now()
        run()
        seconds.append(now() - start)
    return min(seconds[1:])


def least_seconds(work: Iteration, ceilings: Ceilings) -> dict[str, float]:
    """Return the seconds of each phase at the ceilings."""
    policy = ModelShape.from_config(work.policy)
    tokens, sampled = sum(work.prompts) + sum(work.completions), sum(work.completions)
    context = tokens / len(work.prompts) / 2
    layers = forward_flops(policy, tokens, work.trained_layers, context)
    branch = layers + head_flops(policy, sampled)
    scoring = 2 * branch
    if work.reward is None:
        scoring += layers
    else:
        reward = ModelShape.from_config(work.reward)
        scoring += forward_flops(reward, tokens, reward.num_layers, context)
    return {
        "generate": _sampling_seconds(policy, work, ceilings),
        "score": scoring / ceilings.flops,
        "update": 2 * work.epochs * branch / ceilings.flops,
    }


def _sampling_seconds(shape: ModelShape, work: Iteration, ceilings: Ceilings) -> float:
    """Return the seconds of one pass over the prompts, and of one pass over all weights per further token."""
    prompts = sum(work.prompts)
    flops = forward_flops(shape, prompts, shape.num_layers, prompts / len(work.prompts) / 2)
    seconds = flops / ceilings.flops
    for t in range(1, max(work.completions)):
        running = sum(length > t for length in work.completions)
        seconds += _decode_seconds(shape, running, work.itemsize, ceilings)
    return seconds


def decode_seconds(config: Any, rows: int, itemsize: float, ceilings: Ceilings) -> float:
    """Return the least seconds of one decoded token of `rows` rows; the cache, which is read too, is left out."""
    return _decode_seconds(ModelShape.from_config(config), rows, itemsize, ceilings)


def _decode_seconds(shape: ModelShape, rows: int, itemsize: float, ceilings: Ceilings) -> float:
    # The head is never quantised.
    weights = shape.num_layers * shape.layer_parameters * itemsize + shape.head_parameters * max(itemsize, 2)
    flops = forward_flops(shape, rows, shape.num_layers) + head_flops(shape, rows)
    return max(flops / ceilings.flops, weights / ceilings.bandwidth)
