"""Run all rows of a pack in one sequence, without padding.

The rows stand one after another in a sequence [1, N], and the positions of each count from 0. From these positions
transformers keeps the rows apart: with a block-diagonal mask (SDPA, eager), or with the variable-length kernels of
flash attention. There must be no attention mask and no cache: with either of them transformers does not look at the
positions, and rows silently attend to each other.

`packing_obstacle` proves that a model does what its positions say.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.utils.generic import is_flash_attention_requested

from onetrunk.models.base_model import backbone
from onetrunk.models.speedups.narrow import Positions
from onetrunk.ops.packing import make_pack
from onetrunk.types import Pack, to_device

# Kinds of layers, in the words of transformers' configs, that a row passes through without a state of earlier rows.
_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}


@dataclass(frozen=True)
class TokenGrid:
    """The tokens of a pack as the decoder takes them, [B, L]: padded rows, or all rows in one sequence.

    Args:
        pack: the rows; R rows of N tokens in all, the longest of T.
        input_ids: [B, L], where (B, L) is (R, T) with padding and (1, N) without.
        first: [R] index of each row's first token among the B * L tokens.
        real: [N] indices of the tokens that are not padding; None if there is no padding.
        arguments: further keywords for the decoder.
    """

    pack: Pack
    input_ids: Tensor
    first: Tensor
    real: Tensor | None
    arguments: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def padded(cls, pack: Pack) -> TokenGrid:
        """Return the rows as they are, side by side.

        There is no attention mask: rows are padded on the right, so a token never attends to padding, and purely
        causal attention runs in half the time of attention with a mask. Positions count from 0.
        """
        num_rows, width = pack.input_ids.shape
        first = torch.arange(num_rows, device=pack.input_ids.device) * width
        real = pack.attention_mask.flatten().nonzero().squeeze(1)
        return cls(pack, pack.input_ids, first, None if len(real) == num_rows * width else real)

    @classmethod
    def in_one_sequence(cls, pack: Pack, is_flash: bool) -> TokenGrid:
        """Return the rows in one sequence; `is_flash` if the attention takes the borders of the rows as arguments."""
        rows, columns = pack.attention_mask.nonzero(as_tuple=True)
        lengths = pack.attention_mask.sum(dim=1)
        borders = F.pad(lengths.cumsum(0), (1, 0))
        arguments: dict[str, Any] = {"position_ids": columns[None]}
        if is_flash:
            # Otherwise each layer would find them in the positions, and wait for the device.
            ends = borders.to(torch.int32)
            width = pack.input_ids.shape[1]
            arguments |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": width, "max_length_k": width}
        return cls(pack, pack.input_ids[rows, columns][None], borders[:-1], None, arguments)

    @property
    def num_tokens(self) -> int:
        """N, the tokens without padding."""
        return self.input_ids.numel() if self.real is None else len(self.real)

    @functools.cached_property
    def read(self) -> Tensor:
        """[M] indices of the tokens that predict a completion token, and of each row's last token."""
        pack = self.pack
        columns = torch.arange(pack.input_ids.shape[1], device=pack.input_ids.device)
        is_read = pack.attention_mask.bool() & (columns >= pack.prompt_lengths[:, None] - 1)
        rows, columns = is_read.nonzero(as_tuple=True)
        return self.first[rows] + columns

    def positions(self, read: Tensor | None = None) -> Positions:
        """Return where the feed-forward blocks run; `read` are the tokens whose last state is needed."""
        return Positions(tuple(self.input_ids.shape), self.real, self.read if read is None else read)

    def without_padding(self, states: Tensor) -> Tensor:
        """Return states [B, L, H] as [N, H], row after row."""
        flat = states.flatten(0, 1)
        return flat if self.real is None else flat.index_select(0, self.real)

    def with_padding(self, states: Tensor) -> Tensor:
        """Return states [N, H] as [B, L, H], 0 at padding."""
        shape = self.input_ids.shape
        if self.real is None:
            return states.view(*shape, -1)
        flat = states.new_zeros(shape.numel(), states.shape[-1])
        return flat.index_copy(0, self.real, states).view(*shape, -1)


def token_grid(model: nn.Module, pack: Pack, padding_free: bool) -> TokenGrid:
    """Return the tokens of a pack for a decoder."""
    if not padding_free:
        return TokenGrid.padded(pack)
    return TokenGrid.in_one_sequence(pack, is_flash_attention_requested(backbone(model).config.get_text_config()))


@torch.no_grad()
def packing_obstacle(model: nn.Module) -> str | None:
    """Return why rows cannot share a sequence in this model, or None after a proof with three short rows.

    The last row must have the same states whatever stands before it: other tokens there leave the shapes as they are,
    so that in all models that keep rows apart not even a bit changes, also in half precision. And it must have the
    states that it has alone, up to rounding: its positions count from 0.
    """
    body, embedding = backbone(model), model.get_input_embeddings().weight
    ids = torch.linspace(0, embedding.shape[0] - 1, 36).long().tolist()
    before, last = ids[:13], ids[13:24]

    def states(*rows: list[int]) -> Tensor:
        """Return the states of the last row after the others."""
        pack = to_device(make_pack(rows, [[] for _ in rows], 0), embedding.device)
        grid = token_grid(model, pack, padding_free=True)
        return body(input_ids=grid.input_ids, use_cache=False, **grid.arguments).last_hidden_state[0, -len(last) :]

    try:
        alone = states(last)
        after, after_others = states(before, ids[30:33], last), states(before[::-1], ids[33:36], last)
    except (ValueError, RuntimeError, IndexError, TypeError, AttributeError) as error:
        return f"several rows in one sequence raise {type(error).__name__}: {str(error).splitlines()[0]}"
    if not all(x.isfinite().all() for x in (alone, after, after_others)):
        return "several rows in one sequence give states that are not finite"
    precision = torch.finfo(alone.dtype).eps
    leak, error = ((x.float() - after.float()).norm() / alone.float().norm() for x in (after_others, alone))
    is_leaking = leak > max(1e-5, precision / 64)
    if not is_leaking and error <= max(1e-3, 8 * precision):
        return None
    kinds = sorted(set(getattr(body.config.get_text_config(), "layer_types", None) or ()) - _ATTENTION)
    cause = f", because its layers of the type {', '.join(kinds)} pass a state from token to token" if kinds else ""
    if is_leaking:
        return f"a row sees the rows before it in the sequence (its states change by {leak:.2%}){cause}"
    return f"a row has other states than alone (they differ by {error:.2%}), so its positions do not count from 0"
