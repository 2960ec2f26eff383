"""A linear layer and its low-rank update as one operation: y = x W^T + b + s (x A^T) B^T.

PEFT's modules compute, scale and add the update in separate passes over memory, and also the two halves of the
gradient of x. Here the matrix product that computes them also adds them, so the output is the only tensor of its
size. Weight and bias are frozen.

Under bfloat16 autocast every step is rounded, so another order of sums would give other numbers than training with
PEFT's modules. Forwards without gradient therefore run PEFT's products and sums, but inside `casting_once` A and B are
cast once, not in every forward, and x is not cast to float32 and back.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners import lora
from torch import Tensor, nn


def lora_linear_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, lora_a: Tensor, lora_b: Tensor, scaling: float
) -> Tensor:
    """Return what `lora_linear` returns, operation by operation: the naive twin."""
    return F.linear(x, weight, bias) + F.linear(F.linear(x, lora_a), lora_b) * scaling


def lora_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, lora_a: Tensor, lora_b: Tensor, scaling: float
) -> Tensor:
    """Return x W^T + b + s (x A^T) B^T, differentiable in x, A and B.

    Args:
        x: [..., I].
        weight: [O, I], frozen.
        bias: [O], frozen; or None.
        lora_a: [r, I].
        lora_b: [O, r].
        scaling: s.

    Returns:
        [..., O] in the dtype of x, which all tensors share.

    Source: LoRA (2106.09685), equation 3.
    """
    if torch.is_grad_enabled() and (x.requires_grad or lora_a.requires_grad or lora_b.requires_grad):
        return _LoraLinear.apply(x, weight, bias, lora_a, lora_b, scaling)
    return _forward(x, weight, bias, lora_a, lora_b, scaling)[0]


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, lora_a: Tensor, lora_b: Tensor, scaling: float
) -> tuple[Tensor, Tensor]:
    down = x.flatten(0, -2) @ lora_a.T
    y = F.linear(x, weight, bias)
    y.view(-1, y.shape[-1]).addmm_(down, lora_b.T, alpha=scaling)
    return y, down


class _LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        x, weight, _, lora_a, lora_b, scaling = inputs
        y, down = _forward(*inputs)
        ctx.save_for_backward(x, weight, lora_a, lora_b, down)
        ctx.scaling = scaling
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, lora_a, lora_b, down = ctx.saved_tensors
        flat = grad.flatten(0, -2)
        # Scale the narrow factor.
        grad_down = (flat @ lora_b).mul_(ctx.scaling)
        grad_x = grad_a = grad_b = None
        if ctx.needs_input_grad[0]:
            grad_x = (flat @ weight).addmm_(grad_down, lora_a).view_as(x)
        if ctx.needs_input_grad[3]:
            grad_a = grad_down.T @ x.flatten(0, -2)
        if ctx.needs_input_grad[4]:
            grad_b = (flat.T @ down).mul_(ctx.scaling)
        return grad_x, None, None, grad_a, grad_b, None


def fuse_lora(layers: Iterable[nn.Module]) -> None:
    """Let the LoRA layers on `nn.Linear` run fused; inside `casting_once` also those on Conv1D."""
    for layer in layers:
        if type(layer) is lora.Linear:
            layer.forward = _FusedForward(layer)


@contextlib.contextmanager
def casting_once(model: nn.Module) -> Iterator[None]:
    """Let the LoRA layers of `model` cast A and B once inside the block, in which no weight may change.

    This concerns forwards without gradient under bfloat16 autocast. They return what PEFT's return, bit for bit (for
    numbers above 1e-38). Unchanged are DoRA, a bias in B, and layers whose base is quantised or divided.
    """
    forwards = [vars(module).get("forward") for module in model.modules()]
    forwards = [forward for forward in forwards if isinstance(forward, _FusedForward) and forward.casts is None]
    casts = _Casts()
    for forward in forwards:
        forward.casts = casts
    try:
        yield
    finally:
        for forward in forwards:
            forward.casts = None


class _FusedForward:
    """The forward of one layer. An object, because a deep copy of the layer must also copy its forward.

    `casts` is what the layers share inside `casting_once`; None outside.
    """

    def __init__(self, layer: lora.Linear):
        self.layer = layer
        self.casts: _Casts | None = None

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        layer = self.layer
        if args or kwargs or not _is_plain(layer):
            return type(layer).forward(layer, x, *args, **kwargs)
        base, name = layer.get_base_layer(), layer.active_adapters[0]
        lora_a, lora_b = layer.lora_A[name].weight, layer.lora_B[name].weight
        if _is_float32(base, x, lora_a, lora_b):
            return lora_linear(x, base.weight, base.bias, lora_a, lora_b, layer.scaling[name])
        if self.casts is None or not _is_cast(layer, x):
            return type(layer).forward(layer, x)
        return self.casts.output(layer, x)


class _Casts:
    """Computes the layers inside a `casting_once` block.

    Layers that read the same tensor (q, k and v; gate and up) are computed when the first of them is called, so that
    one operation adds all their updates. Which layers these are is learned from their calls. Their matrices A are not
    stacked: a product of another shape may sum in another order, and does on a CPU for some numbers of rows.
    """

    def __init__(self) -> None:
        # A, B and what is left of s, by layer and adapter.
        self.factors: dict[tuple[lora.Linear, str], tuple[Tensor, Tensor, float]] = {}
        # The layers that have read the same tensor as another one, which was called first.
        self.readers: dict[lora.Linear, list[lora.Linear]] = {}
        self.first: lora.Linear | None = None
        # The tensor that `first` has read, and its version and adapter. A weak reference does not keep it in memory.
        self.x: Callable[[], Tensor | None] = lambda: None
        self.state: tuple[int, str] | None = None
        self.outputs: dict[lora.Linear, Tensor] = {}

    def output(self, layer: lora.Linear, x: Tensor) -> Tensor:
        """Return what PEFT's forward of `layer` returns for x [..., I]."""
        name = layer.active_adapters[0]
        state = (x._version, name)
        if self.x() is not x or self.state != state:
            self.first, self.x, self.state = layer, weakref.ref(x), state
            readers = self.readers.setdefault(layer, [layer])
            readers = [reader for reader in readers if _is_plain(reader) and reader.active_adapters[0] == name]
            self.outputs = self._outputs(readers, name, x)
        elif layer not in self.outputs:
            known = self.readers[self.first]
            known.extend([] if layer in known else [layer])
            return self._outputs([layer], name, x)[layer]
        return self.outputs.pop(layer)

    def _outputs(self, layers: list[lora.Linear], name: str, x: Tensor) -> dict[lora.Linear, Tensor]:
        outputs = [layer.get_base_layer()(x) for layer in layers]
        torch._foreach_add_(outputs, [self._update(layer, name, x) for layer in layers])
        return dict(zip(layers, outputs, strict=True))

    def _update(self, layer: lora.Linear, name: str, x: Tensor) -> Tensor:
        if (layer, name) not in self.factors:
            weights = layer.lora_A[name].weight, layer.lora_B[name].weight
            self.factors[layer, name] = _cast(*weights, layer.scaling[name])
        lora_a, lora_b, scaling = self.factors[layer, name]
        update = F.linear(F.linear(x, lora_a), lora_b)
        return update if scaling == 1 else update * scaling


def _is_plain(layer: lora.Linear) -> bool:
    if layer.disable_adapters or layer.merged or len(layer.active_adapters) != 1:
        return False
    name = layer.active_adapters[0]
    if name not in layer.lora_A or name in layer.lora_variant or layer.lora_bias[name]:
        return False
    return not layer.training or isinstance(layer.lora_dropout[name], nn.Identity)


def _is_float32(base: nn.Module, x: Tensor, lora_a: Tensor, lora_b: Tensor) -> bool:
    if type(base) is not nn.Linear or type(base.weight) is not nn.Parameter:
        return False
    is_float32 = all(tensor.dtype == torch.float32 for tensor in (x, base.weight, lora_a, lora_b))
    return is_float32 and not torch.is_autocast_enabled(x.device.type)


def _is_cast(layer: lora.Linear, x: Tensor) -> bool:
    """Return whether autocast rounds x, A and B to bfloat16, without gradient."""
    kind, name = x.device.type, layer.active_adapters[0]
    if type(x) is not Tensor or x.is_inference() or torch.is_grad_enabled() or not torch.is_autocast_enabled(kind):
        return False
    # PEFT casts x to the dtype of A, which rounds nothing between these two and float32.
    is_known = x.dtype in (torch.bfloat16, torch.float32)
    is_known &= layer.lora_A[name].weight.dtype == layer.lora_B[name].weight.dtype == torch.float32
    return is_known and torch.get_autocast_dtype(kind) == torch.bfloat16


def _cast(lora_a: Tensor, lora_b: Tensor, scaling: float) -> tuple[Tensor, Tensor, float]:
    """Return A, B and s as autocast multiplies them; a power of 2 moves into B, where it rounds nothing."""
    lora_a, lora_b = lora_a.detach().bfloat16(), lora_b.detach().bfloat16()
    is_power = math.frexp(scaling)[0] == 0.5
    return (lora_a, lora_b * scaling, 1.0) if is_power else (lora_a, lora_b, scaling)
