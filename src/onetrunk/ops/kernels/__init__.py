"""Whether the Triton kernels of this room run: on CUDA tensors, wherever Triton is installed.

The environment variable ONETRUNK_KERNELS=off selects plain torch on a GPU too, and ONETRUNK_KERNELS=on runs the
kernels on any tensor: with TRITON_INTERPRET=1 also on a CPU, slowly. Triton comes with the CUDA builds of torch.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

from torch import Tensor

SWITCH = "ONETRUNK_KERNELS"


def runs_kernels(tensor: Tensor) -> bool:
    """Return whether operations on this tensor run as kernels.

    Raises:
        ValueError: ONETRUNK_KERNELS is neither on nor off.
    """
    setting = os.environ.get(SWITCH, "")
    if setting not in ("", "on", "off"):
        raise ValueError(f"{SWITCH} is {setting!r}; set it to on or off, or leave it unset")
    if setting:
        return setting == "on"
    return tensor.is_cuda and find_spec("triton") is not None
