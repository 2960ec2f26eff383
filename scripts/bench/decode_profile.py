"""What one decoded token of the local sampler costs: seconds, operations, and kernels on a GPU.

Every number is the difference of two calls of `generate` that differ in their number of tokens, divided by that
difference: the prompts' forward and everything else that happens once cancels out.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from onetrunk.rollouts.base import SamplingParams

FEW = 4
# Repetitions of the timing, of which the fastest counts.
REPEATS = 3
# Operations that launch no kernel and do not say themselves that they are views.
FREE = frozenset(
    "as_strided view _unsafe_view reshape _reshape_alias transpose t numpy_T permute expand slice narrow select"
    " unsqueeze squeeze unflatten flatten split unbind alias detach detach_ lift_fresh resolve_conj resolve_neg"
    " result_type promote_types empty empty_like empty_strided new_empty new_empty_strided set_ resize_ to item"
    " is_nonzero _local_scalar_dense".split()
)


class Operations(TorchDispatchMode):
    """Counts the operations of this thread that launch at least one kernel on a GPU, backward included.

    Views, allocations and reads of a number launch none. Attention is one, as with the fused kernels of a GPU.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        library, _, name = function._schema.name.rpartition("::")
        self.counts[name] += library != "profiler" and not function.is_view and name not in FREE
        return function(*args, **(kwargs or {}))


def count_operations(run: Callable[[], Any]) -> Counter[str]:
    """Return how often `run` calls each operation that launches a kernel."""
    with Operations() as operations:
        run()
    return operations.counts


def count_kernels(run: Callable[[], Any]) -> int:
    """Return how many kernels `run` starts on the GPU; copies and fills count too."""
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        run()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in trace.events())


def sampler(backend: Any, prompts: Sequence[list[int]]) -> Callable[[int], None]:
    """Return a function that samples completions of a given number of tokens, new ones each time."""
    number = iter(range(10**6))

    def sample(length: int) -> None:
        key = next(number)
        backend.generate(prompts, SamplingParams(length), [(0, key, row) for row in range(len(prompts))])

    return sample


def decode_profile(
    backend: Any, prompts: list[list[int]], tokens: int, now: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Return what one token of all rows together costs.

    Args:
        backend: a LocalBackend with its model; nothing stops its completions.
        prompts: token ids of the rows.
        tokens: by how many the two calls differ, at least 1.
        now: the clock; it must wait for a GPU.

    Returns:
        `seconds` and `operations`, and `kernels` on a GPU.
    """
    sample = sampler(backend, prompts)

    def per_token(measure: Callable[[Callable[[], Any]], float]) -> float:
        few, many = (measure(lambda length=length: sample(length)) for length in (FEW, FEW + tokens))
        return (many - few) / tokens

    def fastest(run: Callable[[], Any]) -> float:
        seconds = []
        for _ in range(REPEATS):
            start = now()
            run()
            seconds.append(now() - start)
        return min(seconds)

    sample(FEW)
    # Never negative: on a small model the difference may drown in noise.
    costs = {"seconds": max(per_token(fastest), 0.0), "operations": per_token(lambda r: count_operations(r).total())}
    if next(backend.model.parameters()).is_cuda:
        costs["kernels"] = per_token(count_kernels)
    return costs
