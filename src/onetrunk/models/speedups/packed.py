"""Keep merged float32 weights in the layout that oneDNN reads fastest, while a model samples on a CPU.

A decoded token multiplies a handful of rows by every matrix. The usual product (MKL) reorders the matrix in each call,
which for few rows costs more than the product itself. oneDNN keeps a reordered copy, which the product only reads. It
also uses AVX-512 on processors where MKL does not, so that the forward over the prompts gains as well.

Merged weights (merged.py) are copies already: packed ones take their place, and no memory. Of the frozen weights only
the output head is packed; a second copy of all others would raise the peak of a run by a third.

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

from onetrunk.costs import host_memory_bytes
from onetrunk.models.trunk import TrunkModel

# A smaller matrix stays in the cache of the processor either way.
LEAST_NUMBERS = 2**16
# A head larger than this share of the machine's memory is not copied. The total decides, not what is free: a run that
# is resumed must make the same choice again.
HOST_SHARE = 0.05
# Rows that the layout is made for; it serves any number of them.
ROWS = 16
# Relative to the largest output. Float32 sums in another order differ by 1e-6.
TOLERANCE = 1e-5


@contextlib.contextmanager
def packed_weights(model: nn.Module) -> Iterator[None]:
    """Let merged layers and the output head compute from packed weights inside the block, without gradients.

    Use it inside `merged_policy`, which restores the weights. Changes nothing where nothing is merged: there the
    precision, the device or the model allows neither.
    """
    copies = _merged_layers(model)
    layers: dict[nn.Linear, bool] = dict.fromkeys(copies, True)
    if copies:
        layers |= dict.fromkeys(_heads(model), False)
    for layer, is_copy in layers.items():
        layer.forward = _PackedForward(layer, is_copy)
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


def _heads(model: nn.Module) -> list[nn.Linear]:
    head = model.get_base_model().get_output_embeddings()
    fits = _is_packable(head) and head.weight.nbytes <= HOST_SHARE * host_memory_bytes()
    return [head] if fits else []


def _is_packable(layer: nn.Module) -> bool:
    # A layer with a forward of its own is somebody else's.
    if type(layer) is not nn.Linear or type(layer.weight) is not nn.Parameter or "forward" in vars(layer):
        return False
    weight = layer.weight
    is_plain = weight.dtype == torch.float32 and weight.device.type == "cpu"
    return is_plain and weight.numel() >= LEAST_NUMBERS and _is_right(*weight.shape)


class _PackedForward:
    """The forward of one layer inside the block. Its weight is packed at its first call; a copy is freed then."""

    def __init__(self, layer: nn.Linear, is_copy: bool):
        self.layer = layer
        self.is_copy = is_copy
        self.packed: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        layer = self.layer
        if self.packed is None:
            self.packed = _pack(layer.weight)
            if self.is_copy:
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
