"""Datasets become rows ready for sampling: checked row by row, put through the chat template, tokenized.

Knows tokenizers and the shape of prompts and completions. Knows no model, no reward and no trainer; reading from files
and the Hub is `dataset_files.py`, whose `load_rows` is a name of this module too.
A prompt is text or a conversation (a list of {"role", "content"} messages), and all prompts of a dataset are of one
kind. Every row is looked at before anything runs, and one error lists what is wrong with the first 20 bad rows.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Literal

import datasets
import numpy as np
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from onetrunk.data.files import load_rows
from onetrunk.data.rows import completion_fault, conversation_fault, prompt_fault, raise_faults, text_fault
from onetrunk.types import Message, Prompt

__all__ = [
    "RESERVED_COLUMNS",
    "decode_completion",
    "load_rows",
    "prepare_prompts",
    "split_rows",
    "validate_completions",
    "validate_prompts",
    "without_written_bos",
]

logger = logging.getLogger(__name__)

# Columns that we add, or keywords that reward functions receive from us: a dataset's own column would be overwritten.
RESERVED_COLUMNS = (
    "prompts",
    "prompt_ids",
    "prompt_fault",
    "completions",
    "completion_ids",
    "completion_stopped",
    "trainer_state",
    "log_extra",
    "log_metric",
)


@dataclass(frozen=True)
class _PromptEncoder:
    tokenizer: PreTrainedTokenizerBase
    conversational: bool
    chat_template: str | None
    chat_template_kwargs: dict[str, Any]
    max_length: int | None
    overlong: str

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        fault = prompt_fault(row["prompt"], self.conversational)
        ids: list[int] = []
        if fault is None:
            try:
                ids = self._encode(row["prompt"])
            except Exception as error:  # A template may raise anything.
                fault = f"is refused by the tokenizer or its chat template: {error}"
        if fault is None and not ids:
            fault = "becomes zero tokens"
        if self.max_length is not None and len(ids) > self.max_length:
            if self.overlong == "error":
                fault = f"has {len(ids)} tokens where max_prompt_length is {self.max_length}"
            elif self.overlong == "truncate":
                ids = ids[-self.max_length :]
        return {"prompt_ids": ids, "prompt_fault": fault}

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return without_second_bos(self.tokenizer(prompt)["input_ids"], self.tokenizer.bos_token_id)
        prefilled = prompt[-1]["role"] == "assistant"
        return self.tokenizer.apply_chat_template(
            prompt,
            chat_template=self.chat_template,
            add_generation_prompt=not prefilled,
            continue_final_message=prefilled,
            tokenize=True,
            return_dict=True,
            **self.chat_template_kwargs,
        )["input_ids"]


def prepare_prompts(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_prompt_length: int | None = None,
    overlong_prompts: Literal["error", "drop", "truncate"] = "error",
    chat_template: str | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> Dataset:
    """Check every prompt and add `prompt_ids`; `prompt` and all other columns stay as they are.

    Text gets the tokenizer's own special tokens, but no second BOS token if it already begins with one. A
    conversation goes through the chat template and ends where the assistant starts to write; if its last message is
    the assistant's, the completion continues that message.

    Args:
        max_prompt_length: tokens; None for no limit.
        overlong_prompts: "error" lists longer prompts among the bad rows, "drop" leaves them out, "truncate" keeps
            their last `max_prompt_length` tokens (the column `prompt` keeps the whole).
        chat_template: Jinja text instead of the tokenizer's own.
        chat_template_kwargs: more variables for the template.

    Raises:
        ValueError: a setting that cannot work, or bad rows: how many, and index and reason of the first 20.
    """
    if overlong_prompts not in ("error", "drop", "truncate"):
        raise ValueError(f"overlong_prompts must be 'error', 'drop' or 'truncate', got {overlong_prompts!r}")
    if max_prompt_length is not None and max_prompt_length < 1:
        raise ValueError(f"max_prompt_length must be at least 1 token or None, got {max_prompt_length}")
    _check_columns(dataset)
    first = next((prompt for prompt in dataset["prompt"] if prompt is not None), None)
    conversational = isinstance(first, list)
    if conversational and not (chat_template or tokenizer.chat_template):
        raise ValueError(
            "the prompts are conversations and the tokenizer has no chat template; set chat_template to a Jinja text, "
            "or tokenizer.chat_template, or give the prompts as text"
        )
    encoder = _PromptEncoder(
        tokenizer, conversational, chat_template, chat_template_kwargs or {}, max_prompt_length, overlong_prompts
    )
    features = datasets.Features(
        {
            **dataset.features,
            "prompt_ids": datasets.List(datasets.Value("int64")),
            "prompt_fault": datasets.Value("string"),
        }
    )
    # No cache: its key does not see changes of the functions that the encoder calls.
    rows = dataset.map(encoder, features=features, load_from_cache_file=False, desc="prompts")
    raise_faults([(i, f"prompt {fault}") for i, fault in enumerate(rows["prompt_fault"]) if fault], len(rows))
    rows = rows.remove_columns("prompt_fault")
    return _drop_overlong(rows, max_prompt_length) if overlong_prompts == "drop" and max_prompt_length else rows


def validate_prompts(dataset: Dataset) -> bool:
    """Check every prompt as far as no tokenizer is needed: columns, types, texts and messages.

    Returns:
        True where the prompts are conversations.

    Raises:
        ValueError: no column `prompt`, no rows, or bad rows: how many, and index and reason of the first 20.
    """
    _check_columns(dataset)
    prompts = dataset["prompt"]
    conversational = isinstance(next((prompt for prompt in prompts if prompt is not None), None), list)
    faults = [(index, prompt_fault(prompt, conversational)) for index, prompt in enumerate(prompts)]
    raise_faults([(index, f"prompt {fault}") for index, fault in faults if fault], len(dataset))
    return conversational


def _check_columns(dataset: Dataset) -> None:
    if "prompt" not in dataset.column_names:
        raise ValueError(
            f"the dataset has no column 'prompt', only {', '.join(dataset.column_names) or 'none'}; "
            "say which one it is: dataset_columns {prompt: yours} in a recipe, rename_column in Python"
        )
    reserved = [name for name in RESERVED_COLUMNS if name in dataset.column_names]
    if reserved:
        raise ValueError(
            f"the columns {', '.join(reserved)} have names that onetrunk uses itself; rename or remove them"
        )
    if len(dataset) == 0:
        raise ValueError("the dataset holds no rows; give at least one")


def _drop_overlong(rows: Dataset, max_prompt_length: int) -> Dataset:
    kept = [index for index, ids in enumerate(rows["prompt_ids"]) if len(ids) <= max_prompt_length]
    if not kept:
        raise ValueError(
            f"all {len(rows)} prompts are longer than max_prompt_length {max_prompt_length}; raise it, "
            "or set overlong_prompts to 'truncate'"
        )
    if len(kept) == len(rows):
        return rows
    logger.warning(
        "dropped %d of %d prompts longer than %d tokens", len(rows) - len(kept), len(rows), max_prompt_length
    )
    return rows.select(kept)


def validate_completions(dataset: Dataset) -> str:
    """Check every row of a dataset for supervised fine-tuning.

    Returns:
        Which columns hold the rows: "prompt" (with "completion"), "messages" or "text".

    Raises:
        ValueError: none of these columns, or bad rows: how many, and index and reason of the first 20.
    """
    names = set(dataset.column_names)
    kind = (
        "prompt" if {"prompt", "completion"} <= names else next((k for k in ("messages", "text") if k in names), None)
    )
    if kind is None:
        raise ValueError(
            f"the dataset has the columns {', '.join(sorted(names)) or 'none'}; expected prompt and completion, or "
            "messages, or text: say which yours are: dataset_columns {prompt: yours, completion: yours} in a recipe, "
            "rename_column in Python"
        )
    if len(dataset) == 0:
        raise ValueError("the dataset holds no rows; give at least one")
    conversational = kind == "prompt" and any(isinstance(prompt, list) for prompt in dataset[:1]["prompt"])
    faults = [(index, _completion_fault(row, kind, conversational)) for index, row in enumerate(dataset)]
    raise_faults([(index, fault) for index, fault in faults if fault], len(dataset))
    return kind


def _completion_fault(row: dict[str, Any], kind: str, conversational: bool) -> str | None:
    if kind == "text":
        fault = text_fault(row["text"])
        return f"text {fault}" if fault else None
    if kind == "messages":
        fault = conversation_fault(row["messages"])
        if fault is None and all(message["role"] != "assistant" for message in row["messages"]):
            fault = "has no message of the assistant to learn from"
        return f"messages {fault}" if fault else None
    fault = prompt_fault(row["prompt"], conversational)
    if fault:
        return f"prompt {fault}"
    fault = completion_fault(row["completion"], conversational)
    return f"completion {fault}" if fault else None


def without_written_bos(dataset: Dataset, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """Return rows for supervised fine-tuning whose texts do not begin with a BOS token that the tokenizer adds anyway.

    For a trainer that tokenizes on its own, TRL's: with the text's BOS there would be two.
    """
    name, bos = "prompt" if "prompt" in dataset.column_names else "text", tokenizer.bos_token
    texts = dataset[name] if name in dataset.column_names else []
    if not bos or tokenizer("a")["input_ids"][:1] != [tokenizer.bos_token_id]:
        return dataset
    if not any(isinstance(text, str) and text.startswith(bos) for text in texts):
        return dataset
    return dataset.map(lambda row: {name: row[name].removeprefix(bos)}, load_from_cache_file=False, desc="BOS")


def split_rows(dataset: Dataset, eval_size: int | float, seed: int) -> tuple[Dataset, Dataset]:
    """Split a dataset at random, the same way for the same seed; both parts keep the order of the rows.

    Args:
        eval_size: rows as an int, or a share between 0 and 1 as a float.

    Returns:
        The training part and the evaluation part, neither empty.
    """
    num_eval = max(1, round(eval_size * len(dataset))) if isinstance(eval_size, float) else eval_size
    if (isinstance(eval_size, float) and not 0 < eval_size < 1) or not 0 < num_eval < len(dataset):
        raise ValueError(
            f"eval_size {eval_size} of {len(dataset)} rows leaves one part empty; set a number of rows from 1 to "
            f"{len(dataset) - 1}, or a share between 0 and 1"
        )
    order = np.random.default_rng(seed).permutation(len(dataset))
    return dataset.select(np.sort(order[num_eval:])), dataset.select(np.sort(order[:num_eval]))


def decode_completion(
    tokenizer: PreTrainedTokenizerBase, completion_ids: list[int], stopped: bool, prompt: Prompt
) -> str | list[Message]:
    """Turn completion tokens into what reward functions read: text, or one assistant message after a conversation.

    Args:
        completion_ids: token ids; if `stopped`, the last one is the stop token.
        stopped: True drops that stop token even where the tokenizer does not count it among its special tokens.
        prompt: the prompt it answers; decides the form.
    """
    ids = completion_ids[:-1] if stopped else completion_ids
    text = tokenizer.decode(ids, skip_special_tokens=True)
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]


def without_second_bos(ids: list[int], bos_token_id: int | None) -> list[int]:
    """Return token ids that begin with at most one BOS token.

    A text that already contains the BOS token, because a chat template rendered it for example, gets a second one from
    tokenizers that add their own.
    """
    return ids[1:] if bos_token_id is not None and ids[:2] == [bos_token_id, bos_token_id] else ids
