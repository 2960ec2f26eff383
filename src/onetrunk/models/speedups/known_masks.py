"""Spare transformers its looks at masks: on a GPU each of them is a wait for the device, in every forward.

Without an attention mask transformers asks the positions whether several rows share a sequence, and with one whether
anything is masked, because attention without a mask is faster. Who calls the model knows; in `known_masks` it is said.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from torch import Tensor
from transformers import masking_utils

_IS_PACKED: ContextVar[bool | None] = ContextVar("is_packed", default=None)
_IS_PADDED: ContextVar[bool | None] = ContextVar("is_padded", default=None)


@contextlib.contextmanager
def known_masks(is_packed: bool | None = None, is_padded: bool | None = None) -> Iterator[None]:
    """Run the model's forwards in the block without a look at its masks, as far as the answers are given.

    Args:
        is_packed: whether several rows share a sequence.
        is_padded: whether the attention mask hides any token.
    """
    tokens = _IS_PACKED.set(is_packed), _IS_PADDED.set(is_padded)
    try:
        yield
    finally:
        _IS_PACKED.reset(tokens[0])
        _IS_PADDED.reset(tokens[1])


def _find_packed_sequence_indices(position_ids: Tensor) -> Tensor | None:
    is_packed = _IS_PACKED.get()
    if is_packed is None:
        return _find(position_ids)
    if not is_packed:
        return None
    return (position_ids.diff(prepend=position_ids[:, :1] - 1) != 1).cumsum(-1)


def _ignore_causal_mask_sdpa(padding_mask: Tensor | None, *args: Any, **kwargs: Any) -> bool:
    is_padded = _IS_PADDED.get()
    if padding_mask is None or is_padded is None:
        return _ignore(padding_mask, *args, **kwargs)
    return not is_padded and _ignore(None, *args, **kwargs)


_find, _ignore = masking_utils.find_packed_sequence_indices, masking_utils._ignore_causal_mask_sdpa
masking_utils.find_packed_sequence_indices = _find_packed_sequence_indices
masking_utils._ignore_causal_mask_sdpa = _ignore_causal_mask_sdpa
