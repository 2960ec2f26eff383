"""Groups of consecutive processes that work on the same rows, by tensor parallelism or as the stages of a pipeline."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import gather_object, recursively_apply, send_to_device
from peft import PeftModel
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from onetrunk.models.speedups.fused_lora import casting_once
from onetrunk.parallel.layout import group_size, training_stages
from onetrunk.parallel.sharding import is_divided, world_size
from onetrunk.types import Pack, PackOutput

T = TypeVar("T")

# The attribute of a base under which `parallel.staged` keeps the stage of this process.
STAGED = "onetrunk_stage"
# How long processes wait for the first one while it works alone.
DAYS_ALONE = 30


def process_mesh(group_size: int) -> DeviceMesh:
    """Return the mesh ("data", "tensor") of all processes; consecutive processes form a group.

    The first call is collective, also the first one after a training has ended torch.distributed and another begins.
    """
    return _mesh_of(dist.group.WORLD, group_size)


@functools.cache
def _mesh_of(_world: dist.ProcessGroup, group_size: int) -> DeviceMesh:
    replicas = dist.get_world_size() // group_size
    device_type = "cuda" if dist.get_backend() == "nccl" else "cpu"
    return init_device_mesh(device_type, (replicas, group_size), mesh_dim_names=("data", "tensor"))


def limit_waits(timeout_s: float, model: nn.Module) -> None:
    """Limit how long this process waits for another one, in every process group that the training of `model` uses.

    transformers leaves `ddp_timeout` out on CPUs, and groups that a mesh makes have torch's own limit.
    """
    if not dist.is_initialized():
        return
    meshes = {parameter.device_mesh for parameter in model.parameters() if isinstance(parameter, DTensor)}
    if group_size() > 1:
        meshes.add(process_mesh(group_size()))
    for group in {dist.group.WORLD, *(group for mesh in meshes for group in mesh.get_all_groups())}:
        group.set_timeout(timedelta(seconds=timeout_s))


def wait_for_first_process() -> None:
    """Let the other processes wait as long as it takes for the first one, which works alone; it may do so for hours.

    Training sets its own limit again (`limit_waits`). A first process that ends still ends the others.
    """
    if dist.is_initialized():
        dist.group.WORLD.set_timeout(timedelta(days=DAYS_ALONE))


def num_data_processes(world_size: int) -> int:
    """Return how many processes hold different rows: a group that divides the base counts as one."""
    return world_size // group_size()


class RowGroups:
    """The Accelerator as processes with different rows see it: a group that divides the base counts as one.

    The processes of a group sample and train on the same rows. What is reduced or gathered here counts each row once.
    """

    def __init__(self, accelerator: Accelerator):
        self.accelerator = accelerator
        self.group_size = group_size()

    @property
    def process_index(self) -> int:
        return self.accelerator.state.process_index // self.group_size

    @property
    def num_processes(self) -> int:
        return self.accelerator.state.num_processes // self.group_size

    @property
    def is_first_of_group(self) -> bool:
        return self.accelerator.state.process_index % self.group_size == 0

    @property
    def shares_rows(self) -> bool:
        """Whether other processes have the same rows as this one."""
        return self.group_size > 1

    @property
    def layout(self) -> dict[str, int]:
        """The numbers of processes with different rows, of those that divide matrices, and of training stages."""
        stages = training_stages()
        return {
            "num_processes": self.num_processes,
            "tensor_parallel": self.group_size // stages,
            "training_stages": stages,
        }

    def gather(self, tensor: Tensor) -> Tensor:
        """Return the tensors of all these processes, of equal shapes, joined along the first dimension."""
        if self.group_size == 1:
            return self.accelerator.gather(tensor)
        gathered = [torch.empty_like(tensor) for _ in range(self.num_processes)]
        dist.all_gather(gathered, tensor.contiguous(), group=self._group)
        return torch.cat(gathered)

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over these processes."""
        if self.group_size == 1:
            return self.accelerator.reduce(tensor, reduction="sum")
        total = tensor.clone()
        dist.all_reduce(total, group=self._group)
        return total

    def gather_object(self, objects: list[T]) -> list[T]:
        """Return the lists of all these processes, joined."""
        if self.group_size == 1:
            return gather_object(objects)
        gathered: list[list[T]] = [[]] * self.num_processes
        dist.all_gather_object(gathered, objects, group=self._group)
        return [item for part in gathered for item in part]

    @property
    def _group(self) -> dist.ProcessGroup:
        return process_mesh(self.group_size)["data"].get_group()


class GroupAccelerator(Accelerator):
    """An Accelerator that counts a group that divides the base as one process, for trainers without groups.

    What it deals out and reduces (rows of a DataLoader, metrics, counts) then counts each row once. What all processes
    must agree on is not reduced with it.
    """

    @classmethod
    def convert(cls, accelerator: Accelerator) -> None:
        """Make an Accelerator that a trainer has created one of this class."""
        accelerator.__class__ = cls

    @property
    def num_processes(self) -> int:
        return RowGroups(self).num_processes

    @property
    def process_index(self) -> int:
        return RowGroups(self).process_index

    def gather(self, tensor: Any) -> Any:
        """Return the tensors of all groups, or of nested containers of tensors, joined along the first dimension."""
        ranks = RowGroups(self)
        return recursively_apply(lambda own: ranks.gather(own if own.ndim else own[None]), tensor)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Return the sum or the mean over the groups, times `scale` (as Accelerator.reduce)."""
        ranks = RowGroups(self)
        factor = scale / ranks.num_processes if reduction == "mean" else scale
        return recursively_apply(lambda own: ranks.sum(own) * factor, tensor)


@contextlib.contextmanager
def forwards_of_first(model: nn.Module) -> Iterator[bool]:
    """Let the first of all processes run forwards of a divided model on its own; yield True on it, False elsewhere.

    The other processes of its group run the same forwards until its block ends, and only then enter theirs. The
    forwards have no gradient. With a model that is not divided nothing is done.
    """
    is_first = is_first_process()
    if not is_divided(model):
        yield is_first
        return
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    group = process_mesh(group_size())["tensor"].get_group()
    if 0 not in dist.get_process_group_ranks(group):
        yield False
        return
    if not is_first:
        _follow(base, group)
        yield False
        return

    def announce(_module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        dist.broadcast_object_list([(base.training, args, kwargs)], src=0, group=group)

    hook = base.register_forward_pre_hook(announce, with_kwargs=True)
    try:
        yield True
    finally:
        hook.remove()
        dist.broadcast_object_list([None], src=0, group=group)


@torch.no_grad()
def _follow(base: nn.Module, group: dist.ProcessGroup) -> None:
    """Run the forwards that the first process announces, until it announces that there are no more."""
    while True:
        message: list[Any] = [None]
        dist.broadcast_object_list(message, src=0, group=group)
        if message[0] is None:
            return
        is_training, args, kwargs = send_to_device(message[0], next(base.parameters()).device)
        base.train(is_training)(*args, **kwargs)


def once_per_group(compute: Callable[[], T]) -> T:
    """Return what `compute` returns on the first process of each group that divides the base, on all of the group.

    For what must be the same on them and may not be when it is computed twice, such as rewards.
    """
    if group_size() == 1:
        return compute()
    mesh = process_mesh(group_size())["tensor"]
    return _computed_by(dist.get_rank() - mesh.get_local_rank(), compute, mesh.get_group())


def is_first_process() -> bool:
    """Return whether this is the first of all processes, or the only one."""
    return not dist.is_initialized() or dist.get_rank() == 0


def on_first_process(compute: Callable[[], T]) -> T:
    """Return what `compute` returns on the first of all processes, on each of them; errors as in `once_per_group`."""
    if world_size() == 1:
        return compute()
    return _computed_by(0, compute, None)


def _computed_by(first: int, compute: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    result: list[Any] = [None, None]
    error: Exception | None = None
    if dist.get_rank() == first:
        try:
            result = [compute(), None]
        except Exception as raised:
            error, result = raised, [None, f"{type(raised).__name__}: {raised}"]
    dist.broadcast_object_list(result, src=first, group=group)
    if error is not None:
        raise error
    if result[1] is not None:
        raise RuntimeError(f"process {first}, which does this for the others, failed: {result[1]}")
    return result[0]


def staged(model: nn.Module) -> Any | None:
    """Return the `parallel.staged.StagedTrunk` of a trunk whose layers are divided, in DDP or not; else None."""
    model = model.module if isinstance(model, DistributedDataParallel) else model
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    return vars(base).get(STAGED)


def pack_outputs(
    model: nn.Module,
    packs: Sequence[Pack],
    roles: Sequence[str],
    temperature: float,
    states: Sequence[Tensor | None] | None = None,
    poll: Callable[[], None] = lambda: None,
) -> Iterator[PackOutput]:
    """Yield the outputs of `roles` over each pack, without gradients, whether or not the model is in stages.

    No weight may change before the last one is taken (`casting_once`).

    Args:
        packs: run one after another; the stages of a pipeline run them together.
        roles, temperature: as TrunkModel takes them.
        states: [N, H] of each pack at the cut, where they are known.
        poll: called before each forward; may raise to give up.
    """
    stage = staged(model)
    with casting_once(model):
        if stage is not None:
            poll()
            yield from stage.outputs(packs, roles, temperature)
            return
        for number, pack in enumerate(packs):
            poll()
            known = None if states is None else states[number]
            with torch.no_grad():
                output = model(pack=pack, states=known, roles=tuple(roles), temperature=temperature)
            yield output
