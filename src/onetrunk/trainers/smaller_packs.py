"""Forwards of fewer rows where the memory does not hold a pack: it is cut into parts of the same width.

A row is computed as before, so nothing changes but the order in which sums are made. Knows packs and rows; no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from typing import TypeVar

import torch
from accelerate.logging import get_logger
from torch import Tensor

from onetrunk.models.pack_output import PackOutput
from onetrunk.types import Experience, Pack

logger = get_logger(__name__)

Rows = TypeVar("Rows", Pack, Experience)


class PackSize:
    """How many rows a forward takes at most: all of a pack, until memory runs out.

    Args:
        what: that is run, for sentences ("the update").
    """

    def __init__(self, what: str):
        self.what = what
        self.most_rows: int | None = None
        self.num_halvings = 0

    def parts(self, item: Rows) -> list[Rows]:
        """Return a pack, or an experience, in parts of at most `most_rows` rows."""
        return split_rows(item, self.most_rows)

    def shrink(self, packs: Sequence[Pack], error: str) -> None:
        """Halve the rows of a forward, and say so.

        Args:
            packs: the largest of them did not fit.
            error: what torch said.

        Raises:
            RuntimeError: a forward has one row already.
        """
        largest = max(min(pack.num_rows, self.most_rows or pack.num_rows) for pack in packs)
        width = max(pack.input_ids.shape[1] for pack in packs)
        reason = error.splitlines()[0] if error else "out of memory"
        if largest == 1:
            raise RuntimeError(
                f"the memory does not hold {self.what} of one row of {width} tokens ({reason}); lower"
                " max_completion_length, set activation_checkpointing, or load the base in 4 bit"
            )
        self.most_rows = -(-largest // 2)
        self.num_halvings += 1
        logger.warning(
            f"the memory did not hold {self.what} of {largest} rows x {width} tokens ({reason}); from here on a"
            f" forward has at most {self.most_rows} rows, and the step is made again: the gradient is the same. Set"
            f" per_device_train_batch_size to {self.most_rows} (or lower microbatch_tokens) to spare the attempt"
        )


def split_rows(item: Rows, most_rows: int | None) -> list[Rows]:
    """Return a pack or an experience in parts of at most so many rows, of the same width; None: as it is."""
    num_rows = item.num_rows if isinstance(item, Pack) else item.pack.num_rows
    if most_rows is None or num_rows <= most_rows:
        return [item]
    return [_rows(item, slice(start, start + most_rows)) for start in range(0, num_rows, most_rows)]


def _rows(item: Rows, rows: slice) -> Rows:
    changes = {}
    for field in fields(item):
        value = getattr(item, field.name)
        if is_dataclass(value):
            changes[field.name] = _rows(value, rows)
        elif isinstance(value, Tensor):
            changes[field.name] = value[rows]
    return replace(item, **changes)


def join_rows(outputs: Sequence[PackOutput]) -> PackOutput:
    """Return what was said of the parts of a pack as said of the whole."""
    if len(outputs) == 1:
        return outputs[0]
    columns = zip(*outputs, strict=True)
    return PackOutput(*(None if parts[0] is None else torch.cat(parts) for parts in columns))
