"""Merge the policy's LoRA into the weights during a rollout: one matrix product per layer instead of three.

The sum is a new tensor, and afterwards the base's own tensors are restored, so the base is unchanged to the bit
(PEFT's `unmerge` subtracts, and rounds). It costs a copy of the adapted matrices.

Sampling must give the probabilities that training computes with separate matrices. So the policy is merged only while
it is the active role, and only if a forward has proved that the merged weights give the same logits.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from peft.tuners import lora
from torch import Tensor, nn

from onetrunk.models.adapters import POLICY, is_active
from onetrunk.models.base_model import probe_inputs
from onetrunk.models.speedups.memory_use import free_memory, is_out_of_memory
from onetrunk.models.trunk import TrunkModel

logger = logging.getLogger(__name__)

# Relative to the largest logit. Float32 sums in another order differ by 1e-6 to 1e-5, a rounding to bfloat16 by 1e-2.
TOLERANCE = 1e-4
# Standard deviation of the random update in the proof, relative to that of the weight.
UPDATE_SIZE = 0.1


def can_merge(model: nn.Module) -> bool:
    """Return whether the policy may be merged now.

    It must be the active role, plain LoRA in float32 on unquantised float32 matrices, and a forward must prove that
    merging changes no logit (`_merge_obstacle`). There is one proof for each way of calling the model: accelerate
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
    """Let `model` compute its policy from merged weights inside the block if `can_merge`, else change nothing.

    Args:
        model: what samples.
        parts: merge in these modules only; None: everywhere.
    """
    with _merged(_trained_layers(model, parts)) if can_merge(model) else contextlib.nullcontext():
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


def _merge_obstacle(model: TrunkModel) -> str | None:
    """Return why merged weights would give other logits than separate ones, or None.

    Autocast rounds the merged sum to 8 bits (fp16: 11). A model that reads `layer.weight` instead of calling the layer
    (Jamba's `dt_proj`) ignores the adapter there, unless it is merged.
    """
    try:
        return _forward_obstacle(model)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
    free_memory()
    return "the memory does not hold a copy of the adapted matrices"


@torch.no_grad()
def _forward_obstacle(model: TrunkModel) -> str | None:
    """Run 8 tokens with separate and with merged weights, and compare the logits."""
    layers = _trained_layers(model)
    inputs = probe_inputs(model)
    is_autocast: list[bool] = []

    def note(_layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        is_autocast.append(torch.is_autocast_enabled(args[0].device.type))

    with _random_updates(layers):
        with contextlib.ExitStack() as hooks:
            for layer in layers:
                hooks.enter_context(layer.register_forward_pre_hook(note))
            separate = model(**inputs).logits.float()
        if any(is_autocast):  # Checked before a copy takes memory.
            return "autocast would round their sum"
        with _merged(layers):
            error = (model(**inputs).logits.float() - separate).abs().max().item()
    if error <= TOLERANCE * separate.abs().max().item():
        return None
    return f"merged into them it gives other logits (largest difference {error:.3g})"


@contextlib.contextmanager
def _random_updates(layers: Sequence[lora.Linear]) -> Iterator[None]:
    """Give the policy random weights inside the block: before training its own change nothing and prove nothing.

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
