"""The parts of a run of `onetrunk prefs`: the policy that samples, and the prompts that it is given.

Knows arguments, models and rows; no judge and no output.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

import datasets
import torch
from datasets import Dataset
from peft import PeftModel
from torch import nn
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedTokenizerBase

from onetrunk.data.files import BUILDERS
from onetrunk.feedback.ledger import Ledger
from onetrunk.feedback.overlap import StopFlag
from onetrunk.feedback.sampling import PromptItem, TextSampler, encoded
from onetrunk.feedback.shards import prompt_key
from onetrunk.models.base import load_base, repair_padding, stop_token_ids
from onetrunk.models.build import build_trunk
from onetrunk.models.sources import base_fingerprint, is_adapter, load_config
from onetrunk.ppo.setup import policy_tokenizer, tokens_of
from onetrunk.rollouts.base import SamplingParams
from onetrunk.rollouts.local import LocalBackend
from onetrunk.stages.arguments import ModelArguments
from onetrunk.stages.prefs.arguments import PrefsArguments
from onetrunk.stages.rows import load_dataset_rows, prompt_rows

# Rows of a stream that are checked and tokenized together.
WINDOW = 256


def check_one_process() -> None:
    """Refuse a launcher that starts several processes: each would sample every prompt.

    Raises:
        ValueError: names the way to use several devices.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(
            f"prefs runs in one process, and a launcher has started {os.environ['WORLD_SIZE']}; start one command per"
            " device, each with its own shard (--shard 0/2, --shard 1/2)"
        )


def policy_device(use_cpu: bool) -> torch.device:
    """Return the accelerator of this process, or the CPU where there is none or `use_cpu` says so."""
    accelerator = None if use_cpu else torch.accelerator.current_accelerator(check_available=True)
    return accelerator or torch.device("cpu")


def load_sampler(
    name: str,
    args: PrefsArguments,
    model_args: ModelArguments,
    ledger: Ledger | None,
    max_length: int,
    stop: StopFlag | None = None,
) -> TextSampler:
    """Return a sampler of the model or adapter at `name`.

    Args:
        ledger: of the completions.
        max_length: longest text that it samples, tokens.
        stop: looked at after every token; once it is set, sampling ends by its exception.
    """
    from trl import get_quantization_config

    kwargs = model_args.init_kwargs()
    if name != model_args.model_name_or_path:
        kwargs.pop("revision", None)  # Of the policy, not of a critic.
    tokenizer = policy_tokenizer(name, None, kwargs)
    quantization = get_quantization_config(model_args)
    if is_adapter(name, kwargs.get("revision")):
        model: nn.Module = build_trunk(name, quantization_config=quantization, model_init_kwargs=kwargs)
    else:
        model = load_base(name, quantization_config=quantization, **kwargs)
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    repair_padding(tokenizer, base.config)
    stops = {*stop_token_ids(tokenizer, base.generation_config), *tokens_of(args.stop_tokens or [], tokenizer)}
    params = SamplingParams(
        max_completion_length=max_length,
        temperature=args.temperature,
        stop_token_ids=tuple(sorted(stops)),
        pad_token_id=tokenizer.pad_token_id,
    )
    checks = LogitsProcessorList([StopCheck(stop)]) if stop is not None else None
    model = model.to(policy_device(args.use_cpu))
    return TextSampler(
        backend=LocalBackend(model, max_rows=args.max_rollout_rows, logits_processor=checks),
        tokenizer=tokenizer,
        params=params,
        identity=model_identity(model),
        seed=args.seed,
        ledger=ledger,
        chat_template_kwargs=args.chat_template_kwargs or {},
    )


class StopCheck(LogitsProcessor):
    """Changes no logits, and ends sampling within a token of the flag: an interrupted run ends at once.

    Args:
        stop: the flag.
    """

    def __init__(self, stop: StopFlag):
        self.stop = stop

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        self.stop.check()
        return scores


@torch.no_grad()
def model_identity(model: nn.Module) -> dict[str, Any]:
    """Return fingerprints of a model's base and, where it has one, of the adapter that samples."""
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    adapter = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()) if isinstance(model, PeftModel) else []:
        if ".lora_" in name and ".default" in name:
            adapter.update(f"{name} {list(parameter.shape)}".encode())
            adapter.update(parameter.detach().float().cpu().contiguous().numpy().tobytes())
    fingerprint = adapter.hexdigest()[:16] if isinstance(model, PeftModel) else None
    return {"base": base_fingerprint(base), "adapter": fingerprint}


def positions_left(sampler: TextSampler) -> int | None:
    """Return how many tokens a prompt of this sampler may have, None where its model has no limit."""
    limit = getattr(sampler.backend.model.config.get_text_config(), "max_position_embeddings", None)
    return None if limit is None else limit - sampler.params.max_completion_length


def check_rows(args: PrefsArguments) -> None:
    """Check every prompt as far as no tokenizer is needed; those of a stream are checked as they come.

    Raises:
        ValueError: bad rows.
    """
    if not args.streaming:
        prompt_rows(load_dataset_rows(args))


def tokenizer_and_room(args: PrefsArguments, model_args: ModelArguments) -> tuple[PreTrainedTokenizerBase, int | None]:
    """Return the policy's tokenizer, and how many tokens a prompt may have, before the model is loaded."""
    name, kwargs = model_args.model_name_or_path, model_args.init_kwargs()
    limit = getattr(load_config(name, kwargs.get("revision")), "max_position_embeddings", None)
    return policy_tokenizer(name, None, kwargs), None if limit is None else limit - args.max_completion_length


class PromptSource:
    """The prompts of a run as items: checked, tokenized, each content once, those of one shard alone.

    Args:
        args: which dataset, which shard.
        tokenizer: renders them.
        limit: tokens that a prompt may have; None: the model has no limit.

    Raises:
        ValueError: rows that are no prompts, or no room for a completion after one.
    """

    def __init__(self, args: PrefsArguments, tokenizer: PreTrainedTokenizerBase, limit: int | None):
        self.args, self.counts = args, Counter()
        self.tokenizer, self.limit = tokenizer, limit
        self._rows: Dataset | None = None
        self._order: list[tuple[int, str]] = []
        # Known also where a shard is empty: its file has the columns of the others.
        self.conversational = False
        if not args.streaming:
            rows = load_dataset_rows(args)
            self._rows = self._checked(rows.select_columns(["prompt"]) if "prompt" in rows.column_names else rows)
            self._order = [(row, key) for row, (_, key) in enumerate(self._keyed(self._rows["prompt"])) if key]

    def count_into(self, counts: Counter[str]) -> None:
        """Count prompts and repeated_prompts there, those that were read already too.

        Args:
            counts: of the run.
        """
        counts.update(self.counts)
        self.counts = counts

    @property
    def total(self) -> int | None:
        """How many items there are; None for a stream."""
        return None if self.args.streaming else len(self._order)

    def __iter__(self) -> Iterator[PromptItem]:
        if self._rows is None:
            yield from self._streamed()
            return
        for row, key in self._order:
            entry = self._rows[row]
            yield PromptItem(entry["prompt"], key, entry["prompt_ids"])

    def _streamed(self) -> Iterator[PromptItem]:
        seen: set[bytes] = set()
        rows, start = iter(stream_rows(self.args)), 0
        while window := list(islice(rows, WINDOW)):
            try:
                checked = self._checked(Dataset.from_list(window))
            except ValueError as error:
                raise ValueError(f"rows {start} to {start + len(window) - 1} of the stream: {error}") from error
            for entry, (prompt, key) in zip(checked, self._keyed(checked["prompt"], seen), strict=True):
                if key:
                    yield PromptItem(prompt, key, entry["prompt_ids"])
            start += len(window)

    def _checked(self, rows: Dataset) -> Dataset:
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

    def _keyed(self, prompts: Any, seen: set[bytes] | None = None) -> Iterator[tuple[Any, str | None]]:
        """Yield each prompt with its key; with None where it is a repetition or another shard's."""
        seen = set() if seen is None else seen
        for prompt in prompts:
            key = prompt_key(prompt)
            short = bytes.fromhex(key)[:16]
            is_ours, is_new = self.args.part.takes(key), short not in seen
            if is_ours:
                seen.add(short)
                self.counts["prompts" if is_new else "repeated_prompts"] += 1
            yield prompt, key if is_ours and is_new else None


def stream_rows(args: PrefsArguments) -> Any:
    """Return an iterable over the rows of `dataset_name`, which is read no further than it is asked.

    Raises:
        ValueError: there is no such dataset, split or column.
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
    missing = [name for name in columns.values() if first is not None and name not in first]
    if missing:
        raise ValueError(
            f"dataset_columns {json.dumps(columns)} names columns that the rows lack; they have {', '.join(first)}"
        )
    theirs = columns.get("prompt", "prompt")
    # The prompt alone: other columns may have another type in every window.
    return ({"prompt": row[theirs]} if theirs in row else row for row in rows)
