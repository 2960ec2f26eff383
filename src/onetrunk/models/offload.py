"""Keeps the activations that a backward needs in the memory of the host. Knows tensors; no roles and no packs.

Weights stay where they are: autograd saves them too, and moving a frozen trunk would cost more than it frees.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

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
