"""What each of two processes does in test_data_parallel.py: the gradients of every case, left in a file per rank."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.models.branches import a_pack, a_trunk, gradients, loss_of

WORLD_SIZE = 2
ROWS = (slice(0, 3), slice(3, 4))  # unequal on purpose
POLICY_AND_VALUE = ("policy", "value", "reference")
# case -> (value head, adapted layers, roles, checkpointing)
CASES = {
    "shared": ("shared", "all", POLICY_AND_VALUE, False),
    "detached": ("detached", "top-2", POLICY_AND_VALUE, False),
    "adapter": ("adapter", "top-2", POLICY_AND_VALUE, False),
    "adapter, checkpointing": ("adapter", "all", POLICY_AND_VALUE, True),
    "shared, value only": ("shared", "all", ("value",), False),
    "adapter, value only": ("adapter", "top-2", ("value",), False),
}


def build(case: str):
    value_head, adapter_layers, _, checkpointing = CASES[case]
    trunk = a_trunk(value_head=value_head, adapter_layers=adapter_layers).train()
    if checkpointing:
        trunk.activation_checkpointing_enable()
    return trunk


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD_SIZE)
    found = {}
    for case, (_, _, roles, _) in CASES.items():
        trunk = build(case)
        model = DistributedDataParallel(trunk, find_unused_parameters=True, broadcast_buffers=False)
        for _ in range(2):  # the second step needs the first one's reduction to have ended
            trunk.zero_grad(set_to_none=True)
            loss_of(model(pack=a_pack(rows=ROWS[rank]), roles=roles)).backward()
        found[case] = gradients(trunk)
    torch.save({"world_size": dist.get_world_size(), "gradients": found}, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()
