"""Which tokens of a pack a decoder runs: rows with or without padding, and blocks without the positions nobody reads.

With `padding_free` the rows stand one after another in a sequence [1, N], and the positions of each count from 0. From
these positions transformers keeps the rows apart: with a block-diagonal mask (SDPA, eager), or with the
variable-length kernels of flash attention. There must be no attention mask and no cache: with either of them
transformers does not look at the positions, and rows silently attend to each other. `packing_obstacle` checks that a
model does what its positions say.

A feed-forward block treats every position separately, so its input may leave positions out, and its output has zeros
there. Nothing reads padding; of the last layer, only the states that predict a completion token and the one after it
are read. Attention is unchanged. `narrow_blocks` checks that a model's blocks can be run so.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import masking_utils
from transformers.utils.generic import is_flash_attention_requested

from onetrunk.models.base_model import backbone, computes, decoder_layers
from onetrunk.ops.packing import make_pack
from onetrunk.types import Pack, to_device

# Kinds of layers, in the words of transformers' configs, that a row passes through without a state of earlier rows.
_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}
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
        shape = tuple(is_real.shape)
        return cls(shape, None if len(real) == is_real.numel() else real.to(read.device, non_blocking=True), read)


@dataclass(frozen=True)
class TokenGrid:
    """The tokens of a pack as the decoder takes them, [B, L]: padded rows, or all rows in one sequence.

    Args:
        pack: the rows; R rows of N tokens in all, the longest of T.
        input_ids: [B, L], where (B, L) is (R, T) with padding and (1, N) without.
        first: [R] index of each row's first token among the B * L tokens.
        real: [N] indices of the tokens that are not padding; None if there is no padding.
        is_packed: whether several rows share a sequence.
        arguments: further keywords for the decoder.
    """

    pack: Pack
    input_ids: Tensor
    first: Tensor
    real: Tensor | None
    is_packed: bool = False
    arguments: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def padded(cls, pack: Pack) -> TokenGrid:
        """Return the rows as they are, side by side.

        There is no attention mask: rows are padded on the right, so a token never attends to padding, and purely
        causal attention runs in half the time of attention with a mask. Positions count from 0.
        """
        num_rows, width = pack.input_ids.shape
        first = torch.arange(num_rows, device=pack.input_ids.device) * width
        real = pack.places.real
        return cls(pack, pack.input_ids, first, None if len(real) == num_rows * width else real)

    @classmethod
    def in_one_sequence(cls, pack: Pack, is_flash: bool) -> TokenGrid:
        """Return the rows in one sequence; `is_flash` if the attention takes the borders of the rows as arguments."""
        real, (num_rows, width) = pack.places.real, pack.input_ids.shape
        lengths = pack.attention_mask.sum(dim=1)
        borders = F.pad(lengths.cumsum(0), (1, 0))
        arguments: dict[str, Any] = {"position_ids": (real % width)[None]}
        if is_flash:
            # Otherwise each layer would find them in the positions, and wait for the device.
            ends = borders.to(torch.int32)
            arguments |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": width, "max_length_k": width}
        return cls(pack, pack.input_ids.flatten()[real][None], borders[:-1], None, num_rows > 1, arguments)

    @property
    def num_tokens(self) -> int:
        """N, the tokens without padding."""
        return self.input_ids.numel() if self.real is None else len(self.real)

    @functools.cached_property
    def read(self) -> Tensor:
        """[M] indices of the tokens that predict a completion token, and of each row's last token."""
        read, width = self.pack.places.read, self.pack.input_ids.shape[1]
        return self.first[read // width] + read % width

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
    """Return why rows cannot share a sequence in this model, or None after a check with three short rows.

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


# --- feed-forward blocks --------------------------------------------------------------------------------------------


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


# --- masks ----------------------------------------------------------------------------------------------------------

# transformers looks at masks in every forward, and on a GPU each look is a wait. Without an attention mask it asks the
# positions whether several rows share a sequence; with one, whether anything is masked. Who calls the model knows.
_IS_PACKED: ContextVar[bool | None] = ContextVar("is_packed", default=None)
_IS_PADDED: ContextVar[bool | None] = ContextVar("is_padded", default=None)


@contextlib.contextmanager
def known_masks(is_packed: bool | None = None, is_padded: bool | None = None) -> Iterator[None]:
    """Let forwards in the block skip inspecting their masks where the arguments give the answer.

    Args:
        is_packed: whether several rows share a sequence.
        is_padded: whether the attention mask hides any token.
    """
    tokens = _IS_PACKED.set(is_packed), _IS_PADDED.set(is_padded)
    try:
        with _mask_functions:
            yield
    finally:
        _IS_PACKED.reset(tokens[0])
        _IS_PADDED.reset(tokens[1])


class _MaskFunctions:
    """Replaces two functions of transformers while a block of `known_masks` runs, in one thread or in several."""

    def __init__(self):
        self.lock, self.num_blocks = threading.Lock(), 0

    def __enter__(self) -> None:
        with self.lock:
            self.num_blocks += 1
            if self.num_blocks == 1:
                self.find = masking_utils.find_packed_sequence_indices
                self.ignore = masking_utils._ignore_causal_mask_sdpa
                masking_utils.find_packed_sequence_indices = self._row_of_each_token
                masking_utils._ignore_causal_mask_sdpa = self._is_only_causal

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.num_blocks -= 1
            if self.num_blocks == 0:
                masking_utils.find_packed_sequence_indices = self.find
                masking_utils._ignore_causal_mask_sdpa = self.ignore

    def _row_of_each_token(self, position_ids: Tensor) -> Tensor | None:
        is_packed = _IS_PACKED.get()
        if is_packed is None:
            return self.find(position_ids)
        if not is_packed:
            return None
        return (position_ids.diff(prepend=position_ids[:, :1] - 1) != 1).cumsum(-1)

    def _is_only_causal(self, padding_mask: Tensor | None, *args: Any, **kwargs: Any) -> bool:
        is_padded = _IS_PADDED.get()
        if padding_mask is None or is_padded is None:
            return self.ignore(padding_mask, *args, **kwargs)
        return not is_padded and self.ignore(None, *args, **kwargs)


_mask_functions = _MaskFunctions()
