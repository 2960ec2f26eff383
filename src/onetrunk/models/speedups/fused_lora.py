"""A linear layer and its low-rank update as one operation: y = x W^T + b + s (x A^T) B^T.

PEFT's modules compute, scale and add the update in separate passes over memory, and also the two halves of the
gradient of x. Here the matrix product that computes them also adds them, so the output is the only tensor of its
size. Weight and bias are frozen.
"""

from __future__ import annotations

from collections.abc import Iterable
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
    """Let the LoRA layers on `nn.Linear` run fused."""
    for layer in layers:
        if type(layer) is lora.Linear and type(layer.get_base_layer()) is nn.Linear:
            layer.forward = _FusedForward(layer)


class _FusedForward:
    """The forward of one layer. An object, because a deep copy of the layer must also copy its forward."""

    def __init__(self, layer: lora.Linear):
        self.layer = layer

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        layer = self.layer
        if args or kwargs or not _is_plain(layer, x):
            return type(layer).forward(layer, x, *args, **kwargs)
        base, name = layer.get_base_layer(), layer.active_adapters[0]
        lora_a, lora_b = layer.lora_A[name].weight, layer.lora_B[name].weight
        return lora_linear(x, base.weight, base.bias, lora_a, lora_b, layer.scaling[name])


def _is_plain(layer: lora.Linear, x: Tensor) -> bool:
    if layer.disable_adapters or layer.merged or len(layer.active_adapters) != 1:
        return False
    name = layer.active_adapters[0]
    if name not in layer.lora_A or name in layer.lora_variant or layer.lora_bias[name]:
        return False
    if layer.training and not isinstance(layer.lora_dropout[name], nn.Identity):
        return False
    weights = (layer.get_base_layer().weight, layer.lora_A[name].weight, layer.lora_B[name].weight)
    is_float32 = x.dtype == torch.float32 and all(weight.dtype == torch.float32 for weight in weights)
    return is_float32 and type(weights[0]) is nn.Parameter and not torch.is_autocast_enabled(x.device.type)
