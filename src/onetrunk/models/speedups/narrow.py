"""Run the feed-forward blocks only at the positions that matter: no padding, and in the last layer no prompt.

A feed-forward block treats every position separately, so its input may leave positions out, and its output has zeros
there. Nothing reads padding; of the last layer, only the states that predict a completion token and the one after it
are read. Attention is unchanged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from onetrunk.models.base_model import backbone, computes, decoder_layers

# Names of a layer's feed-forward block in the decoders of transformers.
BLOCK_NAMES = ("mlp", "feed_forward")


@dataclass(frozen=True)
class Positions:
    """Positions in a pack [R, T], as indices into its R * T tokens.

    Args:
        shape: (R, T).
        real: [N] tokens that are not padding; None if there is no padding.
        read: [M] tokens whose last hidden state is read.
    """

    shape: tuple[int, int]
    real: Tensor | None
    read: Tensor

    @classmethod
    def at(cls, is_real: Tensor, read: Tensor) -> Positions:
        """Return the positions for a mask [R, T] of real tokens and the indices [M] of the tokens that are read."""
        real = is_real.flatten().nonzero().squeeze(1)
        return cls(tuple(is_real.shape), None if len(real) == is_real.numel() else real, read)


class NarrowBlocks:
    """Hooks on the feed-forward blocks of a decoder, active only inside `at`.

    If a layer has no block by a known name, nothing is hooked.
    """

    def __init__(self, layers: nn.ModuleList):
        self.positions: Positions | None = None
        self.handles: list[RemovableHandle] = []
        blocks = [next((getattr(x, n) for n in BLOCK_NAMES if hasattr(x, n)), None) for x in layers]
        if any(block is None for block in blocks):
            return
        for number, block in enumerate(blocks):
            is_last = number == len(blocks) - 1
            self.handles.append(block.register_forward_pre_hook(partial(self._gather, is_last)))
            self.handles.append(block.register_forward_hook(partial(self._scatter, is_last)))

    @contextlib.contextmanager
    def at(self, positions: Positions | None) -> Iterator[None]:
        """Run the blocks only at `positions`; None: everywhere."""
        before, self.positions = self.positions, positions
        try:
            yield
        finally:
            self.positions = before

    def detach(self) -> None:
        """Remove the hooks: the blocks run everywhere from now on."""
        while self.handles:
            self.handles.pop().remove()

    def _index(self, is_last: bool) -> Tensor | None:
        if self.positions is None:
            return None
        return self.positions.read if is_last else self.positions.real

    def _gather(self, is_last: bool, _block: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        index = self._index(is_last)
        return None if index is None else (args[0].flatten(0, 1).index_select(0, index)[None], *args[1:])

    def _scatter(self, is_last: bool, _block: nn.Module, _args: tuple[Any, ...], output: Tensor) -> Tensor | None:
        index = self._index(is_last)
        if index is None:
            return None
        rows, width = self.positions.shape
        everywhere = output.new_zeros(rows * width, output.shape[-1])
        return everywhere.index_copy(0, index, output[0]).unflatten(0, (rows, width))


@torch.no_grad()
def narrow_blocks(model: nn.Module) -> NarrowBlocks:
    """Return hooks on `model` that don't change the states that are read, or none if two rows show that they do."""
    body = backbone(model)
    narrow = NarrowBlocks(decoder_layers(model))
    embedding = model.get_input_embeddings()
    ids = torch.linspace(0, embedding.weight.shape[0] - 1, 12, device=embedding.weight.device).long().view(2, 6)
    lengths = torch.tensor([6, 4], device=ids.device)
    mask = torch.arange(6, device=ids.device) < lengths[:, None]
    # All but the first token of each row.
    positions = Positions.at(mask, mask.flatten().nonzero().squeeze(1)[[*range(1, 6), *range(7, 10)]])
    inputs = {"input_ids": ids, "attention_mask": mask.long(), "use_cache": False}

    def states_at(at: Positions | None) -> Tensor:
        with narrow.at(at):
            return body(**inputs).last_hidden_state.flatten(0, 1)[positions.read]

    if not computes(lambda: states_at(positions), expected=states_at(None)):
        narrow.detach()
    return narrow
