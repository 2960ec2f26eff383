"""Checks of rows: which columns they have, and what each column may hold. The first bad row is named.

A row is a dict; prompts are texts or conversations (lists of {"role", "content"} messages), and all prompts of a
dataset have the same form. A preference row has the columns `prompt`, `chosen` and `rejected`; optional columns are
`chosen_stopped` and `rejected_stopped` (False for a completion that was cut off at a length limit, which is read
without an end token), `probability` (that `chosen` is better, from 0 to 1), `margin` (a finite number) and for
distillation `label` (true or false, or a probability that does not come from the teacher).
Each `*_fault` function returns what is wrong as a phrase that follows the column's name, or None.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
from datasets import Dataset

from onetrunk.data.files import missing_columns
from onetrunk.data.sharded import ShardedRows

Rows = TypeVar("Rows", bound=Dataset | ShardedRows)
Fault = Callable[[Any], str | None]

SIDES = ("chosen", "rejected")
PAIR = ("prompt", *SIDES)
STOPPED = ("chosen_stopped", "rejected_stopped")
# Columns that TRL passes to the chat template, and their forms.
TEMPLATE_COLUMNS = {"tools": list, "chat_template_kwargs": dict}
FIRST_ROWS = 100
ANSWERABLE_ROLES = ("user", "tool", "assistant")
# A chat template drops an unknown role or writes it as it is, so the model would learn a mistyped one.
ROLES = (
    *("system", "developer", "user", "assistant", "tool", "tool_response", "function", "ipython", "observation"),
    *("documents", "control", "thinking"),
)


def check_rows(rows: Rows, fault: Fault) -> Rows:
    """Return checked rows: a Dataset is checked now; of sharded rows a sample now, and each row when it is read."""
    require_rows(rows)
    if isinstance(rows, ShardedRows):
        rows = rows.then(partial(_checked, fault))
        rows.sample()
        return rows
    for index, row in enumerate(rows):
        if reason := fault(row):
            raise bad_row(index, reason)
    return rows


def _checked(fault: Fault, row: dict[str, Any]) -> dict[str, Any]:
    if reason := fault(row):
        raise ValueError(reason)
    return row


def bad_row(index: int, fault: str) -> ValueError:
    """Return the error for a row with a fault, named by its index."""
    return ValueError(f"row {index}: {fault}; repair or remove it, and check the rows after it")


def is_conversational(rows: Dataset | ShardedRows, column: str = "prompt") -> bool:
    """Return whether a column holds conversations, as its first value tells."""
    if isinstance(rows, ShardedRows):
        return isinstance(rows[0][column], list)
    return isinstance(next((value for value in rows[column] if value is not None), None), list)


def require_rows(dataset: Dataset | ShardedRows) -> None:
    """Raise ValueError if a dataset is empty."""
    if len(dataset) == 0:
        raise ValueError("the dataset holds no rows; give at least one")


def row_fault(checks: Mapping[str, Fault], row: Mapping[str, Any]) -> str | None:
    """Return the first fault of a row's columns; columns without a check may hold anything."""
    faults = ((name, check(row[name])) for name, check in checks.items() if name in row)
    return next((f"{name} {fault}" for name, fault in faults if fault), None)


def column_checks(conversational: bool) -> dict[str, Fault]:
    """Return the check of each column that means something in any dataset.

    Args:
        conversational: whether the first prompt is a conversation; all or none must be.
    """
    completion = completion_fault if conversational else text_fault
    return {
        "prompt": partial(prompt_fault, conversational=conversational),
        "completion": completion,
        "chosen": completion,
        "rejected": completion,
        "messages": messages_fault,
        "text": text_fault,
        "chosen_stopped": flag_fault,
        "rejected_stopped": flag_fault,
        "probability": probability_fault,
        "margin": number_fault,
    }


def type_fault(value: object, types: tuple[type, ...], expected: str) -> str | None:
    """Check the type of a value; a bool is not a number."""
    if value is None:
        return "is missing (null)"
    if isinstance(value, bool) or not isinstance(value, types):
        return f"is of type {type(value).__name__}, expected {expected}"
    return None


def text_fault(text: object) -> str | None:
    """Check a text, which must be a string that is not blank."""
    if fault := type_fault(text, (str,), "text"):
        return fault
    if "\0" in text:
        return f"holds a NUL character at position {text.index(chr(0))}"
    return None if text.strip() else "is empty or white space only"


def flag_fault(value: object) -> str | None:
    """Check a value that must be True or False."""
    return None if isinstance(value, bool) else f"is {value!r}, expected true or false"


def number_fault(value: object) -> str | None:
    """Check a finite number."""
    if fault := type_fault(value, (int, float), "a number"):
        return fault
    return None if math.isfinite(value) else f"is {value}, expected a finite number"


def probability_fault(value: object) -> str | None:
    """Check a number from 0 to 1."""
    if fault := number_fault(value):
        return fault
    return None if 0 <= value <= 1 else f"is {value}, expected a number from 0 to 1"


def label_fault(value: object) -> str | None:
    """Check a label of a pair: true, false, or the probability that `chosen` is better."""
    if isinstance(value, bool) or probability_fault(value) is None:
        return None
    given = "missing (null)" if value is None else f"{value!r:.60}"
    return (
        f"is {given}, expected true, false or the probability from 0 to 1 that chosen is better (rename a column that"
        " says something else)"
    )


def conversation_fault(messages: object, is_open: bool = False) -> str | None:
    """Check a conversation, which must be a list of messages, each with a known role and a text as content.

    Args:
        is_open: whether the text of the user is still to come, so that it may be empty.
    """
    if fault := type_fault(messages, (list,), "a list"):
        return fault
    if not messages:
        return "is a conversation without messages"
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return f"has a message {index} that is not a {{'role', 'content'}} dict with a text as role"
        role, content = message["role"], message.get("content")
        if role not in ROLES:
            return f"has a message {index} with the unknown role {role!r}, expected one of {', '.join(ROLES)}"
        if fault := calls_fault(message.get("tool_calls")):
            return f"has a message {index} ({role}) whose tool_calls {fault}"
        # A message with calls may say nothing: OpenAI writes null.
        may_be_empty = (
            content in (None, "")
            if message.get("tool_calls")
            else content == "" and (is_open if role == "user" else index < len(messages) - 1)
        )
        if (fault := text_fault(content)) and not may_be_empty:
            return f"has a message {index} ({role}) whose content {fault}"
    return None


def calls_fault(calls: object) -> str | None:
    """Check the tool calls of a message: null, or dicts with a name, or with a `function` that has one."""
    if calls is None:
        return None
    if isinstance(calls, list) and all(isinstance(call, dict) for call in calls):
        functions = [call.get("function") or call for call in calls]
        if all(isinstance(f, dict) and isinstance(f.get("name"), str) for f in functions):
            return None
    return "is not a list of calls, each with the name of its function"


def template_variables(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a row gives to its chat template, as for TRL: `tools`, also as JSON, and `chat_template_kwargs`."""
    variables = {}
    for name, form in TEMPLATE_COLUMNS.items():
        value = row.get(name)
        try:
            value = json.loads(value) if isinstance(value, str) else value
        except ValueError as error:
            raise ValueError(f"{name} is text and not JSON ({error})") from error
        if value is not None and not isinstance(value, form):
            raise ValueError(f"{name} is of type {type(value).__name__}, expected a {form.__name__}")
        variables |= {name: without_nulls(value)} if value and form is list else without_nulls(value or {})
    return variables


def without_nulls(value: Any) -> Any:
    """Return nested dicts without the keys that only other rows have: Arrow makes them null here."""
    if isinstance(value, dict):
        return {key: without_nulls(entry) for key, entry in value.items() if entry is not None}
    return [without_nulls(entry) for entry in value] if isinstance(value, list) else value


def variables_of(columns: Mapping[str, Sequence[Any]], number: int) -> list[dict[str, Any]]:
    """Return the `template_variables` of `number` rows, given as columns."""
    given = {name: columns[name] for name in TEMPLATE_COLUMNS if columns.get(name) is not None}
    return [template_variables({name: column[i] for name, column in given.items()}) for i in range(number)]


def variables_fault(row: Mapping[str, Any]) -> str | None:
    """Check the columns of a row that its chat template reads."""
    try:
        template_variables(row)
    except ValueError as error:
        return str(error)
    return None


def refuse_variables(rows: Dataset | ShardedRows, what: str) -> None:
    """Raise ValueError if rows (streamed: the first ones) have what `what` does not pass to the chat template."""
    read = rows if isinstance(rows, Dataset) else rows[:FIRST_ROWS]
    used = [name for name in TEMPLATE_COLUMNS if name in rows.column_names and any(read[name])]
    if used:
        raise ValueError(
            f"the rows have the column {used[0]}, which changes what the chat template writes, and {what} does not"
            " read it; remove the column"
        )


def messages_fault(messages: object) -> str | None:
    """Check a conversation to learn from."""
    fault = conversation_fault(messages)
    if fault is None and all(message["role"] != "assistant" for message in messages):
        fault = "has no message of the assistant to learn from"
    return fault


def prompt_fault(prompt: object, conversational: bool, is_open: bool = False) -> str | None:
    """Check a prompt: a text, or if `conversational` a conversation that can be answered; `is_open` as there."""
    if isinstance(prompt, str if conversational else list):
        forms = ("text", "a conversation") if conversational else ("a conversation", "text")
        return f"is {forms[0]} where the first row is {forms[1]}"
    if not conversational:
        return text_fault(prompt)
    fault = conversation_fault(prompt, is_open)
    if fault is None and prompt[-1]["role"] not in ANSWERABLE_ROLES:
        fault = f"ends with a {prompt[-1]['role']} message, expected one of {', '.join(ANSWERABLE_ROLES)}"
    return fault


def completion_fault(completion: object) -> str | None:
    """Check a completion of a conversation: a list of messages that ends with the assistant's."""
    fault = conversation_fault(completion)
    if fault is None and completion[-1]["role"] != "assistant":
        fault = f"ends with a {completion[-1]['role']} message, expected the assistant's"
    return fault


def check_preferences(rows: Rows) -> Rows:
    """Return checked rows of preferences; see `check_rows`."""
    missing = [name for name in PAIR if name not in rows.column_names]
    if missing:
        raise missing_columns(rows.column_names, f"prompt, chosen and rejected, and {', '.join(missing)} is missing")
    require_rows(rows)
    checks = column_checks(is_conversational(rows))
    checks = {name: checks[name] for name in (*PAIR, *STOPPED, "probability", "margin")}

    def fault(row: dict[str, Any]) -> str | None:
        if reason := row_fault(checks, row) or variables_fault(row):
            return reason
        is_same = row["chosen"] == row["rejected"]
        return "chosen and rejected are identical: there is nothing to prefer" if is_same else None

    return check_rows(rows, fault)


def check_labels(rows: Rows) -> Rows:
    """Return rows whose column `label`, if they have one, is checked; see `check_rows`."""
    if "label" not in rows.column_names:
        return rows
    fault = partial(row_fault, {"label": label_fault})
    if isinstance(rows, ShardedRows):
        return check_rows(rows, fault)
    check_rows(rows.select_columns(["label"]), fault)
    return rows


def stopped_column(dataset: Dataset, name: str) -> list[bool]:
    """Return the column `name`, which is False for completions that were cut off; all True without such a column."""
    return list(dataset[name]) if name in dataset.column_names else [True] * len(dataset)


def split_rows(dataset: Dataset, eval_size: int | float, seed: int) -> tuple[Dataset, Dataset]:
    """Split a dataset at random into a training and an evaluation part."""
    num_eval = num_held_out(eval_size, len(dataset), "rows")
    order = np.random.default_rng(seed).permutation(len(dataset))
    return dataset.select(np.sort(order[num_eval:])), dataset.select(np.sort(order[:num_eval]))


def split_by_prompt(dataset: Dataset, eval_size: int | float, seed: int) -> tuple[Dataset, Dataset]:
    """Split a dataset at random into a training and an evaluation part, with all rows of a prompt in the same part.

    Args:
        eval_size: prompts to hold out, as an int, or as a share of the prompts between 0 and 1.
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


def without_prompts_of(held_out: Dataset, rows: Dataset) -> tuple[Dataset, int]:
    """Return the rows whose prompts are not in `held_out`, and how many others there were."""
    kept_out = set(map(_prompt_digest, held_out["prompt"]))
    places = [place for place, prompt in enumerate(rows["prompt"]) if _prompt_digest(prompt) not in kept_out]
    return rows.select(places) if len(places) < len(rows) else rows, len(rows) - len(places)


def _prompt_digest(prompt: Any) -> bytes:
    return hashlib.sha256(json.dumps(prompt, sort_keys=True).encode()).digest()[:16]


def num_held_out(eval_size: int | float, count: int, unit: str) -> int:
    """Return how many of `count` items to hold out for evaluation."""
    is_share = isinstance(eval_size, float)
    number = max(1, round(eval_size * count)) if is_share else eval_size
    if (is_share and not 0 < eval_size < 1) or not 0 < number < count:
        raise ValueError(
            f"eval_size {eval_size} of {count} {unit} leaves one part empty; set a number from 1 to"
            f" {max(1, count - 1)}, or a share between 0 and 1"
        )
    return number
