"""What a run labels: prompts, with the model that answers them (or criticises answers), or rows with completions."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import torch
from datasets import Dataset
from peft import PeftModel
from torch import nn
from transformers import LogitsProcessor, LogitsProcessorList
from trl import get_quantization_config

from onetrunk.data.groups import Bad, Group, group_of, read_groups, shape_of
from onetrunk.data.names import BUILDERS, looks_like_path, missing_path
from onetrunk.feedback.asking import StopFlag
from onetrunk.feedback.ledger import Ledger
from onetrunk.feedback.sampling import PromptItem, TextSampler, encoded
from onetrunk.judges.judge import prompt_key
from onetrunk.models.base_model import load_base, repair_padding, stop_token_ids
from onetrunk.models.build import build_trunk
from onetrunk.models.loading import base_fingerprint, is_adapter, load_config
from onetrunk.ppo.setup import policy_tokenizer, tokens_of
from onetrunk.rollouts.base import RolloutBackend, SamplingParams
from onetrunk.rollouts.local import LocalBackend
from onetrunk.rollouts.vllm import ServedModel, VLLMBackend, load_servers
from onetrunk.stages.arguments import ModelArguments
from onetrunk.stages.prefs.arguments import PrefsArguments
from onetrunk.stages.rows import load_dataset_rows, prompt_rows
from onetrunk.types import Prompt, SampledText
from onetrunk.utils.files import digest

logger = logging.getLogger(__name__)

# Rows of a stream that are checked and tokenized together.
WINDOW = 256


def load_sampler(
    name: str,
    args: PrefsArguments,
    model_args: ModelArguments,
    ledger: Ledger | None,
    max_length: int,
    stop: StopFlag | None = None,
    served: Served | None = None,
) -> TextSampler:
    """Load the model or adapter at `name` as a sampler of completions of at most `max_length` tokens.

    Args:
        name, args, model_args: folder or Hub name, and the settings of the run.
        ledger: keeps the completions; None: the sampler only draws.
        max_length: longest completion, tokens.
        stop: checked after every token; sampling ends with its exception.
        served: the vLLM servers that sample, if they have the model's base; None: this process samples.
    """
    kwargs = model_args.init_kwargs()
    if name != model_args.model_name_or_path:
        kwargs.pop("revision", None)  # It belongs to the policy, and this is a critic.
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
        top_p=args.top_p,
        top_k=args.top_k,
    )
    identity = _identity(model)
    positions = getattr(base.config.get_text_config(), "max_position_embeddings", None)
    if served is not None and served.takes(name, identity["base"]):
        backend: RolloutBackend = served.publish(model)
        identity["sampler"] = "vLLM"
        positions = min((n for n in (positions, backend.max_length) if n is not None), default=None)
    else:
        checks = LogitsProcessorList([StopCheck(stop)]) if stop is not None else None
        model = model.to(policy_device(args.use_cpu))
        backend = LocalBackend(model, max_rows=args.max_rollout_rows, logits_processor=checks)
    return TextSampler(
        backend=backend,
        tokenizer=tokenizer,
        params=params,
        identity=identity,
        seed=args.seed,
        ledger=ledger,
        chat_template_kwargs=args.chat_template_kwargs or {},
        max_positions=positions,
    )


@dataclass
class Served:
    """The vLLM servers of a run, and the models that it has published there: the policy first, then a critic.

    Args:
        servers: checked; their base is that of the first model, which is proved when it is published.
        longest_row: most tokens of a prompt and its completion; 0 if that is not known yet.
        base: fingerprint of the base; None before the first model.
    """

    servers: VLLMBackend
    longest_row: int
    base: str | None = None
    num_models: int = 0

    def takes(self, name: str, base: str) -> bool:
        """Return whether a model on a base with this fingerprint can be sampled on the servers; warn if not."""
        if self.base is None or self.base == base:
            self.base = base
            return True
        logger.warning("the servers have another base model than %s: it samples in this process", name)
        return False

    def publish(self, model: nn.Module) -> ServedModel:
        """Return the backend of a model, under a version of its own; the model is not needed any more."""
        self.servers.check_policy(model, self.longest_row)
        self.num_models += 1
        return ServedModel.publish(self.servers, model, self.num_models)


@contextlib.contextmanager
def sampling_servers(args: PrefsArguments, source: Source, stop: StopFlag) -> Iterator[Served | None]:
    """Yield the servers of a run, checked, and unload what was published there at the end; None without `use_vllm`.

    `stop` is checked twice a second while the servers sample.
    """
    if not args.use_vllm:
        yield None
        return
    servers = load_servers(args, roles=("policy",), poll=stop.check)
    try:
        servers.check()
        longest_prompt = source.longest_prompt
        yield Served(servers, longest_prompt and longest_prompt + args.max_completion_length)
    finally:
        servers.close()


def policy_device(use_cpu: bool) -> torch.device:
    """Return the accelerator of this process; the CPU if there is none or `use_cpu` is set."""
    accelerator = None if use_cpu else torch.accelerator.current_accelerator(check_available=True)
    return accelerator or torch.device("cpu")


class StopCheck(LogitsProcessor):
    """Leaves the logits unchanged, and raises after the next token once the flag is set."""

    def __init__(self, stop: StopFlag):
        self.stop = stop

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        self.stop.check()
        return scores


@torch.no_grad()
def _identity(model: nn.Module) -> dict[str, str | None]:
    """Return fingerprints of a model's base and of the adapter that samples, if there is one."""
    if not isinstance(model, PeftModel):
        return {"base": base_fingerprint(model), "adapter": None}
    adapter = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        if ".lora_" in name and ".default" in name:
            adapter.update(f"{name} {list(parameter.shape)}".encode())
            adapter.update(parameter.detach().float().cpu().contiguous().numpy().tobytes())
    return {"base": base_fingerprint(model.get_base_model()), "adapter": adapter.hexdigest()[:16]}


def positions_left(sampler: TextSampler) -> int | None:
    """Return the longest prompt of this sampler in tokens; None if its model has no limit."""
    return None if sampler.max_positions is None else sampler.max_positions - sampler.params.max_completion_length


class Source(ABC):
    """Iterates over the items of a run's shard, each once.

    Args:
        args: of the run.

    Attributes:
        counts: items, and repeated ones that were left out.
        total: number of items; None if it is not known.
        conversational: whether prompts are conversations; for a stream it is known after the first rows, for an empty
            shard too, whose file has the columns of the others.
    """

    total: int | None = None
    conversational = False
    longest_prompt = 0

    def __init__(self, args: PrefsArguments):
        self.args, self.counts = args, Counter[str]()

    @abstractmethod
    def __iter__(self) -> Iterator[PromptItem]: ...

    def _is_new(self, key: str, seen: set[bytes]) -> bool:
        """Count an item; return whether it comes for the first time."""
        entry = bytes.fromhex(key)
        is_new = entry not in seen
        seen.add(entry)
        self.counts["prompts" if is_new else "repeated_prompts"] += 1
        return is_new


def open_source(args: PrefsArguments, model_args: ModelArguments) -> Source:
    return GivenSource(args) if args.completions == "given" else PromptSource(args, model_args)


class PromptSource(Source):
    """The prompts that a model answers.

    Raises:
        ValueError: a row is not a prompt, or a prompt leaves no room for a completion.
    """

    def __init__(self, args: PrefsArguments, model_args: ModelArguments):
        super().__init__(args)
        rows = None if args.streaming else prompt_rows(load_dataset_rows(args))
        if rows is None:
            open_stream(args)  # Raises if there is none.
        name, kwargs = model_args.model_name_or_path, model_args.init_kwargs()
        limit = getattr(load_config(name, kwargs.get("revision")), "max_position_embeddings", None)
        self.tokenizer = policy_tokenizer(name, None, kwargs)
        self.limit = None if limit is None else limit - args.max_completion_length
        self.longest_prompt = args.max_prompt_length or 0
        self._rows: Dataset | None = None
        if rows is not None:
            self._rows = self._encoded(rows.select_columns(["prompt"]))
            self._order = list(self._selected(self._rows["prompt"], set()))
            self.total = len(self._order)
            self.longest_prompt = max((len(self._rows[i]["prompt_ids"]) for i, _ in self._order), default=0)

    def __iter__(self) -> Iterator[PromptItem]:
        if self._rows is None:
            yield from self._streamed()
            return
        for index, key in self._order:
            row = self._rows[index]
            yield PromptItem(row["prompt"], key, row["prompt_ids"])

    def _streamed(self) -> Iterator[PromptItem]:
        # Only the prompt: other columns may change their type from window to window.
        stream = ({"prompt": row["prompt"]} if "prompt" in row else row for row in open_stream(self.args))
        start = 0
        seen: set[bytes] = set()
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
            if self.args.part.takes(key) and self._is_new(key, seen):
                yield index, key


@dataclass(frozen=True)
class GivenItem(PromptItem):
    """A prompt with its completions. Its key is of prompt and completions: a prompt may stand in several rows."""

    group: Group

    def texts(self) -> list[SampledText]:
        """Return the completions."""
        return [SampledText(text, self.group.is_whole(index)) for index, text in enumerate(self.group.texts)]


class GivenSource(Source):
    """The prompts of rows that bring their completions: pairs, groups of several models, or logged conversations.

    A prompt belongs to a shard by its content, as when it is sampled. Rows are read as they are needed and not held;
    logs are grouped by their prompt first, which holds them.

    Raises:
        ValueError: no known shape, bad rows, or texts and conversations mixed. Of a stream they are found while it
            is read.
    """

    def __init__(self, args: PrefsArguments):
        super().__init__(args)
        self._rows: Dataset | None = None if args.streaming else load_dataset_rows(args)
        for group in self._groups():
            self.conversational = isinstance(group.prompt, list)
            if self._rows is None:
                break
            # All rows are checked before a judge is asked.
            self.total = (self.total or 0) + args.part.takes(prompt_key(group.prompt))

    def __iter__(self) -> Iterator[GivenItem]:
        seen: set[bytes] = set()
        for group in self._groups():
            key = digest([group.prompt, list(group.texts)])
            if self.args.part.takes(prompt_key(group.prompt)) and self._is_new(key, seen):
                yield GivenItem(group.prompt, key, [], group)

    def _groups(self) -> Iterator[Group]:
        conversational = None
        for number, group in enumerate(self._read()):
            is_list = isinstance(group.prompt, list)
            if conversational is None:
                conversational = is_list
            elif conversational is not is_list:
                raise ValueError(
                    f"the prompt of group {number} is {'a conversation' if is_list else 'text'}, and that of the first"
                    " is not; give rows of one form, because trainers take only those"
                )
            yield group

    def _read(self) -> Iterator[Group]:
        if self._rows is not None:
            return read_groups(self._rows, self._rows.column_names)
        return streamed_groups(open_stream(self.args))


def streamed_groups(rows: Iterable[dict[str, Any]]) -> Iterator[Group]:
    """Yield the groups of a stream; the first bad row ends it with ValueError.

    Logs are rejected, because rows of one prompt may be anywhere in the stream.
    """
    shape = None
    for number, row in enumerate(rows):
        shape = shape or shape_of(row, row)
        if shape == "logs":
            raise ValueError(
                "streaming reads each row once, and the completions of one prompt stand in several rows; leave"
                " streaming out, or give groups: prompt and completions"
            )
        try:
            yield group_of(row, shape)
        except Bad as bad:
            raise ValueError(f"row {number} of the stream cannot be used: {bad}; repair or remove it") from bad


def open_stream(args: PrefsArguments) -> Iterable[dict[str, Any]]:
    """Return an iterable over the rows of `dataset_name`, with our names of the columns; rows are read as needed.

    Raises:
        ValueError, FileNotFoundError: the dataset, split or column does not exist.
    """
    name = args.dataset_name
    if looks_like_path(name) and not set(name) & set("*:") and not Path(name).expanduser().exists():
        raise missing_path(name)
    builder = BUILDERS.get(Path(name).suffix)
    source: dict[str, Any] = {"path": name, "name": args.dataset_config}
    if builder is not None:
        source = {"path": builder, "data_files": {"train": args.dataset_name}}
    try:
        rows = datasets.load_dataset(**source, split=args.dataset_split, streaming=True)
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
    ours = {theirs: name for name, theirs in columns.items()}
    return ({ours.get(name, name): value for name, value in row.items()} for row in rows)
