"""Load weights in another precision than that of their files, without a whole copy in the memory of every process.

safetensors maps a file into memory, and all processes of a machine share those pages. A cast copies them: a bfloat16
file that is loaded in float32 takes twice its size in every process, before anything is sharded. Inside
`casting_later` such a weight is loaded as a `LateCast`: it keeps the mapped tensor, has the precision that was asked
for, and is cast in each operation that reads it. `cast_now` makes it an ordinary parameter; it is called layer by
layer while a base is sharded or divided.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers import core_model_loading

# Reads a tensor of a file in transformers; tests/parallel/test_cast_on_read.py pins it.
READER = "_materialize_copy"
# Operations whose result shares the memory of a weight; it is a LateCast too.
_VIEWS = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


class LateCast(Tensor):
    """A tensor in one precision that is stored in another one.

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
        args, kwargs = tree_map(lambda value: value.cast() if isinstance(value, LateCast) else value, (args, kwargs))
        return op(*args, **(kwargs or {}))

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
    original = getattr(core_model_loading, READER)

    def read(tensor: Any, device: Any = None, dtype: torch.dtype | None = None) -> Tensor:
        stored = tensor[...]
        is_cast = dtype not in (None, stored.dtype) and stored.is_floating_point() and dtype.is_floating_point
        if is_cast and stored.ndim > 1 and torch.device(device or "cpu").type == "cpu":
            return LateCast(stored, dtype)
        return stored.to(device=device, dtype=dtype)

    setattr(core_model_loading, READER, read)
    try:
        yield
    finally:
        setattr(core_model_loading, READER, original)


@torch.no_grad()
def cast_now(model: nn.Module) -> None:
    """Make every LateCast of a model an ordinary parameter; one that several modules share stays shared."""
    cast: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if isinstance(parameter, LateCast):
                if id(parameter) not in cast:
                    cast[id(parameter)] = nn.Parameter(parameter.cast(), parameter.requires_grad)
                module._parameters[name] = cast[id(parameter)]
