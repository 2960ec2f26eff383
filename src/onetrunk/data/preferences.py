"""Preference rows: two completions of a prompt, and optionally how likely the first one is better.

A row has the columns `prompt`, `chosen` and `rejected`: texts, or conversations (the prompt a list of messages, the
others lists of messages that end with the assistant's). Optional columns are `chosen_stopped` and `rejected_stopped`
(False for a completion that was cut off at a length limit, which is read without an end token), `probability` (that
`chosen` is better, from 0 to 1) and `margin` (a finite number).
"""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any

import numpy as np
from datasets import Dataset

from onetrunk.data.rows import (
    completion_fault,
    conversation_fault,
    missing_columns,
    num_held_out,
    prompt_fault,
    raise_faults,
    require_rows,
    text_fault,
    type_fault,
)
from onetrunk.data.sharded import ShardedRows, checked_rows

SIDES = ("chosen", "rejected")
PAIR = ("prompt", *SIDES)
STOPPED = ("chosen_stopped", "rejected_stopped")


def validate_preferences(dataset: Dataset) -> bool:
    """Check every row of a dataset of preferences; return whether its prompts are conversations.

    Raises:
        ValueError: a column is missing, there are no rows, or some rows are bad.
    """
    _require_pair(dataset)
    require_rows(dataset)
    conversational = isinstance(dataset[0]["prompt"], list)
    raise_faults(_pair_fault(row, conversational) for row in dataset)
    return conversational


def checked_preferences(rows: ShardedRows) -> ShardedRows:
    """Return sharded rows of preferences, checked as they are read.

    Raises:
        ValueError: a column is missing, or a row of a sample is bad.
    """
    _require_pair(rows)
    conversational = isinstance(rows[0]["prompt"], list)
    return checked_rows(rows, lambda row: _pair_fault(row, conversational))


def _require_pair(dataset: Dataset | ShardedRows) -> None:
    missing = [name for name in PAIR if name not in dataset.column_names]
    if missing:
        raise missing_columns(dataset, f"prompt, chosen and rejected, and {', '.join(missing)} is missing")


def validate_sides(dataset: Dataset) -> None:
    """Check `chosen` and `rejected` of rows without a `prompt` column, whose sides both begin with the prompt.

    Raises:
        ValueError: some rows are bad.
    """
    conversational = len(dataset) > 0 and isinstance(dataset[0]["chosen"], list)
    raise_faults(_side_fault(row, conversational) for row in dataset)


def checked_sides(rows: ShardedRows) -> ShardedRows:
    """Return sharded rows without a `prompt` column, checked as by `validate_sides` when they are read."""
    conversational = isinstance(rows[0]["chosen"], list)
    return checked_rows(rows, lambda row: _side_fault(row, conversational))


def _side_fault(row: dict[str, Any], conversational: bool) -> str | None:
    check = conversation_fault if conversational else text_fault
    return next((f"{name} {fault}" for name in SIDES if (fault := check(row[name]))), None)


def stopped_column(dataset: Dataset, name: str) -> list[bool]:
    """Return the column `name`, which is False for completions that were cut off; all True without such a column."""
    return list(dataset[name]) if name in dataset.column_names else [True] * len(dataset)


def split_by_prompt(dataset: Dataset, eval_size: int | float, seed: int) -> tuple[Dataset, Dataset]:
    """Split a dataset at random into a training and an evaluation part, with all rows of a prompt in the same part.

    Args:
        dataset: both parts keep the order of its rows.
        eval_size: prompts to hold out, as an int, or as a share of the prompts between 0 and 1.
        seed: the same seed makes the same split.

    Raises:
        ValueError: one part would be empty.
    """
    # 16 bytes per row: the prompts themselves are not held.
    digests = b"".join(_prompt_digest(prompt) for prompt in dataset["prompt"])
    _, first, group = np.unique(np.frombuffer(digests, dtype="V16"), return_index=True, return_inverse=True)
    num_eval = num_held_out(eval_size, len(first), "different prompts")
    # Prompts are numbered by their first row.
    drawn = np.random.default_rng(seed).permutation(len(first))[:num_eval]
    is_held_out = np.zeros(len(first), dtype=bool)
    is_held_out[np.argsort(first)[drawn]] = True
    rows = is_held_out[group]
    return dataset.select(np.flatnonzero(~rows)), dataset.select(np.flatnonzero(rows))


def _prompt_digest(prompt: Any) -> bytes:
    return hashlib.sha256(json.dumps(prompt, sort_keys=True).encode()).digest()[:16]


def _pair_fault(row: dict[str, Any], conversational: bool) -> str | None:
    if fault := prompt_fault(row["prompt"], conversational):
        return f"prompt {fault}"
    for name in SIDES:
        if fault := completion_fault(row[name], conversational):
            return f"{name} {fault}"
    if row["chosen"] == row["rejected"]:
        return "chosen and rejected are identical: there is nothing to prefer"
    for name in STOPPED:
        if name in row and not isinstance(row[name], bool):
            return f"{name} is {row[name]!r}, expected true or false"
    for name in ("probability", "margin"):
        if name in row and (fault := _number_fault(row[name])):
            return f"{name} {fault}"
    if "probability" in row and not 0 <= row["probability"] <= 1:
        return f"probability is {row['probability']}, expected a number from 0 to 1"
    return None


def _number_fault(value: object) -> str | None:
    if fault := type_fault(value, (int, float), "a number"):
        return fault
    return None if math.isfinite(value) else f"is {value}, expected a finite number"
