"""What `onetrunk prefs` labels: prompts, with the model that answers them, or rows with completions.

The model samples in this process or on vLLM servers.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from datasets import Dataset
from peft import PeftModel
from torch import nn
from trl import get_quantization_config

from onetrunk.data.pairs import Group, read_groups, shape_of
from onetrunk.data.prompts import AllOverlong
from onetrunk.data.rows import refuse_variables
from onetrunk.data.sharded import ShardedRows
from onetrunk.feedback.asking import StopFlag
from onetrunk.feedback.sampling import PromptItem, TextSampler, encoded
from onetrunk.judges.judge import prompt_key
from onetrunk.models.base_model import load_base, repair_padding, stop_token_ids
from onetrunk.models.build import build_trunk
from onetrunk.models.loading import base_fingerprint, is_adapter, load_config
from onetrunk.ppo.setup import policy_tokenizer, tokens_of
from onetrunk.rollouts.base import RolloutBackend, SamplingParams
from onetrunk.rollouts.local import LocalBackend
from onetrunk.rollouts.vllm import VLLMBackend, load_servers
from onetrunk.stages.arguments import ModelArguments
from onetrunk.stages.prefs.arguments import PrefsArguments
from onetrunk.stages.rows import load_dataset_rows, prompt_rows, stream_dataset_rows
from onetrunk.types import Prompt, SampledText
from onetrunk.utils.files import digest
from onetrunk.utils.ledger import Ledger

logger = logging.getLogger(__name__)

# Rows of a stream that are checked and tokenized together.
WINDOW = 256


def load_sampler(
    args: PrefsArguments,
    model_args: ModelArguments,
    ledger: Ledger,
    stop: StopFlag,
    servers: VLLMBackend | None,
    longest_prompt: int,
) -> TextSampler:
    """Load the model or adapter of a run as a sampler of its completions.

    Args:
        ledger: keeps the completions.
        stop: checked before every token; sampling ends with its exception.
        servers: the vLLM servers that sample; None: this process does.
        longest_prompt: tokens, which the servers must have room for; 0: not known.
    """
    name, kwargs = model_args.model_name_or_path, model_args.init_kwargs()
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
        max_completion_length=args.max_completion_length,
        temperature=args.temperature,
        stop_token_ids=tuple(sorted(stops)),
        pad_token_id=tokenizer.pad_token_id,
        top_p=args.top_p,
        top_k=args.top_k,
    )
    identity = _identity(model)
    positions = getattr(base.config.get_text_config(), "max_position_embeddings", None)
    if servers is not None:
        servers.check_policy(model, longest_prompt and longest_prompt + args.max_completion_length)
        servers.sync(model, 1)
        backend: RolloutBackend = servers
        identity["sampler"] = "vLLM"
        positions = min((n for n in (positions, servers.max_length) if n is not None), default=None)
    else:
        device = policy_device(args.use_cpu)
        backend = LocalBackend(model.to(device), max_rows=args.max_rollout_rows, poll=stop.check)
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


@contextlib.contextmanager
def sampling_servers(args: PrefsArguments, stop: StopFlag) -> Iterator[VLLMBackend | None]:
    """Yield the servers of a run, checked, and unload what was published there at the end; None without `use_vllm`.

    `stop` is checked twice a second while the servers sample.
    """
    if not args.use_vllm:
        yield None
        return
    with contextlib.closing(load_servers(args, roles=("policy",), poll=stop.check)) as servers:
        servers.check()
        yield servers


def policy_device(use_cpu: bool) -> torch.device:
    """Return the accelerator of this process; the CPU without one, or with `use_cpu`."""
    accelerator = None if use_cpu else torch.accelerator.current_accelerator(check_available=True)
    return accelerator or torch.device("cpu")


@torch.no_grad()
def _identity(model: nn.Module) -> dict[str, str | None]:
    """Return fingerprints of a model's base and of the adapter that samples, if it has one."""
    if not isinstance(model, PeftModel):
        return {"base": base_fingerprint(model), "adapter": None}
    adapter = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        if ".lora_" in name and ".default" in name:
            adapter.update(f"{name} {list(parameter.shape)}".encode())
            adapter.update(parameter.detach().float().cpu().contiguous().numpy().tobytes())
    return {"base": base_fingerprint(model.get_base_model()), "adapter": adapter.hexdigest()[:16]}


class Source(ABC):
    """Iterates over the items of a run's shard, each once.

    Attributes:
        counts: items, and repeated ones that were left out.
        total: number of items; None if it is not known.
    """

    total: int | None = None
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
        name, kwargs = model_args.model_name_or_path, model_args.init_kwargs()
        rows = prompt_rows(load_source_rows(args))
        limit = getattr(load_config(name, kwargs.get("revision")), "max_position_embeddings", None)
        self.tokenizer = policy_tokenizer(name, None, kwargs)
        self.limit = None if limit is None else limit - args.max_completion_length
        self.longest_prompt = args.max_prompt_length or 0
        self._rows = rows.select_columns(["prompt"])
        self._order: list[tuple[int, str]] | None = None
        if isinstance(rows, Dataset):
            self._rows = self._encoded(self._rows)
            self._order = list(islice(self._selected(self._rows["prompt"], set()), args.limit))
            self.total = len(self._order)
            self.longest_prompt = max((len(self._rows[i]["prompt_ids"]) for i, _ in self._order), default=0)

    def __iter__(self) -> Iterator[PromptItem]:
        windows = [(self._rows, self._order)] if self._order is not None else self._streamed()
        for rows, order in windows:
            for index, key in order:
                row = rows[index]
                yield PromptItem(row["prompt"], key, row["prompt_ids"])

    def _streamed(self) -> Iterator[tuple[Dataset, Iterable[tuple[int, str]]]]:
        """Yield windows of rows, each with index and key of its new prompts; one without a short prompt is dropped."""
        seen: set[bytes] = set()
        is_empty = True
        for start in range(0, len(self._rows), WINDOW):
            stop = min(start + WINDOW, len(self._rows))
            try:
                rows = self._encoded(Dataset.from_dict(self._rows[start:stop]))
            except AllOverlong as error:
                logger.warning("dropped rows %d to %d of the stream: %s", start, stop - 1, error)
                continue
            except ValueError as error:
                raise ValueError(f"rows {start} to {stop - 1} of the stream: {error}") from error
            is_empty = False
            yield rows, self._selected(rows["prompt"], seen)
        if is_empty:
            raise AllOverlong(f"all {len(self._rows)} prompts", self.args.max_prompt_length)

    def _encoded(self, rows: Dataset) -> Dataset:
        args = self.args
        rows = encoded(
            rows,
            self.tokenizer,
            max_prompt_length=args.max_prompt_length,
            overlong_prompts=args.overlong_prompts,
            chat_template_kwargs=args.chat_template_kwargs,
        )
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
        return [SampledText(text, self.group.is_whole(index)) for index, text in enumerate(self.group.texts)]


class GivenSource(Source):
    """The prompts of rows that bring their completions: pairs, groups of several models, or logged conversations.

    A prompt belongs to a shard by its content, as when it is sampled. Rows are read as they are needed and not held;
    logs are grouped by their prompt first, which holds them.

    Raises:
        ValueError: no known shape, or bad rows; in a stream they are found while it is read.
    """

    def __init__(self, args: PrefsArguments):
        super().__init__(args)
        self._rows = load_source_rows(args)
        is_stream = isinstance(self._rows, ShardedRows)
        if is_stream and shape_of(self._rows.column_names, self._rows[0]) == "logs":
            raise ValueError(
                "streaming reads each row once, and the completions of one prompt stand in several rows; leave"
                " streaming out, or give groups: prompt and completions"
            )
        for group in self._groups():
            if is_stream:
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
        is_stream = isinstance(self._rows, ShardedRows)
        rows = (self._rows[i] for i in range(len(self._rows))) if is_stream else self._rows
        return read_groups(rows, self._rows.column_names)


def load_source_rows(args: PrefsArguments) -> Dataset | ShardedRows:
    """Return the rows of a run, in memory, or with `streaming` read as they are needed."""
    rows = stream_dataset_rows(args, WINDOW) if args.streaming else load_dataset_rows(args)
    refuse_variables(rows, "prefs, whose rows keep the prompt alone,")
    return rows
