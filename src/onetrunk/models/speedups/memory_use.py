"""Memory: activations kept on the host, out-of-memory errors, and the peak of a computation."""

from __future__ import annotations

import gc
import resource
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

# Smaller tensors cost more in transfers than they free.
LEAST_BYTES = 2**20


class offloaded_activations(torch.autograd.graph.saved_tensors_hooks):
    """Inside the block, autograd saves tensors for the backward in (pinned) host memory.

    Args:
        model: its parameters and buffers stay on their device.
        least_bytes: smaller tensors stay too.

    Source: torch.autograd.graph.save_on_cpu, which would also move the weights.
    """

    def __init__(self, model: nn.Module, least_bytes: int = LEAST_BYTES):
        stay = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
        self.num_moved = 0

        def pack(tensor: Tensor) -> Any:
            is_small = tensor.numel() * tensor.itemsize < least_bytes
            if is_small or tensor.untyped_storage().data_ptr() in stay:
                return tensor
            self.num_moved += 1
            kept = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
            return tensor.device, kept.copy_(tensor, non_blocking=tensor.is_cuda)

        def unpack(packed: Any) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            device, kept = packed
            return kept.to(device, non_blocking=True)

        super().__init__(pack, unpack)


PHRASES = ("out of memory", "can't allocate memory", "not enough memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error is torch.OutOfMemoryError or that of a CPU allocator."""
    is_phrase = isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in PHRASES)
    return is_phrase or isinstance(error, torch.OutOfMemoryError)


def used_gib(device: torch.device) -> float:
    """Return the memory that this process uses now, GiB: on the GPU if `device` is one, else resident."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device) / 2**30
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:  # Not Linux: the most that it ever used.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**30
    return pages * resource.getpagesize() / 2**30


def free_memory() -> None:
    """Free the memory that torch caches; call it outside the `except` block, whose error holds tensors."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class _Watch(TorchDispatchMode):
    """Counts the storages of the tensors that operators return, from their creation until the last tensor is gone."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: Counter[int] = Counter()
        self.sizes: dict[int, int] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Tensors from outside, such as weights, are not counted.
        outside = {_place(t) for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)} - set(self.sizes)
        result = operator(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor) and _place(tensor) not in outside:
                self._add(tensor)
        return result

    def _add(self, tensor: Tensor) -> None:
        place, size = _place(tensor), tensor.untyped_storage().nbytes()
        if place not in self.sizes:
            self.sizes[place] = size
            self.now += size
            self.peak = max(self.peak, self.now)
        self.tensors[place] += 1
        weakref.finalize(tensor, self._drop, place)

    def _drop(self, place: int) -> None:
        self.tensors[place] -= 1
        if self.tensors[place] == 0 and place in self.sizes:
            self.now -= self.sizes.pop(place)


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@torch.no_grad()
def peak_bytes(run: Callable[[], Any]) -> int:
    """Return the most bytes that the tensors of `run` take at once, on any device, without gradients.

    Memory that a kernel allocates and frees internally is not counted.
    """
    with _Watch() as watch:
        run()
    return watch.peak
