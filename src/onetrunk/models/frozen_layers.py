"""Frozen layers: run only the decoder layers below a cut, or only those above it; keep the states at the cut.

Every decoder of transformers walks one ModuleList and passes `layer_types[i]` masks to layer i, so the list must keep
its length: stand-ins without parameters replace the layers that are left out. `verify_cut` checks once that a model
can be run like this.

`TrunkCache` keeps the states at the cut of a rollout's packs, so that only the first epoch runs the layers below it.
They are plain tensors, on the trunk's device or in pinned host memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from onetrunk.models.base_model import backbone, computes, decoder_layers, probe_inputs

# The share of a device's memory that `auto` may use. Of the total memory, not of the free memory: the choice must not
# depend on when a run starts.
DEVICE_SHARE = 0.1


class _StandIn(nn.Module):
    """Replaces a layer by `run` on its states, and shows the layer's attributes, which the decoder reads."""

    def __init__(self, layer: nn.Module, run: Callable[[Tensor], Tensor] = lambda states: states):
        super().__init__()
        # Not as a submodule: a stand-in has no parameters and no state.
        self.__dict__.update(stands_for=layer, run=run)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["stands_for"], name)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self.run(hidden_states)


class StageRun:
    """What a run of some layers gets and gives: the `received` states go in, the `computed` ones come out."""

    def __init__(self) -> None:
        self.received: Tensor | None = None
        self.computed: Tensor | None = None

    def hand_in(self, _states: Tensor) -> Tensor:
        """Return the states of the layer before."""
        return self.received

    def keep(self, states: Tensor) -> Tensor:
        """Keep the states after the last layer of the run."""
        self.computed = states
        return states


@contextlib.contextmanager
def only_between(layers: nn.ModuleList, first: int, end: int, received: Tensor | None = None) -> Iterator[StageRun]:
    """Inside the block forwards run only layers first..end-1, from `received` states [R, T, H] unless first is 0.

    `computed` has the states after them, before the norm that follows the last layer; not set if that layer runs.
    """
    run = StageRun()
    run.received = received
    before: dict[int, nn.Module] = {i: _StandIn(layers[i]) for i in range(first - 1)}
    if first:
        before[first - 1] = _StandIn(layers[first - 1], run.hand_in)
    after: dict[int, nn.Module] = {i: _StandIn(layers[i]) for i in range(end + 1, len(layers))}
    if end < len(layers):
        after[end] = _StandIn(layers[end], run.keep)
    stand_ins = before | after
    originals = {i: layers[i] for i in stand_ins}
    try:
        for i, stand_in in stand_ins.items():
            layers[i] = stand_in
        yield run
    finally:
        for i, original in originals.items():
            layers[i] = original


@torch.no_grad()
def verify_cut(model: nn.Module, cut: int) -> None:
    """Check with 8 tokens that the layers above `cut`, run from kept states, compute what a full forward does."""
    body, layers = backbone(model), decoder_layers(model)
    config = body.config.get_text_config()
    shared = getattr(config, "num_kv_shared_layers", None)
    if shared:
        raise ValueError(
            f"{config.model_type} shares keys and values across {shared} layers, so its layers cannot be cut in"
            " two; set trunk_cache to off and put the adapters on all layers"
        )
    inputs = probe_inputs(model)

    def in_halves() -> Tensor:
        with only_between(layers, 0, cut) as below:
            body(**inputs)
        # Other tokens, so that anything a layer leaves for later layers belongs to another row.
        body(**inputs | {"input_ids": inputs["input_ids"].flip(1)})
        with only_between(layers, cut, len(layers), below.computed):
            return body(**inputs).last_hidden_state

    if not computes(in_halves, expected=body(**inputs).last_hidden_state):
        raise ValueError(
            f"the layers of {type(body).__name__} can't be run in two halves (one returns more than its hidden states,"
            " or reads more than those of the layer below); set adapter_layers to 'all'"
        )


# --- the states at the cut ------------------------------------------------------------------------------------------


def choose_place(setting: str, num_bytes: int, device: torch.device) -> str:
    """Return "device" or "cpu" for the states of a rollout; any `setting` but "auto" is returned unchanged.

    Args:
        num_bytes: most bytes of the states of one rollout, on one process.
        device: of the trunk. On a CPU "device" and "cpu" are one place.
    """
    if setting != "auto":
        return setting
    is_cuda = device.type == "cuda"
    has_room = is_cuda and num_bytes <= DEVICE_SHARE * torch.cuda.get_device_properties(device).total_memory
    return "device" if has_room else "cpu"


@dataclass(frozen=True)
class TrunkCache:
    """Keeps states on their device ("device") or in pinned host memory ("cpu")."""

    place: str

    def keep(self, states: Tensor) -> Tensor:
        """Return the states [N, H] at the cache's place; they stay there as long as the returned tensor."""
        if self.place == "device" or states.device.type == "cpu":
            return states
        kept = torch.empty(states.shape, dtype=states.dtype, pin_memory=True)
        return kept.copy_(states, non_blocking=True)
