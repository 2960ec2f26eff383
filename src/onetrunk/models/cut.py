"""Run the decoder layers below a cut alone, or those above it from kept states, inside the model's own forward.

Every decoder of transformers walks one ModuleList and hands `layer_types[i]` masks to layer i, so the list must keep
its length: stand-ins without parameters take the places of the layers that are left out. That a model can be run so is
proved once (`verify_cut`). Knows layers; no roles, no packs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from onetrunk.models.base import backbone, check_cut_supported, decoder_layers


class _StandIn(nn.Module):
    """Takes a layer's place and passes the states on; an attribute that the decoder reads is the layer's own."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.__dict__["stands_for"] = layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["stands_for"], name)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states


class _Keep(_StandIn):
    """Keeps the states that reach its place."""

    states: Tensor | None = None

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.__dict__["states"] = hidden_states
        return hidden_states


class _HandIn(_StandIn):
    """Hands the kept states to the layer above, whatever comes from below."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self.__dict__["states"]


@contextlib.contextmanager
def _replaced(layers: nn.ModuleList, stand_ins: dict[int, nn.Module]) -> Iterator[None]:
    originals = {i: layers[i] for i in stand_ins}
    try:
        for i, stand_in in stand_ins.items():
            layers[i] = stand_in
        yield
    finally:
        for i, original in originals.items():
            layers[i] = original


@contextlib.contextmanager
def only_below(layers: nn.ModuleList, cut: int) -> Iterator[list[Tensor]]:
    """Inside the block a forward runs layers 0..cut-1 alone; the list yielded then holds the states that left them."""
    keep = _Keep(layers[cut])
    kept: list[Tensor] = []
    with _replaced(layers, {cut: keep} | {i: _StandIn(layers[i]) for i in range(cut + 1, len(layers))}):
        yield kept
    if keep.__dict__.get("states") is not None:
        kept.append(keep.__dict__["states"])


@contextlib.contextmanager
def only_above(layers: nn.ModuleList, cut: int, states: Tensor) -> Iterator[None]:
    """Inside the block a forward runs layers cut.. alone, starting from `states` [R, T, H]."""
    hand_in = _HandIn(layers[cut - 1])
    hand_in.__dict__["states"] = states
    with _replaced(layers, {cut - 1: hand_in} | {i: _StandIn(layers[i]) for i in range(cut - 1)}):
        yield


@torch.no_grad()
def verify_cut(model: nn.Module, cut: int) -> None:
    """Prove over 8 tokens that the layers above `cut`, run from kept states, give what a full forward gives.

    The largest difference may be .1% of the largest state, as in `verify_head`: kernels that add in any order pass.

    Raises:
        ValueError: they don't: layers that share keys and values, return tuples, or hand on more than their states.
    """
    check_cut_supported(model)
    body, layers = backbone(model), decoder_layers(model)
    embedding = model.get_input_embeddings()
    ids = torch.linspace(0, embedding.weight.shape[0] - 1, 8, device=embedding.weight.device).long()[None]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    whole, error = body(**inputs).last_hidden_state.float(), float("inf")
    try:
        with only_below(layers, cut) as kept:
            body(**inputs)
        body(**inputs | {"input_ids": ids.flip(1)})  # What a layer might leave for later ones is another row's now.
        with only_above(layers, cut, kept[0]):
            halves = body(**inputs).last_hidden_state.float()
        if halves.shape == whole.shape:
            error = (whole - halves).abs().max().item()
    except (ValueError, RuntimeError, IndexError, TypeError, AttributeError):
        pass  # A layer that returns a tuple ends here.
    if not error <= 1e-3 * whole.abs().max().item():
        raise ValueError(
            f"the layers of {type(body).__name__} can't be run in two halves (one returns more than its hidden states,"
            " or reads more than those of the layer below); set adapter_layers to 'all'"
        )
