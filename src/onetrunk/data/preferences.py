"""Preference rows: two completions of a prompt, and optionally how likely the first one is better.

A row has the columns `prompt`, `chosen` and `rejected`: texts, or conversations (the prompt a list of messages, the
others lists of messages that end with the assistant's). Optional columns are `chosen_stopped` and `rejected_stopped`
(False for a completion that was cut off at a length limit, which is read without an end token), `probability` (that
`chosen` is better, from 0 to 1) and `margin` (a finite number).
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
from datasets import Dataset

from onetrunk.data.rows import (
    Rows,
    check_rows,
    column_checks,
    conversation_fault,
    is_conversational,
    missing_columns,
    num_held_out,
    require_rows,
    row_fault,
    text_fault,
)

SIDES = ("chosen", "rejected")
PAIR = ("prompt", *SIDES)
STOPPED = ("chosen_stopped", "rejected_stopped")


def check_preferences(rows: Rows) -> Rows:
    """Return checked rows of preferences; see `check_rows`.

    Raises:
        ValueError: a column is missing, there are no rows, or one is bad.
    """
    missing = [name for name in PAIR if name not in rows.column_names]
    if missing:
        raise missing_columns(rows, f"prompt, chosen and rejected, and {', '.join(missing)} is missing")
    require_rows(rows)
    checks = column_checks(is_conversational(rows))
    checks = {name: checks[name] for name in (*PAIR, *STOPPED, "probability", "margin")}

    def fault(row: dict[str, Any]) -> str | None:
        if reason := row_fault(checks, row):
            return reason
        is_same = row["chosen"] == row["rejected"]
        return "chosen and rejected are identical: there is nothing to prefer" if is_same else None

    return check_rows(rows, fault)


def check_sides(rows: Rows) -> Rows:
    """Return rows without a `prompt` column, whose sides both begin with the prompt, with their sides checked.

    Raises:
        ValueError: there are no rows, or one is bad.
    """
    require_rows(rows)
    check = conversation_fault if is_conversational(rows, "chosen") else text_fault
    return check_rows(rows, lambda row: row_fault(dict.fromkeys(SIDES, check), row))


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
