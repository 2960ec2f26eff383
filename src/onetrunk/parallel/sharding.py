"""Shard the frozen base over processes with FSDP2, as the accelerate config of the launch asks.

Only frozen weights are sharded. What trains (adapters, heads) stays whole on every process and is replicated by DDP,
so optimizer state, clipping, checkpoints and the saved PEFT folder are those of an unsharded run. accelerate's own
FSDP2 would shard adapters too; it loses value heads and further adapters when it saves.

A sharded layer gathers its weights in each forward and backward, so all processes must run equally many of them.
`gathered` holds all weights whole for a block without that restriction: sampling uses it, once per rollout.
"""

from __future__ import annotations

import contextlib
import ctypes
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import accelerate.accelerator
import torch
from accelerate import Accelerator
from accelerate.utils import recursively_apply
from peft import PeftModel
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import core_model_loading

from onetrunk.models.base_model import decoder_layers
from onetrunk.models.loading import base_fingerprint, keep_identity
from onetrunk.parallel.layout import Layout, launch_layout, launched_processes, training_stages

# malloc.h: M_MMAP_THRESHOLD and M_TRIM_THRESHOLD in bytes, and M_ARENA_MAX.
MALLOC = {-3: 2**20, -1: 2**20, -8: 2}
WHOLE_SIZE = "onetrunk_whole_size"
GATHERED = "onetrunk_is_gathered"
DIVIDED = "onetrunk_is_divided"


def shard_frozen(model: PeftModel, layout: Layout | None, device: torch.device) -> str | None:
    """Shard the frozen weights of a model in place; return a line for the user, or None if nothing was sharded.

    Every layer becomes one FSDP2 unit and the rest another, moved to the device unit by unit: a GPU never holds the
    whole base. Call it where `share_frozen` may be called.
    """
    if layout is None or world_size() == 1 or is_sharded(model) or is_divided(model):
        return None
    require_adapters(model, "FSDP2 shards")
    if any(type(p).__name__ == "Int8Params" for p in model.parameters()):
        raise ValueError(
            "a base in 8 bit cannot be sharded, because bitsandbytes keeps its scales on the weights; set"
            " load_in_4bit instead of load_in_8bit, or launch with accelerate_configs/ddp.yaml"
        )
    if device.type == "cpu":
        return_freed_memory()
    replicas, shards = layout.replicas, world_size() // layout.replicas
    kept = {p for name, p in model.named_parameters() if p.requires_grad or ".lora_" in name or "value_head" in name}
    shape, names = ((replicas, shards), ("replicate", "shard")) if replicas > 1 else ((shards,), ("shard",))
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    # Values and next values are views of a head's output; nothing changes them in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")

    def share() -> None:
        for unit in (*decoder_layers(model), model):
            cast_now(unit)
            fully_shard(unit, mesh=mesh, ignored_params=kept)

    return share_frozen(model, device, share, f"fsdp2: the frozen base is sharded over {shards} processes", replicas)


def require_adapters(model: nn.Module, what: str) -> None:
    """Raise ValueError for a model without adapters, all of whose weights train; `what` begins the message."""
    if not isinstance(model, PeftModel):
        raise ValueError(
            f"{what} the frozen base here, and all weights of this model train; set use_peft: true, or launch with"
            " accelerate_configs/ddp.yaml"
        )


def share_frozen(model: PeftModel, device: torch.device, share: Callable[[], None], how: str, copies: int) -> str:
    """Let `share` drop what other processes hold of a frozen base; return a line for the user that begins with `how`.

    Call it on all processes, after everything that reads base weights (the base's marks and fingerprint are taken
    here) and before the trainer wraps the model.

    Args:
        copies: number of groups of processes that hold a whole base together.
    """
    base = model.get_base_model()
    keep_identity(base)
    vars(base)[WHOLE_SIZE] = whole_size(base)
    require_one_base(model)
    whole_bytes = local_bytes(model)
    share()
    model.to(device)
    # DDP would make the shares of all processes equal to the first's.
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        model, frozen + [name for name, _ in model.named_buffers()]
    )
    return (
        f"{how}{'' if copies == 1 else f', {copies} copies'}: {local_bytes(model) / 2**20:,.1f} of"
        f" {whole_bytes / 2**20:,.1f} MiB of weights on this process; adapters and heads are replicated"
    )


def return_freed_memory() -> None:
    """Let glibc give large freed blocks, such as gathered layers, back to the system at once.

    Without fixed thresholds, glibc raises them when a large block is freed, and then keeps blocks up to that size.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # Other C libraries have none.
    for parameter, value in MALLOC.items() if mallopt else ():
        mallopt(parameter, value)


def cast_when_sharded(quantization: Any = None) -> AbstractContextManager[None]:
    """Return a block in which the base of this launch is loaded: if it will be sharded or divided, with late casts.

    `shard_frozen`, tensor parallelism and training stages then cast what a process keeps, and no process holds the
    whole base in another precision than its files have.

    Args:
        quantization: config of a base that is quantised while it loads, which reads its weights at once.
    """
    is_divided = launch_layout() is not None or training_stages() > 1
    is_shared = is_divided and launched_processes() > 1
    return casting_later() if is_shared and quantization is None else contextlib.nullcontext()


def require_one_base(model: PeftModel) -> None:
    """Raise RuntimeError if the processes loaded different weights, whose shards would not belong together."""
    fingerprints: list[str] = [""] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(fingerprints, base_fingerprint(model.get_base_model()))
    for process, fingerprint in enumerate(fingerprints):
        if fingerprint != fingerprints[0]:
            raise RuntimeError(
                f"process {process} loaded another base than process 0 ({fingerprint}; {fingerprints[0]}). Give all"
                " machines the same files, and load the model after its trainer's config was made, or by name"
            )


def world_size() -> int:
    """Return the number of processes that run together; 1 without a group of torch.distributed."""
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def is_sharded(model: nn.Module) -> bool:
    """Return whether `shard_frozen` has sharded the model, so that its forwards are collective."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def mark_divided(base: nn.Module) -> None:
    """Note that the base is divided over a group of processes: its matrices, or its layers."""
    vars(base)[DIVIDED] = True


def whole_size(model: nn.Module) -> tuple[int, int]:
    """Return the numbers and the bytes of all weights of a model, also of those that other processes have."""
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    if WHOLE_SIZE in vars(base):
        return vars(base)[WHOLE_SIZE]
    parameters = list(model.parameters())
    return sum(p.numel() for p in parameters), sum(p.numel() * p.element_size() for p in parameters)


def is_divided(model: nn.Module) -> bool:
    """Return whether the base is divided, by tensor parallelism or into training stages: a group must run in step."""
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    return vars(base).get(DIVIDED, False)


def is_collective(model: nn.Module) -> bool:
    """Return whether processes must run each forward of a model together: its base is sharded or divided."""
    return is_divided(model) or is_sharded(model)


def equal_counts(model: nn.Module, accelerator: Accelerator) -> Callable[[list[int]], list[int]] | None:
    """Return how processes agree on numbers of packs: the most of any of them. None if the base is not sharded.

    The forwards of a sharded base are collective, so every process needs the same number of packs.
    """
    if not is_sharded(model):
        return None

    def most(counts: list[int]) -> list[int]:
        own = torch.tensor([counts], device=accelerator.device)
        return accelerator.gather(own).max(dim=0).values.tolist()

    return most


@contextlib.contextmanager
def replicas_of_what_trains(model: nn.Module) -> Iterator[None]:
    """Let accelerate wrap a model with a sharded or divided base in DDP inside the block.

    On several GPUs it otherwise rejects every model that has a DTensor. DDP ignores ours: they are frozen.
    """
    if not (is_sharded(model) or is_divided(model)):
        yield
        return
    original = accelerate.accelerator.model_has_dtensor
    accelerate.accelerator.model_has_dtensor = lambda _model: False
    try:
        yield
    finally:
        accelerate.accelerator.model_has_dtensor = original


@contextlib.contextmanager
def gathered(model: nn.Module, layers: Iterable[nn.Module] | None = None) -> Iterator[None]:
    """Hold every weight whole on every process inside the block, where forwards are no longer collective.

    Entering the outermost block is collective. A model that is not sharded is left as it is.

    Args:
        model: wrapped by `shard_frozen` or not.
        layers: hold only these decoder layers, and what is outside of all layers. Every layer is still gathered once,
            because that is collective, and then freed. The others must not run inside the block.
    """
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not units or getattr(units[0], GATHERED, False):
        yield
        return
    kept = None if layers is None else {units[0], *layers}
    for unit in units:
        unit.set_reshard_after_forward(False, recurse=False)
        unit.unshard()
        if kept is not None and unit not in kept:
            unit.reshard()
    setattr(units[0], GATHERED, True)
    try:
        yield
    finally:
        setattr(units[0], GATHERED, False)
        for unit in units:
            # As FSDP2 sets it: the outermost unit keeps its weights between forward and backward.
            unit.set_reshard_after_forward(unit is not units[0], recurse=False)
            unit.reshard()


def reshard(model: nn.Module) -> None:
    """Free what forwards without a backward left gathered: the weights outside the layers (embedding, head)."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def local_bytes(model: nn.Module) -> int:
    """Return the bytes of weights that this process holds between forwards: of a shared base, its share."""
    return sum((p.to_local() if isinstance(p, DTensor) else p).nbytes for p in model.parameters())


# Operations whose result shares the memory of a weight; it is a LateCast too.
_VIEWS = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


class LateCast(Tensor):
    """A tensor in one precision that is stored in another one.

    safetensors maps a file into memory, and all processes of a machine share those pages. A cast would copy them: a
    bfloat16 file in float32 takes twice its size in every process, before anything is sharded. Inside `casting_later`
    a weight is loaded as a LateCast, which keeps the mapped tensor and is cast in each operation that reads it.
    `cast_now` makes it an ordinary parameter, layer by layer, while a base is sharded or divided.

    Args:
        stored: a tensor of floats.
        dtype: the precision in which every operation sees it.
    """

    stored: Tensor

    @staticmethod
    def __new__(cls, stored: Tensor, dtype: torch.dtype) -> LateCast:
        made = torch.Tensor._make_wrapper_subclass(
            cls, stored.shape, strides=stored.stride(), dtype=dtype, device=stored.device
        )
        made.stored = stored
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op in _VIEWS:
            return cls(args[0].stored, args[0].dtype)
        if op._schema.is_mutable:
            for argument, value in zip(op._schema.arguments, args, strict=False):
                is_written = argument.alias_info is not None and argument.alias_info.is_write
                if is_written and isinstance(value, LateCast):
                    # The file must not be written to; the cast copy is kept from now on.
                    value.stored = value.cast()
        inputs = (args, kwargs or {})
        args, kwargs = recursively_apply(LateCast.cast, inputs, test_type=lambda value: isinstance(value, LateCast))
        return op(*args, **kwargs)

    def cast(self) -> Tensor:
        """Return the tensor in its precision, an ordinary one."""
        return self.stored.to(self.dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied = self.stored.detach().to(self.dtype, copy=True)
        if isinstance(self, nn.Parameter):
            copied = nn.Parameter(copied, self.requires_grad)
        memo[id(self)] = copied
        return copied


@contextlib.contextmanager
def casting_later() -> Iterator[None]:
    """Let transformers load matrices as LateCast inside the block, on the CPU and in another precision than stored."""
    original = core_model_loading._materialize_copy

    def read(tensor: Any, device: Any = None, dtype: torch.dtype | None = None) -> Tensor:
        stored = tensor[...]
        is_cast = dtype not in (None, stored.dtype) and stored.is_floating_point() and dtype.is_floating_point
        if is_cast and stored.ndim > 1 and torch.device(device or "cpu").type == "cpu":
            return LateCast(stored, dtype)
        return stored.to(device=device, dtype=dtype)

    core_model_loading._materialize_copy = read
    try:
        yield
    finally:
        core_model_loading._materialize_copy = original


@torch.no_grad()
def cast_now(model: nn.Module) -> None:
    """Make every LateCast of a model an ordinary parameter; one that several modules share stays shared."""
    cast: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if isinstance(parameter, LateCast):
                if id(parameter) not in cast:
                    cast[id(parameter)] = nn.Parameter(parameter.cast(), parameter.requires_grad)
                module.register_parameter(name, cast[id(parameter)])
