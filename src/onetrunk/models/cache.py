"""Keeps what the layers below the cut made of a rollout's packs, so that no epoch runs those layers again.

The states are kept as plain tensors: on the device of the trunk, in (pinned) memory of the host, or in a file that is
mapped into memory and has no name any more, so that nothing is left of it after a kill. Knows tensors and places; no
model and no trainer.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from onetrunk.costs import host_memory_bytes

PLACES = ("auto", "off", "device", "cpu", "disk")
# `auto` gives the states this share of a place's whole memory (not of what is free: the choice must not depend on when
# a run starts), and takes the next place where they need more.
DEVICE_SHARE = 0.1
HOST_SHARE = 0.25


def choose_place(setting: str, num_bytes: int, device: torch.device) -> str:
    """Return "device", "cpu" or "disk" for the states of a rollout.

    Args:
        setting: one of PLACES but "off"; all but "auto" are taken as they are.
        num_bytes: of the states of one rollout at most, on one process.
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
    """Puts states away and counts them.

    Args:
        place: "device", "cpu" or "disk".
        folder: where the files of "disk" are made; they have no name once they are there.
    """

    place: str
    folder: str | Path = "."

    def keep(self, states: Tensor) -> Tensor:
        """Return the same states [R, T, H] at the cache's place; they stay there as long as the tensor returned.

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
    """Return a tensor whose memory is a file without a name in `folder`."""
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
