"""What one decoded token of the local sampler costs: seconds, operations, and kernels on a GPU.

Every number is the difference of two calls of `generate` that differ in their number of tokens, divided by that
difference: the prompts' forward and everything else that happens once cancels out.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch._inductor.config
from torch.profiler import ProfilerActivity, profile

from onetrunk.rollouts.base import SamplingParams

# The profiler then sees the kernels that torch.compile makes for a CPU.
torch._inductor.config.cpp.enable_kernel_profile = True

FEW = 4
# Repetitions of the timing, of which the fastest counts.
REPEATS = 3


# Events of the profiler that compute nothing: views, allocation, and what the dispatcher does before the work.
IDLE = frozenset(
    "as_strided view _unsafe_view reshape _reshape_alias transpose t numpy_T permute expand slice narrow select"
    " unsqueeze squeeze unflatten flatten split unbind alias detach detach_ lift_fresh resolve_conj resolve_neg"
    " result_type promote_types empty empty_like empty_strided new_empty set_ resize_ contiguous to _to_copy item"
    " is_nonzero".split()
)


def count_operations(run: Callable[[], Any]) -> Counter[str]:
    """Return how often `run` starts each piece of work on the CPU: an operation of torch, or a compiled kernel.

    Views and allocations do not count, and of nested operations only the innermost does.
    """
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        run()
    calls: Counter[str] = Counter()

    def count(event: Any) -> bool:
        works_inside = [count(child) for child in event.cpu_children]
        library, _, name = event.name.rpartition("::")
        # A compiled kernel is named after its graph.
        is_work = name.startswith("graph_") if not library else name not in IDLE
        if is_work and not any(works_inside):
            calls[event.name] += 1
        return is_work or any(works_inside)

    for event in trace.events():
        if event.cpu_parent is None:
            count(event)
    return calls


def count_kernels(run: Callable[[], Any]) -> int:
    """Return how many kernels `run` starts on the GPU; copies and fills count too."""
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        run()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in trace.events())


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
    number = iter(range(10**6))

    def sample(length: int) -> None:
        key = next(number)
        backend.generate(prompts, SamplingParams(length), [(0, key, row) for row in range(len(prompts))])

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

    for length in (FEW, FEW + tokens):  # A compiled step is compiled here.
        sample(length)
    # Never negative: on a small model the difference may drown in noise.
    costs = {"seconds": max(per_token(fastest), 0.0), "operations": per_token(lambda r: count_operations(r).total())}
    if next(backend.model.parameters()).is_cuda:
        costs["kernels"] = per_token(count_kernels)
    return costs
