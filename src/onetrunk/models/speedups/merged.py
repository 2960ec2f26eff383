"""Sample from merged weights: the policy's LoRA in the base's matrices, one product per layer instead of three.

The sum is a new tensor, and afterwards the base's own tensors are restored, so the base is unchanged to the bit
(PEFT's `unmerge` subtracts, and rounds). It costs a copy of the adapted matrices. Sampling must give the probabilities
that training computes with separate matrices. So the policy is merged only while it is the active role, and only if a
forward has shown that the merged weights give the same logits.

On a CPU merged weights are packed into the layout that oneDNN reads fastest. A decoded token multiplies a handful of
rows by every matrix; the usual product (MKL) reorders the matrix in each call, which for few rows costs more than the
product itself. oneDNN also uses AVX-512 where MKL does not, so the forward over the prompts gains as well. Frozen
weights are not packed: a second copy of them would raise the peak of a run by a third. A packed product sums in
another order (1e-6 in float32), so it is used for sampling alone: scoring and training must compute the same bits.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.nn.functional as F
from peft.tuners import lora
from torch import Tensor, nn

from onetrunk.models.adapters import POLICY, is_active
from onetrunk.models.base_model import probe_inputs
from onetrunk.models.speedups.fused_lora import casting_once
from onetrunk.models.speedups.memory_use import free_memory, is_out_of_memory
from onetrunk.models.trunk import TrunkModel

logger = logging.getLogger(__name__)

# Relative to the largest logit. Float32 sums in another order differ by 1e-6 to 1e-5, a rounding to bfloat16 by 1e-2.
TOLERANCE = 1e-4
# Standard deviation of the random update in the check, relative to the weight's.
UPDATE_SIZE = 0.1
# A smaller matrix is not packed: it stays in the cache of the processor either way.
LEAST_NUMBERS = 2**16
# Rows that the packed layout is made for; it serves any number of them.
ROWS = 16
# Of packed products, relative to the largest output. Float32 sums in another order differ by 1e-6.
PACKED_TOLERANCE = 1e-5


def can_merge(model: nn.Module) -> bool:
    """Return whether the policy may be merged now.

    It must be the active role, plain LoRA in float32 on unquantised float32 matrices, and a forward must show that
    merging changes no logit (`_merge_obstacle`). There is one check for each way of calling the model: accelerate
    replaces the forward by one under autocast, and evaluation calls it under autocast.
    """
    if not isinstance(model, TrunkModel):
        return False
    if not all(is_active(layer, POLICY) and _is_plain(layer) for layer in model.tuner_layers):
        return False
    device = model.get_input_embeddings().weight.device
    autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    way = (device, autocast, model.forward)
    if way not in model.merge_proofs:
        obstacle = _merge_obstacle(model)
        if obstacle is not None:
            logger.info("sampling keeps the adapter apart from the weights: %s", obstacle)
        model.merge_proofs[way] = obstacle is None
    return model.merge_proofs[way]


def _is_plain(layer: nn.Module) -> bool:
    if type(layer) is not lora.Linear or layer.lora_variant or any(layer.lora_bias.values()):
        return False
    weight = layer.get_base_layer().weight
    return type(weight) is nn.Parameter and weight.dtype == torch.float32 and not layer.merged_adapters


@contextlib.contextmanager
def merged_policy(model: nn.Module, parts: Iterable[nn.Module] | None = None) -> Iterator[None]:
    """Let `model` compute its policy from merged weights inside the block if `can_merge`, else from separate ones.

    Separate ones are cast once (`casting_once`), where they are cast.

    Args:
        parts: merge in these modules only; None: everywhere.
    """
    with _merged(_trained_layers(model, parts)) if can_merge(model) else casting_once(model):
        yield


def _trained_layers(model: TrunkModel, parts: Iterable[nn.Module] | None = None) -> list[lora.Linear]:
    # Frozen layers stay separate, so that the states at the cut equal those of every other forward.
    trained = [x for x in model.tuner_layers if POLICY in x.lora_A and x.lora_A[POLICY].weight.requires_grad]
    if parts is None:
        return trained
    inside = {module for part in parts for module in part.modules()}
    return [layer for layer in trained if layer in inside]


@contextlib.contextmanager
def _merged(layers: Sequence[lora.Linear]) -> Iterator[None]:
    kept: dict[nn.Module, Tensor] = {}
    try:
        for layer in layers:
            kept[layer] = layer.get_base_layer().weight.data
            layer.get_base_layer().weight.data = kept[layer] + layer.get_delta_weight(POLICY)
            layer.merged_adapters.append(POLICY)
        yield
    finally:
        for layer, weight in kept.items():
            layer.get_base_layer().weight.data = weight
            layer.merged_adapters.clear()


@torch.no_grad()
def _merge_obstacle(model: TrunkModel) -> str | None:
    """Return why merged weights would give other logits than separate ones over 8 tokens, or None.

    Autocast rounds the merged sum to 8 bits (fp16: 11). A model that reads `layer.weight` instead of calling the layer
    (Jamba's `dt_proj`) ignores the adapter there, unless it is merged.
    """
    layers, inputs = _trained_layers(model), probe_inputs(model)
    try:
        with _random_updates(layers):
            separate = model(**inputs).logits.float()
            with _merged(layers):
                error = (model(**inputs).logits.float() - separate).abs().max().item()
    except RuntimeError as failure:
        if not is_out_of_memory(failure):
            raise
        error = None
    if error is None:
        free_memory()
        return "there is no memory for a copy of the adapted matrices"
    if error <= TOLERANCE * separate.abs().max().item():
        return None
    return f"the merged weights give other logits (largest difference {error:.3g})"


@contextlib.contextmanager
def _random_updates(layers: Sequence[lora.Linear]) -> Iterator[None]:
    """Give the policy random weights inside the block: before training its own change nothing and show nothing.

    The parameters are replaced, not overwritten: autocast keeps rounded copies of parameters that train.
    """
    generator = torch.Generator().manual_seed(0)
    kept = [(x.lora_A[POLICY], x.lora_B[POLICY], x.lora_A[POLICY].weight, x.lora_B[POLICY].weight) for x in layers]
    try:
        for layer, (down, up, a, b) in zip(layers, kept, strict=True):
            size = UPDATE_SIZE * layer.get_base_layer().weight.std() / math.sqrt(a.shape[0])
            for module, old, std in ((down, a, 1.0), (up, b, size / (layer.scaling[POLICY] or 1.0))):
                drawn = torch.randn(old.shape, generator=generator).to(old.device, old.dtype)
                module.weight = nn.Parameter(drawn * std, requires_grad=False)
        yield
    finally:
        for down, up, a, b in kept:
            down.weight, up.weight = a, b


# --- packed weights -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def packed_weights(model: nn.Module) -> Iterator[None]:
    """Let merged layers compute from packed weights inside the block, without gradients.

    Use it inside `merged_policy`, which restores the weights. Changes nothing where nothing is merged.
    """
    tuners = model.tuner_layers if isinstance(model, TrunkModel) else ()
    merged = [x.get_base_layer() for x in tuners if type(x) is lora.Linear and x.merged_adapters]
    layers = [layer for layer in merged if _is_packable(layer)]
    for layer in layers:
        layer.forward = _PackedForward(layer)
    try:
        yield
    finally:
        for layer in layers:
            layer.__dict__.pop("forward", None)


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
    return bool((found - expected).abs().max() <= PACKED_TOLERANCE * expected.abs().max())
