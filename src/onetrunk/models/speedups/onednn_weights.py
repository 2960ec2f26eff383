"""Keep merged float32 weights in the layout that oneDNN reads fastest, while a model samples on a CPU.

A decoded token multiplies a handful of rows by every matrix. The usual product (MKL) reorders the matrix in each call,
which for few rows costs more than the product itself. oneDNN keeps a reordered copy, which the product only reads. It
also uses AVX-512 on processors where MKL does not, so that the forward over the prompts gains as well.

Merged weights (merged.py) are copies already: packed ones take their place, and no memory. Frozen weights are not
packed: a second copy of them would raise the peak of a run by a third, one of the output head alone by a tenth.

Both products sum in another order (1e-6 in float32), as products of different shapes do. So they are used for sampling
alone: scoring and training must compute the same bits as each other.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from peft.tuners import lora
from torch import Tensor, nn

from onetrunk.models.trunk import TrunkModel

# A smaller matrix stays in the cache of the processor either way.
LEAST_NUMBERS = 2**16
# Rows that the layout is made for; it serves any number of them.
ROWS = 16
# Relative to the largest output. Float32 sums in another order differ by 1e-6.
TOLERANCE = 1e-5


@contextlib.contextmanager
def packed_weights(model: nn.Module) -> Iterator[None]:
    """Let merged layers compute from packed weights inside the block, without gradients.

    Use it inside `merged_policy`, which restores the weights. Changes nothing where nothing is merged.
    """
    layers = _merged_layers(model)
    for layer in layers:
        layer.forward = _PackedForward(layer)
    try:
        yield
    finally:
        for layer in layers:
            layer.__dict__.pop("forward", None)


def _merged_layers(model: nn.Module) -> list[nn.Linear]:
    """Return the layers whose weights are copies that `merged_policy` has made, and that can be packed."""
    if not isinstance(model, TrunkModel):
        return []
    merged = [x.get_base_layer() for x in model.tuner_layers if type(x) is lora.Linear and x.merged_adapters]
    return [layer for layer in merged if _is_packable(layer)]


def _is_packable(layer: nn.Module) -> bool:
    # A layer with a forward of its own is somebody else's.
    if type(layer) is not nn.Linear or type(layer.weight) is not nn.Parameter or "forward" in vars(layer):
        return False
    weight = layer.weight
    is_plain = weight.dtype == torch.float32 and weight.device.type == "cpu"
    return is_plain and weight.numel() >= LEAST_NUMBERS and _is_right(*weight.shape)


class _PackedForward:
    """The forward of one layer inside the block. Its merged weight is packed at the first call, and then freed."""

    def __init__(self, layer: nn.Linear):
        self.layer = layer
        self.packed: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        layer = self.layer
        if self.packed is None:
            self.packed = _pack(layer.weight)
            layer.weight.data = layer.weight.data.new_empty(0)
        return _packed_linear(x, self.packed, layer.bias)


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
