"""The rows that still decode, column by column: what a decode loop carries from one token to the next.

Prompts are padded on the LEFT, so that the next token of every row stands in the same column; positions come from the
mask. Knows token ids and a key-value cache; draws nothing and runs no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from onetrunk.models.narrow import Positions
from onetrunk.rollouts.base import SamplingParams
from onetrunk.rollouts.draws import row_uniforms
from onetrunk.types import RowKey


@dataclass(frozen=True)
class Completion:
    """A finished row: its completion's ids, its logprobs on the CPU, and whether a stop token ended it."""

    token_ids: list[int]
    logprobs: Tensor
    stopped: bool


@dataclass
class DecodeState:
    """The rows of a sub-batch that still decode: b rows, in one order throughout; P prompt, C completion columns.

    Args:
        rows: b numbers of rows in the call.
        token_ids: [b, P + C] int64; padding, prompt, completion so far.
        attention_mask: [b, P + C] int64, 0 at padding; read up to `width`.
        position_ids: [b, P + C] int64.
        uniforms: [b, C] float64.
        logprobs: [b, C] float32, filled as far as the completion is.
        cache: keys and values of the first `seen` columns.
        seen: columns that went through the model.
        width: columns that are filled.
    """

    rows: list[int]
    token_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    uniforms: Tensor
    logprobs: Tensor
    cache: DynamicCache
    seen: int
    width: int

    def next_tokens(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return rows [b], positions [b, t] and, as bool [b, t], what is no padding, of the columns not yet seen."""
        new = slice(self.seen, self.width)
        rows = torch.tensor(self.rows, device=self.token_ids.device)
        return rows, self.position_ids[:, new], self.attention_mask[:, new].bool()

    def prompt_positions(self) -> Positions:
        """Return where the prompts' tokens stand, and that only the last column is read."""
        mask = self.attention_mask[:, : self.width].bool()
        last = torch.arange(1, len(mask) + 1, device=mask.device) * self.width - 1
        return Positions.at(mask, last)

    def append(self, tokens: Tensor, logprobs: Tensor, t: int) -> None:
        """Add completion token number t of every row."""
        self.token_ids[:, self.width] = tokens
        self.logprobs[:, t] = logprobs
        self.width += 1

    def completion(self, i: int, length: int, stopped: bool) -> Completion:
        """Return row i with its first `length` completion tokens."""
        token_ids = self.token_ids[i, self.width - length : self.width].tolist()
        return Completion(token_ids, self.logprobs[i, :length].cpu(), stopped)

    def keep(self, staying: list[int]) -> None:
        """Drop every row but those at the indices `staying`."""
        if len(staying) == len(self.rows):
            return
        index = torch.tensor(staying, device=self.token_ids.device)
        self.rows = [self.rows[i] for i in staying]
        for name in ("token_ids", "attention_mask", "position_ids", "uniforms", "logprobs"):
            setattr(self, name, getattr(self, name).index_select(0, index))
        # Unlike batch_select_indices, reorder_cache also exists for the states of linear-attention layers.
        self.cache.reorder_cache(index)


def left_padded(
    rows: list[int], prompt_ids: Sequence[list[int]], params: SamplingParams, keys: Sequence[RowKey], model: nn.Module
) -> DecodeState:
    """Return the state before the first token of some rows of a call (numbers in `prompt_ids` and `keys`)."""
    prompt_width = max(len(prompt_ids[row]) for row in rows)
    shape = (len(rows), prompt_width + params.max_completion_length)
    token_ids = torch.full(shape, params.pad_token_id)
    attention_mask = torch.ones(shape, dtype=torch.int64)
    for i, row in enumerate(rows):
        start = prompt_width - len(prompt_ids[row])
        token_ids[i, start:prompt_width] = torch.tensor(prompt_ids[row])
        attention_mask[i, :start] = 0
    uniforms = np.zeros((len(rows), params.max_completion_length))
    if params.temperature > 0:
        uniforms = np.stack([row_uniforms(keys[row], params.max_completion_length) for row in rows])
    device = next(model.parameters()).device
    return DecodeState(
        rows=rows,
        token_ids=token_ids.to(device),
        attention_mask=attention_mask.to(device),
        position_ids=(attention_mask.cumsum(-1) - 1).clamp(min=0).to(device),
        uniforms=torch.from_numpy(uniforms).to(device),
        logprobs=torch.zeros(len(rows), params.max_completion_length, device=device),
        cache=DynamicCache(config=model.config),
        seen=0,
        width=prompt_width,
    )
