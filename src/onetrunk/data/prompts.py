"""Datasets become rows ready for sampling or fine-tuning: checked, put through the chat template, tokenized.

A prompt is a text or a conversation (a list of {"role", "content"} messages), and all prompts of a dataset have the
same form. All rows in memory are checked before anything runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import datasets
import pyarrow.compute
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from onetrunk.data.files import missing_columns
from onetrunk.data.rows import (
    TEMPLATE_COLUMNS,
    Rows,
    bad_row,
    check_rows,
    column_checks,
    is_conversational,
    prompt_fault,
    require_rows,
    row_fault,
    template_variables,
    variables_fault,
    without_nulls,
)
from onetrunk.data.sharded import ShardedRows
from onetrunk.types import Completion, Prompt, as_completion

logger = logging.getLogger(__name__)

# Columns that we add, and keywords that we pass to reward functions: a dataset's own column would be overwritten.
RESERVED_COLUMNS = (
    *("prompts", "prompt_ids", "completions", "completion_ids", "completion_stopped", "turn_ids"),
    *("trainer_state", "log_extra", "log_metric", "environments"),
)
OVERLONG = ("error", "drop", "truncate")
# What SFT learns from: the first kind whose columns a dataset has.
COMPLETION_KINDS = (("prompt", "completion"), ("messages",), ("text",))


class AllOverlong(ValueError):
    """No prompt is left where overlong ones are dropped."""

    def __init__(self, what: str, longest: int | None):
        super().__init__(
            f"{what} are longer than max_prompt_length {longest}; raise it, or set overlong_prompts to 'truncate'"
        )


def prepare_prompts(
    rows: Rows,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_prompt_length: int | None = None,
    overlong_prompts: Literal["error", "drop", "truncate"] = "error",
    chat_template_kwargs: dict[str, Any] | None = None,
    template_of: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    is_open: bool = False,
) -> Rows:
    """Check every prompt and add the column `prompt_ids`; all other columns are unchanged.

    A text gets the tokenizer's special tokens, but no second BOS token if it already begins with one. A conversation
    goes through the chat template and ends where the assistant starts to write; one whose last message is the
    assistant's is rejected, unless the template's variable continue_final_message is set. Of sharded rows a sample is
    checked now, and each row when it is read; a dropped one is replaced by the next one, so that every rollout has the
    same size.

    Args:
        max_prompt_length: in tokens; None for no limit, which sharded rows must have.
        overlong_prompts: "error" rejects a longer prompt, "drop" removes it, "truncate" keeps its last
            `max_prompt_length` tokens (the column `prompt` is unchanged).
        chat_template_kwargs: variables for the template; a row's columns `tools` and `chat_template_kwargs` go first.
        template_of: returns those of a row that go before both, such as the tools that its episode has.
        is_open: whether an environment completes the prompts, so that the user's text may be empty.
    """
    if overlong_prompts not in OVERLONG:
        raise ValueError(f"overlong_prompts must be one of {', '.join(OVERLONG)}, got {overlong_prompts!r}")
    if max_prompt_length is not None and max_prompt_length < 1:
        raise ValueError(f"max_prompt_length must be at least 1 token or None, got {max_prompt_length}")
    if isinstance(rows, ShardedRows) and max_prompt_length is None:
        raise ValueError(
            "the prompts are streamed, so the longest one is not known before training; set max_prompt_length"
        )
    _check_columns(rows)
    conversational = is_conversational(rows)
    if conversational and not tokenizer.chat_template:
        raise ValueError(
            "the prompts are conversations and the tokenizer has no chat template; set tokenizer.chat_template to a"
            " Jinja text, or give the prompts as text"
        )

    def encode(row: dict[str, Any]) -> list[int]:
        settings = {**(chat_template_kwargs or {}), **template_variables(row)}
        if template_of is not None:
            settings |= template_of(row)
        ids = encode_prompt(row["prompt"], tokenizer, conversational, settings, is_open)
        is_cut = max_prompt_length is not None and overlong_prompts == "truncate"
        return ids[-max_prompt_length:] if is_cut else ids

    add_ids = _add_streamed_ids if isinstance(rows, ShardedRows) else _add_ids
    return add_ids(rows, encode, max_prompt_length, overlong_prompts == "drop")


def _add_ids(
    rows: Dataset, encode: Callable[[dict[str, Any]], list[int]], longest: int | None, drops: bool
) -> Dataset:
    """Return rows with ids; those whose prompt is longer than `longest` are left out or raise ValueError."""

    def with_ids(row: dict[str, Any], index: int) -> dict[str, Any]:
        try:
            return {"prompt_ids": encode(row)}
        except ValueError as error:
            raise bad_row(index, str(error)) from error

    features = datasets.Features({**rows.features, "prompt_ids": datasets.List(datasets.Value("int64"))})
    # No cache: its key does not change with the functions that are called.
    settings = {"features": features, "load_from_cache_file": False, "desc": "prompts"}
    rows = rows.map(with_ids, with_indices=True, **settings)
    if longest is None:
        return rows
    lengths = pyarrow.compute.list_value_length(rows.data.column("prompt_ids")).to_pylist()
    overlong = sum(length > longest for length in lengths)
    if not overlong:
        return rows
    if not drops:
        raise ValueError(
            f"{overlong} of {len(rows)} prompts are longer than max_prompt_length {longest}, and the longest, row"
            f" {lengths.index(max(lengths))}, has {max(lengths)} tokens; raise it to that, or set overlong_prompts to"
            " 'drop' or 'truncate'"
        )
    if overlong == len(rows):
        raise AllOverlong(f"all {len(rows)} prompts", longest)
    logger.warning("dropped %d of %d prompts longer than %d tokens", overlong, len(rows), longest)
    return rows.filter(lambda row: len(row["prompt_ids"]) <= longest, load_from_cache_file=False)


def _add_streamed_ids(
    rows: ShardedRows, encode: Callable[[dict[str, Any]], list[int]], longest: int | None, drops: bool
) -> ShardedRows:
    def with_ids(row: dict[str, Any]) -> dict[str, Any] | None:
        ids = encode(row)
        is_overlong = longest is not None and len(ids) > longest
        if is_overlong and not drops:
            raise ValueError(f"prompt has {len(ids)} tokens where max_prompt_length is {longest}")
        return None if is_overlong else {**row, "prompt_ids": ids}

    rows = rows.then(with_ids, added=["prompt_ids"])
    if not len(rows.sample()):
        raise AllOverlong("all prompts of a sample of the rows", longest)
    return rows


def encode_prompt(
    prompt: Any,
    tokenizer: PreTrainedTokenizerBase,
    conversational: bool,
    template_kwargs: dict[str, Any],
    is_open: bool = False,
) -> list[int]:
    """Return the token ids of a prompt, which may lack the user's text if it `is_open`; ValueError: what is wrong."""
    if fault := prompt_fault(prompt, conversational, is_open):
        raise ValueError(f"prompt {fault}")
    is_answered = conversational and prompt[-1]["role"] == "assistant"
    if is_answered and not template_kwargs.get("continue_final_message"):
        raise ValueError(
            "prompt already ends in an answer: its last message is the assistant's; cut that turn off, or set"
            " chat_template_kwargs {continue_final_message: true} if completions are to continue it"
        )
    try:
        if isinstance(prompt, str):
            ids = without_second_bos(tokenizer(prompt)["input_ids"], tokenizer.bos_token_id)
        else:
            settings = {"add_generation_prompt": not is_answered, "tokenize": True, "return_dict": True}
            settings |= {**template_kwargs, "continue_final_message": is_answered}
            ids = tokenizer.apply_chat_template(without_nulls(prompt), **settings)["input_ids"]
    except Exception as error:  # A template may raise anything.
        raise ValueError(f"prompt is rejected by the tokenizer or its chat template: {error}") from error
    if not ids:
        raise ValueError("prompt becomes zero tokens")
    return ids


def check_prompts(rows: Dataset | ShardedRows, is_open: bool = False) -> None:
    """Check prompts as far as possible without a tokenizer; of sharded rows only a sample.

    Args:
        is_open: whether an environment says or completes the prompts.
    """
    if is_open and "prompt" not in rows.column_names:
        return require_rows(rows)
    _check_columns(rows)
    check = partial(prompt_fault, conversational=is_conversational(rows), is_open=is_open)
    check_rows(rows, partial(row_fault, {"prompt": check}))


def _check_columns(dataset: Dataset | ShardedRows) -> None:
    if "prompt" not in dataset.column_names:
        raise ValueError(
            f"the dataset has no column 'prompt', only {', '.join(dataset.column_names) or 'none'}; say which one it"
            " is: dataset_columns {prompt: yours} in a recipe, rename_column in Python"
        )
    reserved = [name for name in RESERVED_COLUMNS if name in dataset.column_names]
    if reserved:
        raise ValueError(
            f"the columns {', '.join(reserved)} have names that onetrunk uses itself; rename or remove them"
        )
    require_rows(dataset)


def completion_columns(dataset: Dataset | ShardedRows) -> list[str]:
    """Return the columns that SFT learns from: prompt and completion, or messages, or text."""
    kind = next((kind for kind in COMPLETION_KINDS if set(kind) <= set(dataset.column_names)), None)
    if kind is None:
        raise missing_columns(dataset.column_names, "prompt and completion, or messages, or text")
    return list(kind)


def check_completions(rows: Rows) -> Rows:
    """Return checked rows for supervised fine-tuning, with only the columns to learn from; see `check_rows`."""
    require_rows(rows)
    columns = completion_columns(rows)
    conversational = is_conversational(rows, columns[0])
    # Texts have no template, whatever tools a row also lists.
    variables = [name for name in TEMPLATE_COLUMNS if name in rows.column_names and conversational]
    if isinstance(rows, Dataset):
        variables = [name for name in variables if any(value is not None for value in rows[name])]
    checks = column_checks(conversational)

    def fault(row: dict[str, Any]) -> str | None:
        if "chat_template_kwargs" in variables and not isinstance(row["chat_template_kwargs"], dict):
            return "chat_template_kwargs is not a dict, and in other rows it is"
        return row_fault(checks, row) or variables_fault(row)

    return check_rows(rows.select_columns([*columns, *variables]), fault)


def without_written_bos(dataset: Dataset | ShardedRows, tokenizer: PreTrainedTokenizerBase) -> Dataset | ShardedRows:
    """Remove the BOS token from the beginning of texts if the tokenizer adds one anyway.

    TRL's SFTTrainer tokenizes by itself, and a text that begins with the BOS token would get a second one.
    """
    name, bos = "prompt" if "prompt" in dataset.column_names else "text", tokenizer.bos_token
    if not bos or tokenizer("a")["input_ids"][:1] != [tokenizer.bos_token_id] or name not in dataset.column_names:
        return dataset
    if isinstance(dataset, ShardedRows):
        is_text = isinstance(dataset[0][name], str)
        return dataset.then(lambda row: {**row, name: row[name].removeprefix(bos)}) if is_text else dataset
    texts = dataset[name]
    if not any(isinstance(text, str) and text.startswith(bos) for text in texts):
        return dataset
    return dataset.map(lambda row: {name: row[name].removeprefix(bos)}, load_from_cache_file=False, desc="BOS")


def decode_completion(
    tokenizer: PreTrainedTokenizerBase, completion_ids: list[int], stopped: bool, prompt: Prompt
) -> Completion:
    """Return a completion as reward functions read it: text, or one assistant message if the prompt is a conversation.

    Args:
        stopped: whether the last id is a stop token, which is removed even if the tokenizer does not list it among its
            special tokens.
    """
    ids = completion_ids[:-1] if stopped else completion_ids
    return as_completion(prompt, tokenizer.decode(ids, skip_special_tokens=True))


def without_second_bos(ids: list[int], bos_token_id: int | None) -> list[int]:
    """Return token ids without the second of two BOS tokens at the beginning.

    A text may already begin with the BOS token, for example after a chat template, and some tokenizers add another.
    """
    return ids[1:] if bos_token_id is not None and ids[:2] == [bos_token_id, bos_token_id] else ids
