"""Keys and values of the rows that decode, with room for the next tokens.

transformers' `DynamicLayer` copies all keys and values of a layer for every token. Here a token is written in place,
and the copy is made once in `ROOM` tokens. What attention reads is the same. Other kinds of layers (sliding windows,
convolutions) are those of transformers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

# Tokens: a copy costs a 64th of one per token, and a row holds at most so many unused.
ROOM = 64


class RoomyLayer(DynamicLayer):
    """A `DynamicLayer` whose keys and values are views of larger tensors."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.rooms: dict[str, Tensor] = {}

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append the states [b, heads, t, size] of t tokens, and return those of all tokens."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys, self.values = self._appended("keys", key_states), self._appended("values", value_states)
        return self.keys, self.values

    def _appended(self, name: str, new: Tensor) -> Tensor:
        old, room = getattr(self, name), self.rooms.get(name)
        length = old.shape[-2] if old.numel() else 0
        total = length + new.shape[-2]
        # A view of something else: transformers has replaced the tensor.
        if room is None or old.data_ptr() != room.data_ptr() or room.shape[-2] < total:
            room = new.new_empty(*new.shape[:2], total + ROOM, new.shape[-1])
            if length:
                room[..., :length, :] = old
            self.rooms[name] = room
        room[..., length:total, :] = new
        return room[..., :total, :]

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Keep the rows `beam_idx`, in that order."""
        length = self.get_seq_length()
        for name, room in self.rooms.items():
            self.rooms[name] = room.index_select(0, beam_idx.to(room.device))
            setattr(self, name, self.rooms[name][..., :length, :])


def roomy_cache(config: Any) -> DynamicCache:
    """Return the cache of transformers for a model, its plain layers replaced by roomy ones."""
    cache = DynamicCache(config=config)
    cache.layers = [RoomyLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache
