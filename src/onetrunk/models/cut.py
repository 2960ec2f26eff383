"""Run the decoder layers below a cut alone, or those above it from kept states, inside the model's own forward.

Every decoder of transformers walks one ModuleList and hands `layer_types[i]` masks to layer i, so the list must keep its
length: stand-ins without parameters take the places of the layers that are left out. Knows layers; no roles, no packs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn


class _StandIn(nn.Module):
    """Takes a layer's place and passes the hidden states on; any attribute that the decoder reads is the layer's own."""

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
