"""The most memory that the tensors of a computation take at once, on any device, CPUs included.

Counts the storages of what torch's operators return, from their making until the last tensor on them is gone. Memory
that a kernel takes and gives back inside itself is not seen. Knows no model.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

# Smaller tensors cost more in transfers than they free.
LEAST_BYTES = 2**20


class offloaded_activations(torch.autograd.graph.saved_tensors_hooks):
    """Inside the block, what autograd saves for the backward goes to (pinned) host memory and comes back when needed.

    Args:
        model: its parameters and buffers stay on their device.
        least_bytes: tensors smaller than this stay too.

    Source: torch.autograd.graph.save_on_cpu, which would move the weights as well.
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
    """Return whether an error says that memory does not suffice: torch.OutOfMemoryError, or a CPU allocator's."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in PHRASES)


def free_memory() -> None:
    """Give back what torch keeps for later; call it outside the `except` block, whose error holds tensors."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class _Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.tensors: Counter[int] = Counter()
        self.sizes: dict[int, int] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # What is there already, such as a weight, is not this computation's.
        given = {_place(t) for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor)} - set(self.sizes)
        result = operator(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor) and _place(tensor) not in given:
                self._add(tensor)
        return result

    def _add(self, tensor: torch.Tensor) -> None:
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


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@torch.no_grad()
def peak_bytes(run: Callable[[], Any]) -> int:
    """Return the most bytes that tensors made by `run` take at once; no gradient is kept.

    Args:
        run: the computation; its result is dropped.
    """
    with _Watch() as watch:
        run()
    return watch.peak
