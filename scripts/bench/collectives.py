"""Counts the collective operations of this process and their bytes, by phase and by what they carry.

A dispatch mode sees every operation of torch.distributed, those that DDP starts from C++ included, which patches of
its Python functions would miss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WEIGHTS, GRADIENTS, FLAGS, METRICS = "weights", "gradients", "unused flags", "metrics"
KINDS = (WEIGHTS, GRADIENTS, FLAGS, METRICS)


class Collectives(TorchDispatchMode):
    """Counts calls and bytes of the payload: the gathered tensors, or the buffer that is reduced.

    Attributes:
        seen: (phase, kind, bytes) of every call.

    Args:
        phase: returns the name of the phase in progress.
    """

    def __init__(self, phase: Callable[[], str]):
        super().__init__()
        self.phase = phase
        self.seen: list[tuple[str, str, int]] = []

    def __torch_dispatch__(
        self, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(function, "namespace", "") == "c10d":
            payload = [leaf for leaf in tree_leaves(args[0]) if isinstance(leaf, torch.Tensor)]
            num_bytes = sum(tensor.nbytes for tensor in payload)
            self.seen.append((self.phase(), kind_of(function._schema.name, payload), num_bytes))
        return function(*args, **(kwargs or {}))

    def table(self) -> dict[str, dict[str, list[int]]]:
        """Return {phase: {kind: [calls, bytes]}}."""
        counts: dict[str, dict[str, list[int]]] = {}
        for phase, kind, num_bytes in self.seen:
            cell = counts.setdefault(phase, {}).setdefault(kind, [0, 0])
            cell[0] += 1
            cell[1] += num_bytes
        return counts


def kind_of(name: str, payload: Sequence[torch.Tensor]) -> str:
    """Return what a collective carries.

    FSDP2 alone gathers into one tensor (accelerate does not with gloo), and DDP alone reduces during a backward: the
    gradients, and one int32 per parameter that says which of them a process has not used.
    """
    if name == "c10d::_allgather_base_":
        return WEIGHTS
    if name == "c10d::allreduce_" and torch._C._current_graph_task_id() != -1:
        return FLAGS if payload[0].dtype == torch.int32 else GRADIENTS
    return METRICS
