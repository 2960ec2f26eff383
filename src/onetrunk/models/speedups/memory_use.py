"""Memory: activations kept on the host, out-of-memory errors, and what this process uses."""

from __future__ import annotations

import gc
import resource
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

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
