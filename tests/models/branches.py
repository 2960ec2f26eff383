"""Tiny trunks with branches that have moved, a pack of uneven rows, and the losses and gradients of a step on it."""

from __future__ import annotations

import contextlib

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from onetrunk.models.adapters import POLICY, REFERENCE, adapter_parameters
from onetrunk.models.trunk import PackOutput, TrunkModel
from onetrunk.ops.packing import make_pack
from onetrunk.types import Pack
from tests.tiny import tiny_model

# Grouped attention; sliding windows and soft-caps; Conv1D layers and learned positions.
FEW = ("llama", "gemma2", "gpt2")
ALL_ROLES = ("policy", "value", "reference", "trunk")
# Longer than the sliding windows (8), of unequal lengths on both sides, one completion of a single token.
PROMPTS = [[4, 5, 6, 7, 8, 9, 10, 11, 12, 13], [20, 21, 22], [30], [17, 40, 41, 42, 43]]
IDS = torch.arange(3, 43).reshape(2, 20)
COMPLETIONS = [[14, 15, 16, 17, 18, 1], [23, 1], [31, 32, 33, 34, 35, 36, 37], [44]]


def lora(**settings) -> LoraConfig:
    return LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": "all-linear", **settings})


def a_pack(pad_id: int = 0, rows: slice = slice(None)) -> Pack:
    return make_pack(PROMPTS[rows], COMPLETIONS[rows], pad_id)


def move(model: nn.Module, seed: int = 1) -> None:
    """Draw the weights of the policy (those that train) and of the value head anew, away from their start."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        weights = [p for p in adapter_parameters(model, POLICY).values() if p.requires_grad]
        head = list(model.value_head.parameters()) if hasattr(model, "value_head") else []
        for parameter in weights + head:
            drawn = torch.randn(parameter.shape, generator=generator) * 0.2
            # A vector is DoRA's magnitude, or a bias: near where it was, not near 0.
            parameter.copy_(drawn if parameter.dim() > 1 else parameter + drawn)


def a_trunk(family: str = "llama", *, config: LoraConfig | None = None, dtype=torch.float32, base=None, **settings):
    """Return a trunk whose policy and value head are away from zero."""
    base = tiny_model(family) if base is None else base
    trunk = TrunkModel(base.to(dtype), config or lora(), **settings)
    move(trunk)
    return trunk


def an_sft_model(base=None, **config):
    """Return a PEFT model whose adapter is far from zero, as after supervised training."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return get_peft_model(base or tiny_model("llama"), lora(init_lora_weights=False, **config)).eval()


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    return model(input_ids=IDS, attention_mask=torch.ones_like(IDS)).logits


def loss_of(output: PackOutput) -> Tensor:
    """Return a loss in which every logprob has a weight of its own."""
    logprobs = output.logprobs
    weights = torch.linspace(-1, 1.5, logprobs.numel(), device=logprobs.device).reshape(logprobs.shape)
    return (weights * logprobs).sum() + 0.05 * (logprobs**2).sum()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def step_gradients(model: nn.Module, pack: Pack, **arguments) -> tuple[PackOutput, dict[str, Tensor]]:
    """Return what a forward gives, and the gradients of `loss_of` it."""
    model.zero_grad(set_to_none=True)
    output = model(pack=pack, **arguments)
    loss_of(output).backward()
    return output, gradients(model)


def same(one, other) -> bool:
    """Return whether two outputs, dicts or tensors are equal, bit for bit."""
    if one is None or other is None:
        return one is other
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return torch.equal(one, other)


def weights_of(model: nn.Module, *adapters: str) -> dict[str, Tensor]:
    names = adapters or (POLICY, REFERENCE)
    return {n: p.detach().clone() for a in names for n, p in adapter_parameters(model, a).items()}


def base_weights(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters() if "lora_" not in n and "value_head" not in n}


@contextlib.contextmanager
def counted(layers: nn.ModuleList):
    """Count the forwards of every layer inside the block, recomputations included."""
    counts = [0] * len(layers)

    def hook(index):
        def count(*_):
            counts[index] += 1

        return count

    # On a module inside the layer: it runs whatever wraps or replaces the layer.
    handles = [layer.mlp.register_forward_pre_hook(hook(i)) for i, layer in enumerate(layers)]
    try:
        yield counts
    finally:
        for handle in handles:
            handle.remove()
