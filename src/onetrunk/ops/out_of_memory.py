"""What running out of memory looks like, on a GPU and on a CPU, and how to go on with less. Knows torch's errors."""

from __future__ import annotations

import gc

import torch

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
