"""Divide the matrices of the frozen base over processes (tensor parallelism), by the plans of transformers.

The processes of a group run every forward together on the same rows, each with its share of every matrix. Only frozen
weights are divided. What trains (adapters, heads) stays whole on every process: a LoRA layer uses the rows of lora_B
that belong to its share of a column-parallel matrix, or the columns of lora_A of a row-parallel one. So optimizer
state, clipping, checkpoints and the saved PEFT folder are those of an undivided run, and DDP reduces the gradients.

PEFT would divide the adapters too: its row-parallel layers do not run with transformers 5.23, and its files would
have to be gathered.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import gather_object, recursively_apply, send_to_device
from peft import PeftModel
from peft.tuners import lora
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel
from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from onetrunk.models.adapters import find_tuner_layers
from onetrunk.models.base_model import active_dropout
from onetrunk.models.loading import keep_identity
from onetrunk.parallel.cast_on_read import cast_now
from onetrunk.parallel.sharding import (
    Layout,
    group_size,
    is_divided,
    local_bytes,
    mark_divided,
    require_one_base,
    shard_frozen,
    training_stages,
)

T = TypeVar("T")
COLUMNS, ROWS = "colwise", "rowwise"
# Styles of a plan that take and return whole states, so that an adapter on them is computed whole.
WHOLE = (
    "colwise_gather_output",
    "colwise_rep",
    "rowwise_split_input",
    "rowwise_rep",
    "replicated_with_grad_allreduce",
)
STYLES = (COLUMNS, ROWS, *WHOLE, "embedding_rowwise", "embedding_colwise")


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


def distribute_frozen(model: PeftModel, layout: Layout | None, device: torch.device) -> str | None:
    """Shard or divide the frozen weights of a model in place, as the layout of the launch asks.

    Arguments, result and errors as in `shard_frozen`; one that tensor parallelism has divided already stays as it is.
    """
    if layout is None or layout.tensor == 1:
        return shard_frozen(model, layout, device)
    return None if is_divided(model) else divide_frozen(model, layout, device)


def divide_frozen(model: PeftModel, layout: Layout, device: torch.device) -> str:
    """Divide the frozen weights of a model in place; return a line for the user.

    Call it on all processes, after everything that reads base weights (the base's marks and fingerprint are taken
    here) and before the trainer wraps the model.

    Args:
        model: with the adapters that it will train.
        layout: `layout.tensor` processes form a group.
        device: of this process.

    Raises:
        ValueError: the model cannot be divided like this; the message says why.
        RuntimeError: the processes loaded different bases.
    """
    if not isinstance(model, PeftModel):
        raise ValueError(
            "tensor parallelism divides the frozen base here, and all weights of this model train; set use_peft: true,"
            " or launch with accelerate_configs/ddp.yaml"
        )
    base, size = model.get_base_model(), layout.tensor
    plan = _plan_of(base)
    _check_divisible(model, plan, size)
    whole_bytes = local_bytes(model)
    keep_identity(base)
    require_one_base(model)
    mesh = process_mesh(size)["tensor"]
    share = _Share(mesh.get_group(), mesh.get_local_rank(), size, mesh)
    _divide(base, mesh, plan)
    for name, layer in _lora_layers(base):
        style = plan.get(f"{name}.base_layer")
        if style in (COLUMNS, ROWS):
            layer.forward = _DividedLora(layer, style, share)
    mark_divided(base)
    model.to(device)
    # DDP would make the shares of all processes equal to those of the first.
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        model, frozen + [name for name, _ in model.named_buffers()]
    )
    replicas = dist.get_world_size() // size
    copies = "" if replicas == 1 else f", {replicas} copies"
    return (
        f"tensor parallelism: the frozen base is divided over {size} processes{copies}:"
        f" {local_bytes(model) / 2**20:,.1f} of {whole_bytes / 2**20:,.1f} MiB of weights on each; adapters and heads"
        " are replicated (DDP)"
    )


def _divide(base: PreTrainedModel, mesh: DeviceMesh, plan: dict[str, str]) -> None:
    """Divide a base by a plan, layer by layer, so that one layer at a time is whole in its precision."""
    modules = {name for name, _ in base.named_modules()}
    parts: dict[str, dict[str, str]] = {}
    for name, style in plan.items():
        layer = re.match(r"(.*\.\d+)\.", name)
        outside = name if name in modules else name.rpartition(".")[0]
        parts.setdefault(layer[1] if layer else outside, {})[name] = style
    for part, styles in parts.items():
        cast_now(base.get_submodule(part))
        apply_tensor_parallelism(base, mesh, styles)
        _drop_other_shares(base.get_submodule(part))
    base.tie_weights()
    cast_now(base)


def _plan_of(base: PreTrainedModel) -> dict[str, str]:
    """Return {name of a module or parameter: style} of the plan of transformers, in the order that it applies it."""
    patterns = dict(base.tp_plan or {})
    plan: dict[str, str] = {}
    # Without the second name of a tied weight.
    weights = {name for name, _ in base.named_parameters()}
    for name, module in base.named_modules():
        # PEFT moves a layer that it adapts to `base_layer`.
        if hasattr(module, "base_layer"):
            continue
        style = patterns.get(replace_layer_number_by_wildcard(name.removesuffix(".base_layer")))
        if style is not None:
            names = [f"{name}.{key}" for key, _ in module.named_parameters(recurse=False)]
            plan |= {weight: style for weight in names if weight in weights}
            plan[name] = style
    return plan


def _lora_layers(base: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    layers = set(find_tuner_layers(base))
    return ((name, module) for name, module in base.named_modules() if module in layers)


def _check_divisible(model: PeftModel, plan: dict[str, str], size: int) -> None:
    base = model.get_base_model()
    config, kind = base.config.get_text_config(), type(base).__name__
    advice = "launch with accelerate_configs/fsdp2.yaml, which shards any base"
    unknown = sorted(set(plan.values()) - set(STYLES))
    if not plan or unknown:
        why = f"its plan has {', '.join(unknown)}" if unknown else "transformers has no plan for it"
        raise ValueError(f"tensor parallelism is not supported for {kind}: {why}; {advice}")
    heads = {name: getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads")}
    for name, number in heads.items():
        if number is not None and number % size:
            raise ValueError(
                f"{kind} has {name} {number}, which {size} processes cannot divide; set parallelism_config_tp_size to"
                f" a divisor of it, or {advice}"
            )
    if getattr(base, "quantization_method", None) is not None:
        raise ValueError(f"a quantised base is not supported by tensor parallelism; load it in bfloat16, or {advice}")
    _check_replicated(base, plan, advice)
    if any(layer.lora_variant or type(layer) is not lora.Linear for _, layer in _lora_layers(base)):
        raise ValueError(
            "tensor parallelism supports plain LoRA on linear layers; DoRA needs the norms of whole matrices: set"
            f" use_dora to false, or {advice}"
        )


def _check_replicated(base: PreTrainedModel, plan: dict[str, str], advice: str) -> None:
    """Raise ValueError for what the processes of a group would not have, or not compute, alike."""
    trained = [name for name, p in base.named_parameters() if p.requires_grad and plan.get(name)]
    copied = [name for name, module in base.named_modules() if isinstance(module, AuxiliaryTrainingWrapper)]
    wrapped = [name for name in copied if replace_layer_number_by_wildcard(name) in base.tp_plan]
    if trained or wrapped:
        raise ValueError(
            f"tensor parallelism divides {(trained + wrapped)[0]}, and it trains; train adapters only (no"
            f" modules_to_save or new tokens), or {advice}"
        )
    random = active_dropout(base)
    if random is not None:
        raise ValueError(
            f"tensor parallelism is not supported with dropout ({random}): each process of a group would draw it for"
            f" its own part of a layer; set lora_dropout and the dropouts of the model's config to 0, or {advice}"
        )


def _drop_other_shares(base: nn.Module) -> None:
    """Copy this process's share of each weight: a share that is a view would keep the whole weight in memory."""
    for module in base.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if isinstance(parameter, DTensor):
                local = parameter.to_local().detach().clone(memory_format=torch.contiguous_format)
                places = {"shape": parameter.shape, "stride": parameter.stride()}
                share = DTensor.from_local(
                    local, parameter.device_mesh, parameter.placements, run_check=False, **places
                )
                setattr(module, name, nn.Parameter(share, requires_grad=parameter.requires_grad))


@dataclass(frozen=True)
class _Share:
    """This process's place in its group; dimension n is divided as torch.chunk divides it."""

    group: dist.ProcessGroup
    rank: int
    size: int
    mesh: DeviceMesh

    def places(self, n: int) -> tuple[int, int]:
        """Return (first, number) of this process's entries of a dimension n."""
        step = -(-n // self.size)
        first = min(self.rank * step, n)
        return first, min(step, n - first)

    def of(self, whole: Tensor, dim: int) -> Tensor:
        """Return this process's entries of a tensor that every process has whole.

        DDP averages gradients over all processes, and the other entries have none here: so this gradient is multiplied
        by the size of the group. One that is the same on all processes of the group stays as it is.
        """
        part = whole.narrow(dim, *self.places(whole.shape[dim]))
        if part.requires_grad:
            part.register_hook(lambda gradient: gradient * self.size)
        return part

    def copied(self, whole: Tensor) -> Tensor:
        """Return a tensor that all processes have; its gradient is summed over them."""
        return DTensor.from_local(whole, self.mesh, [Replicate()], run_check=False).to_local(
            grad_placements=[Partial()]
        )

    def summed(self, part: Tensor) -> Tensor:
        """Return the sum over the processes; each gets the whole gradient."""
        return DTensor.from_local(part, self.mesh, [Partial()], run_check=False).full_tensor()


class _DividedLora:
    """The forward of a LoRA layer whose base matrix is divided; r numbers per token cross between processes.

    y = x W^T + s (x A^T) B^T. Column-parallel: y is divided, and so are the rows of B. Row-parallel: x is divided, and
    so are the columns of A. An object, because a deep copy of the layer must also copy its forward.
    """

    def __init__(self, layer: lora.Linear, style: str, share: _Share):
        self.layer, self.style, self.share = layer, style, share

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        layer = self.layer
        output = layer.get_base_layer()(x, *args, **kwargs)
        if layer.disable_adapters:
            return output
        for name in layer.active_adapters:
            if name in layer.lora_A:
                output = output + self._update(x, name).to(output.dtype)
        return output

    def _update(self, x: Tensor, name: str) -> Tensor:
        layer, share = self.layer, self.share
        lora_a, lora_b, bias = layer.lora_A[name].weight, layer.lora_B[name].weight, layer.lora_B[name].bias
        x = layer.lora_dropout[name](x.to(lora_a.dtype))
        if self.style == ROWS:
            down = share.summed(F.linear(x, share.of(lora_a, dim=1)))
        else:
            down = share.copied(F.linear(x, lora_a))
            lora_b, bias = share.of(lora_b, dim=0), None if bias is None else share.of(bias, dim=0)
        return F.linear(down, lora_b, bias) * layer.scaling[name]


# --- processes that hold the same rows ---


def num_data_processes(world_size: int) -> int:
    """Return how many processes hold different rows: a group that divides the base counts as one."""
    return world_size // group_size()


class DataParallel:
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
    """An Accelerator to which a group that divides the base is one process, for trainers that know of no groups.

    What it deals out and reduces (rows of a DataLoader, metrics, counts) then counts each row once. What all processes
    must agree on is not reduced with it.
    """

    @classmethod
    def convert(cls, accelerator: Accelerator) -> None:
        """Make an Accelerator that a trainer has created one of this class."""
        accelerator.__class__ = cls

    @property
    def num_processes(self) -> int:
        return DataParallel(self).num_processes

    @property
    def process_index(self) -> int:
        return DataParallel(self).process_index

    def gather(self, tensor: Any) -> Any:
        """Return the tensors of all groups, or of nested containers of tensors, joined along the first dimension."""
        ranks = DataParallel(self)
        return recursively_apply(lambda own: ranks.gather(own if own.ndim else own[None]), tensor)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Return the sum or the mean over the groups, times `scale` (as Accelerator.reduce)."""
        ranks = DataParallel(self)
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

    def tell(_module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        dist.broadcast_object_list([(base.training, args, kwargs)], src=0, group=group)

    hook = base.register_forward_pre_hook(tell, with_kwargs=True)
    try:
        yield True
    finally:
        hook.remove()
        dist.broadcast_object_list([None], src=0, group=group)


@torch.no_grad()
def _follow(base: nn.Module, group: dist.ProcessGroup) -> None:
    """Run the forwards that the first process tells of, until it tells that there are no more."""
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

    Raises:
        RuntimeError: on the other processes, if it raises an error on the first.
    """
    if group_size() == 1:
        return compute()
    mesh = process_mesh(group_size())["tensor"]
    return _computed_by(dist.get_rank() - mesh.get_local_rank(), compute, mesh.get_group())


def is_first_process() -> bool:
    """Return whether this is the first of all processes, or the only one."""
    return not dist.is_available() or not dist.is_initialized() or dist.get_rank() == 0


def on_first_process(compute: Callable[[], T]) -> T:
    """Return what `compute` returns on the first of all processes, on each of them; errors as in `once_per_group`."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
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
