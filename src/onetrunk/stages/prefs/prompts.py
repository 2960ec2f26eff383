"""The prompts of a run: read, checked, tokenized, without repetitions, and only those of the run's shard."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import datasets
from datasets import Dataset

from onetrunk.data.files import BUILDERS
from onetrunk.feedback.sampling import PromptItem, encoded
from onetrunk.feedback.shards import prompt_key
from onetrunk.models.sources import load_config
from onetrunk.ppo.setup import policy_tokenizer
from onetrunk.stages.arguments import ModelArguments
from onetrunk.stages.prefs.arguments import PrefsArguments
from onetrunk.stages.rows import load_dataset_rows, prompt_rows
from onetrunk.types import Prompt

# Rows of a stream that are checked and tokenized together.
WINDOW = 256


def check_rows(args: PrefsArguments) -> None:
    """Check every prompt without a tokenizer. The rows of a stream are checked when they are read.

    Raises:
        ValueError: a row is not a prompt.
    """
    if not args.streaming:
        prompt_rows(load_dataset_rows(args))


class PromptSource:
    """Iterates over the prompts of a run as items.

    Args:
        args: the dataset and the shard.
        model_args: the model, whose tokenizer and number of positions count.
        counts: of prompts and repeated_prompts.
        conversational: whether the prompts are conversations. For a stream known after the first rows.

    Raises:
        ValueError: a row is not a prompt, or a prompt leaves no room for a completion.
    """

    def __init__(self, args: PrefsArguments, model_args: ModelArguments):
        name, kwargs = model_args.model_name_or_path, model_args.init_kwargs()
        limit = getattr(load_config(name, kwargs.get("revision")), "max_position_embeddings", None)
        self.args, self.counts = args, Counter[str]()
        self.tokenizer = policy_tokenizer(name, None, kwargs)
        self.limit = None if limit is None else limit - args.max_completion_length
        self._rows: Dataset | None = None
        self._order: list[tuple[int, str]] = []
        # Also known for an empty shard, whose file has the columns of the others.
        self.conversational = False
        if not args.streaming:
            rows = load_dataset_rows(args)
            self._rows = self._encoded(rows.select_columns(["prompt"]) if "prompt" in rows.column_names else rows)
            self._order = list(self._selected(self._rows["prompt"], set()))

    @property
    def total(self) -> int | None:
        """The number of items; None for a stream."""
        return None if self.args.streaming else len(self._order)

    def __iter__(self) -> Iterator[PromptItem]:
        if self._rows is None:
            yield from self._streamed()
            return
        for index, key in self._order:
            row = self._rows[index]
            yield PromptItem(row["prompt"], key, row["prompt_ids"])

    def _streamed(self) -> Iterator[PromptItem]:
        seen: set[bytes] = set()
        stream, start = iter(stream_rows(self.args)), 0
        while window := list(islice(stream, WINDOW)):
            try:
                rows = self._encoded(Dataset.from_list(window))
            except ValueError as error:
                raise ValueError(f"rows {start} to {start + len(window) - 1} of the stream: {error}") from error
            for index, key in self._selected(rows["prompt"], seen):
                row = rows[index]
                yield PromptItem(row["prompt"], key, row["prompt_ids"])
            start += len(window)

    def _encoded(self, rows: Dataset) -> Dataset:
        args = self.args
        rows = encoded(
            rows,
            self.tokenizer,
            max_prompt_length=args.max_prompt_length,
            overlong_prompts=args.overlong_prompts,
            chat_template_kwargs=args.chat_template_kwargs,
        )
        self.conversational = not isinstance(rows[0]["prompt"], str)
        longest = max(map(len, rows["prompt_ids"]), default=0)
        if self.limit is not None and longest > self.limit:
            raise ValueError(
                f"the longest prompt has {longest} tokens, and max_completion_length {args.max_completion_length}"
                f" leaves room for {max(self.limit, 0)} of the model's positions; lower max_completion_length, or set"
                " max_prompt_length with overlong_prompts drop or truncate"
            )
        return rows

    def _selected(self, prompts: Iterable[Prompt], seen: set[bytes]) -> Iterator[tuple[int, str]]:
        """Yield index and key of each new prompt of this shard."""
        for index, prompt in enumerate(prompts):
            key = prompt_key(prompt)
            if not self.args.part.takes(key):
                continue
            short = bytes.fromhex(key)[:16]
            is_new = short not in seen
            seen.add(short)
            self.counts["prompts" if is_new else "repeated_prompts"] += 1
            if is_new:
                yield index, key


def stream_rows(args: PrefsArguments) -> Iterable[dict[str, Any]]:
    """Return an iterable over the rows of `dataset_name` that reads them only as needed.

    Raises:
        ValueError: the dataset, split or column does not exist.
    """
    suffix = os.path.splitext(args.dataset_name)[1]
    try:
        if suffix in BUILDERS:
            rows = datasets.load_dataset(
                BUILDERS[suffix], data_files={"train": args.dataset_name}, split=args.dataset_split, streaming=True
            )
        else:
            rows = datasets.load_dataset(
                args.dataset_name, args.dataset_config, split=args.dataset_split, streaming=True
            )
        first = next(iter(rows), None)
    except (datasets.exceptions.DatasetsError, ValueError, OSError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"{args.dataset_name} cannot be streamed as split {args.dataset_split!r}: {reason}"
        ) from error
    columns = args.dataset_columns or {}
    if first is not None and not set(columns.values()) <= set(first):
        raise ValueError(
            f"dataset_columns {json.dumps(columns)} names columns that the rows lack; they have {', '.join(first)}"
        )
    prompt = columns.get("prompt", "prompt")
    # Only the prompt: other columns may change their type from window to window.
    return ({"prompt": row[prompt]} if prompt in row else row for row in rows)
