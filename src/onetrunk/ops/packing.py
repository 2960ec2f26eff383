"""Deal the rows of a rollout to minibatches, and cut the rows of a minibatch into packs.

Rows are dealt to minibatches at random, whatever their length; inside a minibatch they are sorted by length and cut
into packs. A pack keeps its rows and its width for the whole rollout (types.py). Without padding in the forward
(`padding_free`) rows of any lengths fill a pack.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from onetrunk.ops.masking import length_mask
from onetrunk.types import Pack


def deal_rows(
    num_rows: int, num_minibatches: int, generator: torch.Generator, rank: int = 0, world_size: int = 1
) -> tuple[list[int], list[list[int]]]:
    """Deal the rows of a rollout to minibatches and processes at random.

    The rows of all processes are permuted and cut into `num_minibatches` blocks; inside a block the processes take
    turns. So neither the number of processes nor the pack size changes which rows share a minibatch, and every process
    has the same number of rows in each.

    Args:
        num_rows: rows of the rollout over all processes; a multiple of num_minibatches x world_size.
        num_minibatches: at least 1.
        generator: source of the permutation.
        rank: the process whose rows are returned.
        world_size: number of processes.

    Returns:
        The rows of this process in ascending order, and for each minibatch the positions in that list, ascending.

    Raises:
        ValueError: the rows cannot be dealt evenly.
    """
    if num_minibatches < 1 or num_rows < 1 or num_rows % (num_minibatches * world_size):
        raise ValueError(
            f"{num_rows} rows cannot be dealt evenly to {num_minibatches} minibatches on {world_size} processes;"
            f" pass a number of rows that is a multiple of {max(1, num_minibatches) * world_size}"
        )
    dealt = torch.randperm(num_rows, generator=generator).view(num_minibatches, -1)[:, rank::world_size]
    rows = dealt.flatten().sort().values
    positions = torch.searchsorted(rows, dealt.contiguous()).sort(dim=1).values
    return rows.tolist(), positions.tolist()


@dataclass(frozen=True)
class PackLimits:
    """What a pack may hold.

    Args:
        rows: most rows, at least 1.
        tokens: most tokens; None: no limit.
        padding_free: whether the tokens of a pack are those of its rows; False: padding counts too (rows x longest).
    """

    rows: int
    tokens: int | None = None
    padding_free: bool = False

    @classmethod
    def of(cls, settings: Any, rows: int) -> PackLimits:
        """Return the limits that settings of PPO or of an evaluation give packs of `rows` rows."""
        return cls(rows, settings.microbatch_tokens, settings.padding_free)


def plan_packs(lengths: Sequence[int], limits: PackLimits) -> list[list[int]]:
    """Return the rows of every pack: sorted by length, and cut to the limits on rows and tokens.

    With padding a pack takes the next rows in that order, which are of similar length. Without padding a row goes to
    the first pack that has room for it (first fit decreasing).

    Args:
        lengths: tokens of every row, prompt and completion.

    Returns:
        Indices into lengths, the longest rows first; rows of equal length keep their order.

    Raises:
        ValueError: the limit on rows is below 1, or one row alone is longer than the limit on tokens.
    """
    max_rows, max_tokens = limits.rows, limits.tokens
    if max_rows < 1:
        raise ValueError(f"a pack may hold {max_rows} rows; set per_device_train_batch_size to at least 1")
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    if order and max_tokens is not None and lengths[order[0]] > max_tokens:
        longest = lengths[order[0]]
        raise ValueError(
            f"a row of {longest} tokens does not fit into microbatch_tokens {max_tokens}; "
            f"raise microbatch_tokens to at least {longest}, or lower max_completion_length or the prompt length"
        )
    if limits.padding_free and max_tokens is not None:
        return _first_fit(lengths, order, max_rows, max_tokens)
    packs: list[list[int]] = []
    while order:
        longest = max(1, lengths[order[0]])
        rows = max_rows if max_tokens is None else min(max_rows, max_tokens // longest)
        packs.append(order[:rows])
        order = order[rows:]
    return packs


def _first_fit(lengths: Sequence[int], order: Sequence[int], max_rows: int, max_tokens: int) -> list[list[int]]:
    packs: list[list[int]] = []
    rooms: list[int] = []
    for row in order:
        fitting = (i for i, room in enumerate(rooms) if lengths[row] <= room and len(packs[i]) < max_rows)
        place = next(fitting, None)
        if place is None:
            place = len(packs)
            packs.append([])
            rooms.append(max_tokens)
        packs[place].append(row)
        rooms[place] -= lengths[row]
    return packs


def largest_rows(prompt: int, completion: int, limits: PackLimits) -> list[tuple[int, int]]:
    """Return the rows of the largest pack, as tokens of prompt and completion; these are the longest of both."""
    longest = prompt + completion
    number = limits.rows if limits.tokens is None else max(1, min(limits.rows, limits.tokens // longest))
    rows = [(prompt, completion)] * number
    rest = 0 if limits.tokens is None else limits.tokens - number * longest
    if limits.padding_free and number < limits.rows and rest > 1:
        # A shorter row, most of it completion, fills the sequence up.
        completion = min(completion, rest - 1)
        rows.append((min(prompt, rest - completion), completion))
    return rows


def split_packs(packs: Sequence[list[int]], count: int) -> list[list[int]]:
    """Return `count` packs of the same rows, by halving the largest ones; processes that must run equally many use it.

    Raises:
        ValueError: there are more packs already, or fewer rows.
    """
    packs = list(packs)
    if not len(packs) <= count <= sum(map(len, packs)):
        raise ValueError(f"{len(packs)} packs of {sum(map(len, packs))} rows cannot become {count} packs")
    while len(packs) < count:
        index = max(range(len(packs)), key=lambda i: len(packs[i]))
        rows = packs[index]
        packs[index : index + 1] = [rows[: len(rows) // 2], rows[len(rows) // 2 :]]
    return packs


def make_pack(
    prompt_ids: Sequence[list[int]],
    completion_ids: Sequence[list[int]],
    pad_id: int,
    minibatch: int = 0,
    turn_ids: Sequence[list[int]] | None = None,
) -> Pack:
    """Return the pack of one or more prompts and their completions, padded on the right.

    Args:
        prompt_ids: R lists of token ids, none empty: the first completion token is predicted by a prompt token.
        completion_ids: R lists of token ids.
        pad_id: token of the padding; may be a stop token, since masks come from lengths.
        minibatch: that the rows belong to.
        turn_ids: R lists, see `Rollout`; None: every completion is one turn.

    Raises:
        ValueError: a prompt is empty.
    """
    if not all(prompt_ids):
        row = [len(ids) for ids in prompt_ids].index(0)
        raise ValueError(f"the prompt of row {row} is empty; give it at least one token, such as the BOS token")
    input_ids, lengths = pad_ids([p + c for p, c in zip(prompt_ids, completion_ids, strict=True)], pad_id)
    completions, completion_lengths = pad_ids(completion_ids, pad_id)
    turns = None if turn_ids is None else pad_ids(turn_ids, -1)[0]
    has_token = length_mask(completion_lengths, completions.shape[1])
    return Pack(
        input_ids=input_ids,
        attention_mask=length_mask(lengths, input_ids.shape[1]).long(),
        prompt_lengths=lengths - completion_lengths,
        completion_ids=completions,
        completion_mask=has_token if turns is None else turns >= 0,
        minibatch=minibatch,
        turn_ids=turns,
    )


def pad_ids(ids: Sequence[list[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Return n lists of token ids as one tensor [n, longest], padded on the right, and their lengths [n]."""
    rows = [torch.tensor(row, dtype=torch.int64) for row in ids]
    return pad_sequence(rows, batch_first=True, padding_value=pad_id), torch.tensor([len(row) for row in rows])
