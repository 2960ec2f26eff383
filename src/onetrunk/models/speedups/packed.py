"""Keep float32 weights in the layout that oneDNN reads fastest, while a model samples on a CPU.

A decoded token multiplies a handful of rows by every matrix. The usual product (MKL) reorders the matrix in each call,
which for few rows costs more than the product itself. oneDNN keeps a reordered copy, which the product only reads. It
also uses AVX-512 on processors where MKL does not, so that the forward over the prompts gains as well.

Both products sum in another order (1e-6 in float32), as products of different shapes do. So they are used for sampling
alone: scoring and training must compute the same bits as each other.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onetrunk.costs import host_memory_bytes

# A smaller matrix stays in the cache of the processor either way.
LEAST_NUMBERS = 2**16
# Copies larger than this share of the machine's memory are not made. The total decides, not what is free: a run that
# is resumed must make the same choice again.
HOST_SHARE = 0.25
# Rows that the layout is made for; it serves any number of them.
ROWS = 16
# Relative to the largest output. Float32 sums in another order differ by 1e-6.
TOLERANCE = 1e-5


@contextlib.contextmanager
def packed_weights(model: nn.Module) -> Iterator[None]:
    """Let the linear layers of `model` compute from packed copies of their weights inside the block.

    Weights must not change inside it. A copy is made when its layer is called first. Changes nothing for layers that
    are not float32 or not on the CPU, under autocast, with gradients, and where torch was built without oneDNN.
    """
    layers = packable_layers(model)
    for layer in layers:
        layer.forward = _PackedForward(layer)
    try:
        yield
    finally:
        for layer in layers:
            layer.__dict__.pop("forward", None)


def packable_layers(model: nn.Module) -> list[nn.Linear]:
    """Return the linear layers that are computed from packed copies; none if the copies would take too much memory."""
    layers = [layer for layer in model.modules() if type(layer) is nn.Linear and _is_packable(layer)]
    num_bytes = sum(layer.weight.nbytes for layer in layers)
    return layers if num_bytes <= HOST_SHARE * host_memory_bytes() else []


def _is_packable(layer: nn.Linear) -> bool:
    weight = layer.weight
    # A layer with a forward of its own is somebody else's, such as another block's.
    if type(weight) is not nn.Parameter or "forward" in vars(layer) or weight.numel() < LEAST_NUMBERS:
        return False
    return weight.dtype == torch.float32 and weight.device.type == "cpu" and _is_right(*weight.shape)


class _PackedForward:
    """The forward of one layer inside the block. It has no packed copy before its first call."""

    def __init__(self, layer: nn.Linear):
        self.layer = layer
        self.packed: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        weight, bias = self.layer.weight, self.layer.bias
        if x.dtype != torch.float32 or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            return F.linear(x, weight, bias)
        if self.packed is None:
            self.packed = _pack(weight)
        return _packed_linear(x, self.packed, bias)


def _pack(weight: Tensor) -> Tensor:
    # Named like private functions, but these are what torch.compile emits for a layer with frozen weights. The public
    # torch.utils.mkldnn reorders the weight in each call.
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS)


def _packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


@functools.cache
def _is_right(num_outputs: int, num_inputs: int) -> bool:
    """Return whether packed products of this shape exist here and equal the usual ones; tried once per shape."""
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")):
        return False
    generator = torch.Generator().manual_seed(0)
    weight, bias = (torch.randn(*shape, generator=generator) for shape in ((num_outputs, num_inputs), (num_outputs,)))
    x = torch.randn(3, num_inputs, generator=generator)
    try:
        found = _packed_linear(x, _pack(weight), bias)
    except RuntimeError:
        return False
    expected = F.linear(x, weight, bias)
    return bool((found - expected).abs().max() <= TOLERANCE * expected.abs().max())
