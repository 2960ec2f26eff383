"""From completions of many lengths to packs, and from packs to minibatches.

Knows token ids and lengths; no tokenizer and no model. A pack is cut once per rollout and keeps its rows and its width
(types.py); what changes from one PPO epoch to the next is only which packs share a minibatch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from onetrunk.ops.masking import length_mask
from onetrunk.types import Pack


def plan_packs(lengths: Sequence[int], max_rows: int, max_tokens: int | None) -> list[list[int]]:
    """Return the rows of every pack: sorted by length, cut so that a pack keeps within its row and token budgets.

    Args:
        lengths: tokens of every row, prompt and completion together.
        max_rows: most rows of a pack, at least 1.
        max_tokens: most tokens of a pack, padding included (rows x longest); no such budget where None.

    Returns:
        Indices into lengths, each exactly once, the longest rows first; equal lengths keep their order.

    Raises:
        ValueError: max_rows is below 1, or one row alone is longer than max_tokens.
    """
    if max_rows < 1:
        raise ValueError(f"a pack may hold {max_rows} rows; set per_device_train_batch_size to at least 1")
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    if order and max_tokens is not None and lengths[order[0]] > max_tokens:
        longest = lengths[order[0]]
        raise ValueError(
            f"a row of {longest} tokens does not fit into microbatch_tokens {max_tokens}; "
            f"raise microbatch_tokens to at least {longest}, or lower max_completion_length or the prompt length"
        )
    packs: list[list[int]] = []
    while order:
        longest = max(1, lengths[order[0]])
        rows = max_rows if max_tokens is None else min(max_rows, max_tokens // longest)
        packs.append(order[:rows])
        order = order[rows:]
    return packs


def make_pack(prompt_ids: Sequence[list[int]], completion_ids: Sequence[list[int]], pad_id: int) -> Pack:
    """Return the pack of some prompts and their completions, padded on the right.

    Args:
        prompt_ids: R lists of token ids, none empty: the first completion token is predicted by a prompt token.
        completion_ids: R lists of token ids.
        pad_id: what stands in the padding; may be a stop token, since masks come from lengths.

    Returns:
        A pack of R rows, as wide as its longest row.

    Raises:
        ValueError: there is no row, the lists differ in length, or a prompt is empty.
    """
    if not prompt_ids or len(prompt_ids) != len(completion_ids):
        raise ValueError(
            f"a pack got {len(prompt_ids)} prompts and {len(completion_ids)} completions; expected as many, at least 1"
        )
    if not all(prompt_ids):
        row = [len(ids) for ids in prompt_ids].index(0)
        raise ValueError(f"the prompt of row {row} is empty; give it at least one token, such as the BOS token")
    input_ids, lengths = _padded([p + c for p, c in zip(prompt_ids, completion_ids, strict=True)], pad_id)
    completions, completion_lengths = _padded(completion_ids, pad_id)
    return Pack(
        input_ids=input_ids,
        attention_mask=length_mask(lengths, input_ids.shape[1]).long(),
        prompt_lengths=lengths - completion_lengths,
        completion_ids=completions,
        completion_mask=length_mask(completion_lengths, completions.shape[1]),
    )


def split_minibatches(pack_rows: Sequence[int], num_minibatches: int, generator: torch.Generator) -> list[list[int]]:
    """Return the packs of every minibatch: a random order of packs, each dealt to the minibatch with fewest rows.

    Args:
        pack_rows: rows of every pack.
        num_minibatches: minibatches to deal to, at least 1.
        generator: source of the order; advanced by one permutation.

    Returns:
        num_minibatches lists of indices into pack_rows, none empty, each index exactly once. Packs of equal rows are
        spread evenly: the same number of packs each where the count divides.

    Raises:
        ValueError: there are fewer packs than minibatches, or num_minibatches is below 1.
    """
    if not 1 <= num_minibatches <= len(pack_rows):
        raise ValueError(
            f"{len(pack_rows)} packs cannot fill {num_minibatches} minibatches; set num_minibatches between 1 and "
            f"{len(pack_rows)}, or lower microbatch_tokens or per_device_train_batch_size for more, smaller packs"
        )
    minibatches: list[list[int]] = [[] for _ in range(num_minibatches)]
    rows = [0] * num_minibatches
    for pack in torch.randperm(len(pack_rows), generator=generator).tolist():
        fewest = min(range(num_minibatches), key=lambda index: (rows[index], len(minibatches[index])))
        minibatches[fewest].append(pack)
        rows[fewest] += pack_rows[pack]
    return minibatches


def pad_rows(rows: Sequence[Tensor], width: int | None = None) -> Tensor:
    """Return rows of different lengths as one tensor, filled with 0 on the right.

    Args:
        rows: R tensors [length], of one dtype and device.
        width: entries of a row of the result; the longest length where None.

    Returns:
        [R, width].

    Raises:
        ValueError: there is no row, or one is longer than width.
    """
    if not rows:
        raise ValueError("pad_rows got no rows; pass at least one")
    longest = max(len(row) for row in rows)
    width = longest if width is None else width
    if longest > width:
        raise ValueError(f"a row of {longest} entries does not fit into width {width}; pass a width of {longest}")
    padded = rows[0].new_zeros(len(rows), width)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
    return padded


def _padded(ids: Sequence[list[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    width = max(len(row) for row in ids)
    padded = torch.tensor([row + [pad_id] * (width - len(row)) for row in ids], dtype=torch.int64)
    return padded.reshape(len(ids), width), torch.tensor([len(row) for row in ids])
