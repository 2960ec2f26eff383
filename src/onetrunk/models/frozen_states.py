"""Keep the states at the cut of a rollout's packs, so that only the first epoch runs the layers below the cut.

The states are plain tensors: on the trunk's device, in (pinned) host memory, or in a memory-mapped file. The file is
unlinked at once, so nothing is left of it after a kill.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from onetrunk.costs import host_memory_bytes

# The share of a place's memory that `auto` may use before it takes the next place. A share of the total memory, not of
# the free memory: the choice must not depend on when a run starts.
DEVICE_SHARE = 0.1
HOST_SHARE = 0.25


def choose_place(setting: str, num_bytes: int, device: torch.device) -> str:
    """Return "device", "cpu" or "disk" for the states of a rollout.

    Args:
        setting: one of TRUNK_CACHES except "off"; any but "auto" is returned unchanged.
        num_bytes: most bytes of the states of one rollout, on one process.
        device: of the trunk. On a CPU "device" and "cpu" are one place.
    """
    if setting != "auto":
        return setting
    if device.type == "cuda" and num_bytes <= DEVICE_SHARE * torch.cuda.get_device_properties(device).total_memory:
        return "device"
    if num_bytes <= HOST_SHARE * host_memory_bytes():
        return "cpu"
    return "disk"


@dataclass(frozen=True)
class TrunkCache:
    """Stores states.

    Args:
        place: "device", "cpu" or "disk".
        folder: for the files of "disk".
    """

    place: str
    folder: str | Path = "."

    def keep(self, states: Tensor) -> Tensor:
        """Return the states [N, H] at the cache's place; they stay there as long as the returned tensor.

        Raises:
            RuntimeError: the disk has no room for them.
        """
        if self.place == "device" or (self.place == "cpu" and states.device.type == "cpu"):
            return states
        if self.place == "cpu":
            kept = torch.empty(states.shape, dtype=states.dtype, pin_memory=True)
            return kept.copy_(states, non_blocking=True)
        return _mapped_file(states.shape, states.dtype, Path(self.folder)).copy_(states)


def _mapped_file(shape: torch.Size, dtype: torch.dtype, folder: Path) -> Tensor:
    """Return a tensor whose memory is an unlinked file in `folder`."""
    num_bytes = shape.numel() * dtype.itemsize
    folder.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=".trunk-states-", dir=folder)
    try:
        try:
            # Claims the blocks now: a full disk is an error here, and a crash of the process later.
            os.posix_fallocate(handle, 0, max(1, num_bytes))
        except OSError as error:
            raise RuntimeError(
                f"trunk_cache 'disk' found no room for {num_bytes / 2**20:,.0f} MiB in {folder}"
                f" ({error.strerror or error}); free some, lower rollout_batch_size, or set trunk_cache to 'off'"
            ) from error
        return torch.from_file(name, shared=True, size=shape.numel(), dtype=dtype).view(shape)
    finally:
        os.close(handle)
        os.unlink(name)
