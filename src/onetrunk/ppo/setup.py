"""Turns the arguments of PPOTrainer into parts that fit together.

Settings, tokenizer, rows and rewards are checked first; the model loads last, because that takes longest.
"""

from __future__ import annotations

import inspect
import logging
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from datasets import Dataset, DatasetDict, Features, IterableDataset, IterableDatasetDict
from peft import PeftConfig, PeftModel
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed
from transformers.utils import has_file

from onetrunk.costs import ModelShape, reuse_saving, trunk_states_bytes
from onetrunk.data.prompts import prepare_prompts
from onetrunk.data.rows import is_conversational
from onetrunk.data.sharded import ShardedRows, known_rows
from onetrunk.models.adapters import check_adapter_config
from onetrunk.models.base_model import (
    check_decoder,
    decoder_layers,
    load_base,
    load_tokenizer,
    repair_padding,
    stop_token_ids,
)
from onetrunk.models.build import attach_score_adapter, build_trunk, check_model_type
from onetrunk.models.frozen_layers import TrunkCache, choose_place
from onetrunk.models.loading import adapter_base, base_revision, load_config
from onetrunk.models.trunk import TrunkModel
from onetrunk.parallel.layout import (
    check_stage_launch,
    check_stage_layout,
    launch_layout,
    reject_tensor_parallelism,
    train_in_stages,
    training_stages,
)
from onetrunk.parallel.sharding import cast_when_sharded
from onetrunk.ppo.config import PPOConfig, check_pretraining, plan_batches
from onetrunk.ppo.foreign_names import our_metric
from onetrunk.ppo.memory_check import MemoryCheck
from onetrunk.ppo.rollout import RolloutMaker, longest_prompt_of
from onetrunk.ppo.settings import BACKENDS
from onetrunk.rewards.combine import RewardSet
from onetrunk.rewards.reward import BuiltInReward, RewardFunction
from onetrunk.rewards.specs import Policy, read_spec
from onetrunk.rollouts.base import (
    KeptStates,
    RolloutBackend,
    SamplingParams,
    ServedBackend,
    VersionedBackend,
    longest_row,
)
from onetrunk.rollouts.local import LocalBackend
from onetrunk.utils.files import require_name, require_output_dir
from onetrunk.utils.import_path import find_object

if TYPE_CHECKING:
    from onetrunk.rollouts.episodes.environments import Episodes, Factory
    from onetrunk.rollouts.episodes.kinds import Compact, CompactionLimits

logger = logging.getLogger(__name__)

Reward = RewardFunction | str | PreTrainedModel | PeftModel


@dataclass(frozen=True)
class SampledModel:
    """A model with the tokenized prompts and the sampler: the part that a PPO run and an evaluation share."""

    model: TrunkModel
    tokenizer: PreTrainedTokenizerBase
    datasets: list[Dataset]
    sampler: RolloutMaker


@dataclass(frozen=True)
class Run:
    """The parts of a PPO run; `parts.datasets` begins with the training prompts."""

    parts: SampledModel
    eval_dataset: Dataset | dict[str, Dataset] | None
    trunk_plan: TrunkPlan
    memory_check: MemoryCheck


@dataclass(frozen=True)
class ModelInputs:
    """The model, the reward functions, tools and environments, with what belongs to them, as PPOTrainer takes them."""

    model: str | PreTrainedModel | PeftModel
    reward_funcs: Reward | Sequence[Reward] | None
    tokenizer: PreTrainedTokenizerBase | None = None
    reward_tokenizers: PreTrainedTokenizerBase | Sequence[PreTrainedTokenizerBase | None] | None = None
    quantization_config: Any = None
    peft_config: PeftConfig | None = None
    tools: Sequence[Callable[..., Any]] | None = None
    environment_factory: Factory | Mapping[str, Factory] | None = None
    compact: Compact | None = None


def prepare_run(
    inputs: ModelInputs,
    args: PPOConfig,
    train_dataset: Dataset | ShardedRows | None,
    eval_dataset: Dataset | dict[str, Dataset] | None,
    rollout_backend: RolloutBackend | None,
    hooks: dict[str, Callable[..., None]],
) -> Run:
    """Return the parts of a run. PPOTrainer has the same arguments, and LocalBackend the same `hooks`."""
    check_launch(args)
    if train_dataset is None:
        check_own_data(inputs.environment_factory, args)
    rollout_backend = own_backend(args, rollout_backend)
    check_parts(args, eval_dataset)
    train_dataset = map_style(train_dataset, "train_dataset", rows_needed(args))
    check_pretraining(args, len(train_dataset or ()))
    by_name = eval_dataset if isinstance(eval_dataset, dict) else {"": eval_dataset}
    held_out = {n: map_style(rows, "eval_dataset") for n, rows in by_name.items() if rows is not None}
    backend = rollout_backend or load_backend(args, **hooks)
    check_schedule(args, backend)
    parts = load_sampled_model(inputs, args, [train_dataset, *held_out.values()], backend)
    held_out = dict(zip(held_out, parts.datasets[1:], strict=True))
    longest_prompt = longest_prompt_of(parts.datasets[0], args)
    if parts.sampler.episodes is not None:
        parts.sampler.episodes.poll = hooks["poll"]
        # `reset` may lengthen prompts.
        longest_prompt = max(longest_prompt, args.max_prompt_length or 0)
    if isinstance(backend, ServedBackend):
        longest_served = max(longest_prompt, *(longest_prompt_of(rows, args) for rows in parts.datasets))
        backend.check_policy(parts.model, longest_row(longest_served, args))
        backend.progress, backend.poll = backend.progress or hooks["progress"], backend.poll or hooks["poll"]
    # A pipeline has the states at the cut on one of its stages only.
    samples_here = rollout_backend is None and isinstance(backend, LocalBackend)
    plays = parts.sampler.episodes is not None
    plan = plan_trunk(parts.model, args, longest_prompt, samples_here, plays)
    sampler = replace(parts.sampler, keeps=plan.sampled)
    return Run(
        replace(parts, sampler=sampler),
        held_out if isinstance(eval_dataset, dict) else held_out.get(""),
        plan,
        MemoryCheck(longest_prompt),
    )


def rows_needed(args: PPOConfig) -> int | None:
    """Return the number of prompts that a run reads, if its settings say it."""
    if args.max_steps <= 0:
        return None
    return math.ceil(args.max_steps / args.steps_per_rollout) * args.rollout_batch_size


def map_style(rows: Any, name: str, limit: int | None = None) -> Any:
    """Return rows that have a length: those of a list, of a DatasetDict's only split, or of an iterable dataset.

    An iterable training set is read as far as the run will need it, at most `limit` rows, so that a resumed run draws
    the same order as an uninterrupted one.
    """
    if isinstance(rows, (DatasetDict, IterableDatasetDict)):
        if len(rows) != 1:
            raise ValueError(f"{name} has the splits {', '.join(rows)}; pass one of them, such as rows[{min(rows)!r}]")
        rows = next(iter(rows.values()))
    if isinstance(rows, list) and not rows:
        raise ValueError(f"{name} holds no rows; give at least one")
    if isinstance(rows, list) and all(isinstance(row, dict) for row in rows):
        return _dataset_of(rows)
    if not isinstance(rows, IterableDataset):
        return rows
    if name == "train_dataset" and limit is None:
        raise ValueError(
            "train_dataset is an IterableDataset, whose length is not known; set num_rollouts or max_steps, or use"
            " ShardedRows (onetrunk.data.sharded.load_sharded_rows), which are read while training"
        )
    held = _dataset_of(list(rows if limit is None else rows.take(limit)), rows.features)
    logger.warning("%s is an IterableDataset: its first %d rows are kept in memory, and no others", name, len(held))
    return held


def _dataset_of(rows: Sequence[dict[str, Any]], features: Features | None = None) -> Dataset:
    """Return rows with the columns of all of them, None where one is missing; Dataset.from_list reads the first's."""
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [row.get(name) for row in rows] for name in names}
    return Dataset.from_dict(columns, features=features, on_mixed_types="use_json")


def load_backend(config: PPOConfig, **hooks: Callable[..., None]) -> RolloutBackend:
    """Return the backend that samples the rollouts of a run: by vLLM, in a pipeline of processes, or in this process.

    `hooks` are `progress` and `poll`. vLLM is checked before their trainer is built, and gets them then.
    """
    if config.rollout_backend == "pipelined":
        from onetrunk.rollouts.pipelined import PipelinedBackend

        return PipelinedBackend(
            stages=config.pipeline_stages,
            batches=config.pipeline_batches,
            split=config.pipeline_split,
            max_rows=config.max_rollout_rows,
            shares_rows=config.pipeline_training,
            **hooks,
        )
    if not config.use_vllm:
        # What is read of sampling besides the tokens must not depend on when tools answer.
        reads = config.truncates or config.vllm_importance_sampling_correction or config.policy_objective == "dis"
        in_waves = bool(reads or config.capture_trunk_states)
        return LocalBackend(max_rows=config.max_rollout_rows, in_waves=in_waves, **hooks)
    if config.is_colocated:
        from onetrunk.rollouts.colocate import ColocatedBackend
        from onetrunk.rollouts.publishing import ADAPTERS_FOLDER

        return ColocatedBackend(
            Path(config.output_dir) / ADAPTERS_FOLDER,
            gpu_memory_utilization=config.vllm_gpu_memory_utilization,
            sleeps=config.vllm_enable_sleep_mode,
            max_rows=config.max_rollout_rows,
        )
    from onetrunk.rollouts.vllm import load_servers

    return load_servers(config, keep_versions=max(2, config.versions_in_use))


def load_sampled_model(
    inputs: ModelInputs, args: PPOConfig, datasets: Sequence[Dataset], backend: RolloutBackend
) -> SampledModel:
    """Check the model's name, tokenizer, rows of prompts and rewards, then load the model."""
    model, model_kwargs = inputs.model, args.model_init_kwargs or {}
    model = os.fspath(model) if isinstance(model, os.PathLike) else model
    check_model(model, inputs.tokenizer, model_kwargs, inputs.peft_config)
    tokenizer = policy_tokenizer(model, inputs.tokenizer, model_kwargs)
    extra_stops = tokens_of(args.stop_tokens or [], tokenizer)
    episodes = load_episodes(inputs, args, tokenizer, backend)
    datasets = [prepare_dataset(dataset, tokenizer, args, episodes) for dataset in datasets]
    check_rows(model, args, datasets, episodes)
    functions = resolve_rewards(inputs, args.device, base_name(model, model_kwargs), tokenizer)
    gives_rewards = episodes is not None and episodes.gives_rewards
    if not functions and not gives_rewards and episodes is not None:
        raise ValueError("the tools or environments give no rewards; set reward_funcs, or define get_reward")
    rewards = RewardSet(functions, args.reward_weights, has_environment=gives_rewards)
    check_best_score(args.metric_for_best_model, rewards.names, gives_rewards)
    added = ["environments"] if episodes is not None and episodes.has_environment else []
    for dataset in datasets:
        rewards.check_columns([*(n for n in dataset.column_names if n not in ("prompt", "prompt_ids")), *added])
    check_stage_training(args, inputs.quantization_config, rewards.trunk_reward is not None)
    require_one_segment(args, rewards)
    if args.push_to_hub:
        from onetrunk.checkpoints.hub import require_push

        require_push(args)
    if isinstance(backend, ServedBackend):
        backend.check()
    set_seed(args.seed)
    with cast_when_sharded(inputs.quantization_config):
        trunk = build_trunk(
            model,
            inputs.peft_config,
            adapter_layers=args.adapter_layers,
            quantization_config=inputs.quantization_config,
            model_init_kwargs=args.model_init_kwargs,
        )
    if rewards.trunk_reward is not None:
        attach_score_adapter(trunk, rewards.trunk_reward.adapter)
    trunk.use_padding_free(args.padding_free)
    trunk.values_turn_ends = args.truncated_completions == "bootstrap"
    repair_padding(tokenizer, trunk.get_base_model().config)
    for line in divide(trunk, args, backend):
        if line is not None and args.should_log:
            tqdm.write(line, file=sys.stderr)
    stops = {*stop_token_ids(tokenizer, trunk.get_base_model().generation_config), *extra_stops}
    names = "max_completion_length temperature top_p top_k max_turn_length max_context_length"
    given = {name: getattr(args, name) for name in names.split()}
    params = SamplingParams(**given, stop_token_ids=tuple(sorted(stops)), pad_token_id=tokenizer.pad_token_id)
    sampler = RolloutMaker(backend, rewards, tokenizer, params, episodes=episodes)
    if episodes is not None:
        episodes.limits = replace(episodes.limits, longest_prompt=longest_with_reset(trunk, args, episodes))
    return SampledModel(trunk, tokenizer, datasets, sampler)


def require_one_segment(args: PPOConfig, rewards: RewardSet) -> None:
    """Raise ValueError if a reward adapter of the trunk would have to read an episode of several segments."""
    if rewards.trunk_reward is not None and args.max_context_length is not None:
        raise ValueError(
            "a reward adapter on the policy's base reads one row, and max_context_length divides an episode into"
            " several; leave one of them out, or give a separate reward model"
        )


def load_episodes(
    inputs: ModelInputs, args: PPOConfig, tokenizer: PreTrainedTokenizerBase, backend: RolloutBackend | None = None
) -> Episodes | None:
    """Return the tools and environments of a run; None if its completions are one turn each."""
    if not inputs.tools and inputs.environment_factory is None:
        for name in ("max_turns", "max_turn_length", "max_context_length"):
            if getattr(args, name) is not None:
                raise ValueError(
                    f"{name} is {getattr(args, name)}, and there are neither tools nor an environment; give one"
                )
        return None
    if args.pipeline_training or args.rollout_backend == "pipelined" or getattr(backend, "is_collective", False):
        raise ValueError(
            "tools and environments are not supported with rollout_backend 'pipelined' or pipeline_training, where"
            " processes sample the same rows together; set rollout_backend to local, or use_vllm"
        )
    reject_tensor_parallelism(
        "episodes with tools or environments",
        "whose processes would each play the same episode; launch with accelerate_configs/ddp.yaml or fsdp2.yaml",
    )
    from onetrunk.rollouts.episodes.environments import EpisodeLimits, Episodes  # Few runs have them.

    limits = EpisodeLimits(
        args.max_turns,
        args.tool_timeout,
        args.max_observation_characters,
        args.max_failed_episodes_fraction,
        control_tokens=args.observation_control_tokens,
        compaction=compaction_limits(args, inputs.compact),
    )
    factory, template_kwargs = inputs.environment_factory, args.chat_template_kwargs
    return Episodes(inputs.tools, factory, tokenizer, limits, template_kwargs)


def compaction_limits(args: PPOConfig, compact: Compact | None) -> CompactionLimits:
    """Return when and how contexts are compacted; ValueError for a rule that nothing would call."""
    if compact is not None and not callable(compact):
        raise ValueError(f"compact is {compact!r}; give a function that takes messages and returns messages")
    if compact is not None and args.max_context_length is None:
        raise ValueError("compact is given and max_context_length is not, so no context is compacted; set it")
    from onetrunk.rollouts.episodes.kinds import CompactionLimits

    names = ("max_context_length", "max_compactions", "kept_turns", "compaction_prompt")
    return CompactionLimits(*(getattr(args, name) for name in names), compact)


def longest_with_reset(trunk: TrunkModel, args: PPOConfig, episodes: Episodes) -> int | None:
    """Return the most tokens of a prompt with the observation of `reset`; None: no bound."""
    positions = getattr(trunk.get_base_model().config.get_text_config(), "max_position_embeddings", None)
    rows = [most - args.max_completion_length for most in (positions, args.microbatch_tokens) if most is not None]
    if args.max_context_length is not None:
        rows = [episodes.prompt_room(args.max_turn_length)]
    return min([*rows, args.max_prompt_length] if args.max_prompt_length is not None else rows, default=None)


def divide(trunk: TrunkModel, args: PPOConfig, backend: RolloutBackend) -> list[str | None]:
    """Divide the frozen base over the processes as the run asks, and return lines for the user."""
    from onetrunk.parallel.staged import keep_stage
    from onetrunk.parallel.stages import LayerSplit, verify_split
    from onetrunk.parallel.tensor import distribute_frozen
    from onetrunk.rollouts.pipelined import PipelinedBackend

    samples_in_stages = isinstance(backend, PipelinedBackend)
    if samples_in_stages:
        backend.check_policy(trunk)
    if args.pipeline_training:
        check_stage_training(args, getattr(trunk.get_base_model(), "quantization_method", None))
        split = LayerSplit.of(trunk, training_stages(), args.pipeline_split)
        if not samples_in_stages:
            verify_split(trunk, split)
        return [keep_stage(trunk, split, args.device)]
    lines = [backend.report(trunk)] if samples_in_stages else []
    return [*lines, distribute_frozen(trunk, launch_layout(), args.device)]


def policy_tokenizer(
    model: str | PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase | None, kwargs: dict[str, Any]
) -> PreTrainedTokenizerBase:
    """Return the policy's tokenizer with its padding repaired; an adapter without one takes its base's."""
    if tokenizer is not None:
        return repair_padding(tokenizer)
    if not isinstance(model, str):
        name = base_name(model, kwargs)
        if not name:
            raise ValueError("the model was not loaded from a name or path: pass its tokenizer as processing_class")
        return load_tokenizer(name)
    source = source_of(kwargs)
    revision = source.get("revision")
    base = adapter_base(model, revision)
    if base is None:
        return load_tokenizer(model, **source)
    has_tokenizer = has_file(model, "tokenizer_config.json", revision=revision)
    return load_tokenizer(*((model, revision) if has_tokenizer else (base, base_revision(model, revision))))


def base_name(model: str | PreTrainedModel | PeftModel, kwargs: dict[str, Any]) -> str:
    """Return the name or path of the policy's base model; empty for a model that was made in memory."""
    if isinstance(model, str):
        return adapter_base(model, source_of(kwargs).get("revision")) or model
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    return base.config.name_or_path or ""


def tokens_of(stop_tokens: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the id of each stop token; ValueError for a text that is not exactly one token that is known."""
    token_ids = []
    for text in [stop_tokens] if isinstance(stop_tokens, str) else stop_tokens:
        ids = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) != 1:
            raise ValueError(
                f"stop_tokens: {text!r} is {len(ids)} tokens; a completion can only end at a single token"
            )
        # A tokenizer of whole words has one id for all unknown words: the first of them would end a completion.
        if ids[0] == tokenizer.unk_token_id and text != tokenizer.unk_token:
            raise ValueError(
                f"stop_tokens: the tokenizer does not know {text!r} and reads it as {tokenizer.unk_token!r}; name a"
                " token of its vocabulary"
            )
        token_ids += ids
    return token_ids


def prepare_dataset(
    dataset: Dataset | ShardedRows | None,
    tokenizer: PreTrainedTokenizerBase,
    args: PPOConfig,
    episodes: Episodes | None = None,
) -> Dataset | ShardedRows:
    """Return a dataset with every prompt checked and tokenized; sharded rows, when they are read; None: no dataset."""
    is_open = episodes is not None and episodes.has_environment
    if not isinstance(dataset, (Dataset, ShardedRows)) and not (dataset is None and is_open):
        raise ValueError(
            f"the dataset is a {type(dataset).__name__}; pass a map-style datasets.Dataset, whose order can be resumed"
            ", or ShardedRows (onetrunk.data.sharded.load_sharded_rows), which are read while training"
        )
    template_of = None
    if is_open:
        # Every rollout takes all rows of an environment's own, each with another seed, so that a run may grow longer.
        dataset = episodes.with_prompts(dataset, args.rollout_batch_size)
    if episodes is not None:
        episodes.check_prompts(dataset.column_names, is_conversational(dataset))
        template_of = episodes.template_of
    return prepare_prompts(
        dataset,
        tokenizer,
        max_prompt_length=args.max_prompt_length,
        overlong_prompts=args.overlong_prompts,
        chat_template_kwargs=args.chat_template_kwargs,
        template_of=template_of,
        is_open=is_open,
    )


def check_own_data(factory: Factory | Mapping[str, Factory] | None, args: PPOConfig) -> None:
    """Check that a run without a dataset has one environment, which says the prompts at `reset`, and a length."""
    if factory is None or isinstance(factory, Mapping):
        more = "" if factory is None else " and 'environment', the name of one"
        raise ValueError(f"PPOTrainer needs train_dataset: rows with a column 'prompt'{more}")
    if args.max_steps <= 0:
        raise ValueError(
            "without train_dataset the environment gives the prompts, but not their number; set num_rollouts (or"
            " max_steps)"
        )


def resolve_rewards(
    inputs: ModelInputs, device: torch.device, base: str, base_tokenizer: PreTrainedTokenizerBase
) -> list[RewardFunction]:
    """Return the rewards of a run, with models loaded, servers called once, and adapters of the policy's own trunk.

    Args:
        inputs: the reward functions (functions, loaded models, texts for `read_spec`) and the tokenizers of models.
        device, base, base_tokenizer: see `Policy`.
    """
    rewards, tokenizers = inputs.reward_funcs, inputs.reward_tokenizers
    rewards = [] if rewards is None else rewards
    rewards = list(rewards) if isinstance(rewards, (list, tuple)) else [rewards]
    if not isinstance(tokenizers, (list, tuple)):
        tokenizers = [tokenizers] * (len(rewards) if tokenizers is None else 1)
    if len(tokenizers) != len(rewards):
        raise ValueError(
            f"{len(tokenizers)} reward_processing_classes for {len(rewards)} reward functions; give a list with one"
            " for each (None for functions, and for a model's own tokenizer)"
        )
    resolved: list[RewardFunction] = []
    for reward, tokenizer in zip(rewards, tokenizers, strict=True):
        if isinstance(reward, str):
            reward = read_spec(reward).load(Policy(base, base_tokenizer, device, tokenizer))
        elif isinstance(reward, (PreTrainedModel, PeftModel)):
            from onetrunk.rewards.model import ModelReward

            reward = ModelReward(reward, tokenizer, device=device)
        elif isinstance(reward, BuiltInReward):
            reward.check()
        resolved.append(reward)
    return resolved


@dataclass(frozen=True)
class TrunkPlan:
    """What happens to the trunk states: the output of the frozen lower layers, which every role starts from.

    Args:
        cache: keeps them for the epochs of a rollout; None: every forward computes them, or no layer is frozen.
        report: a line for the user.
        sampled: those that sampling computes; None: scoring computes all.
    """

    cache: TrunkCache | None
    report: str
    sampled: KeptStates | None = None


def plan_trunk(
    trunk: TrunkModel, args: PPOConfig, longest_prompt: int, samples_here: bool, plays: bool = False
) -> TrunkPlan:
    """Return the TrunkPlan of a run.

    Args:
        samples_here: whether LocalBackend samples, by the settings.
        plays: whether completions are episodes.
    """
    base = trunk.get_base_model()
    num_layers = len(decoder_layers(base))
    captures = _captures_states(trunk, args, samples_here, plays)
    branch, reward = trunk.reward_branch, ""
    if branch is not None and branch.from_states:
        reward = f"\nreward: the adapter {branch.name} starts from the states at the cut, layer {trunk.cut}"
    elif branch is not None:
        reward = f"\nreward: the adapter {branch.name} runs through all layers: {branch.obstacle}"
    if not trunk.cut:
        if args.trunk_cache in ("device", "cpu"):
            raise ValueError(
                f"trunk_cache {args.trunk_cache!r} has nothing to keep: layer 0 carries an adapter that trains; set"
                " adapter_layers to top-k with k below the number of layers, or trunk_cache to 'auto'"
            )
        return TrunkPlan(None, f"trunk: adapters train on all {num_layers} layers, nothing to reuse{reward}")
    lower = f"trunk: the lower {trunk.cut} of {num_layers} layers are frozen and the same for every role"
    if args.pipeline_training:
        report = f"{lower}; in pipeline stages they run once for all roles of a forward, and nothing is kept"
        return TrunkPlan(None, f"{report}{reward}")
    if args.trunk_cache == "off":
        return TrunkPlan(None, f"{lower}; trunk_cache is off, so they run in every forward{reward}")
    shape = ModelShape.from_config(base.config.get_text_config())
    row_tokens = longest_prompt + args.max_completion_length
    rows = plan_batches(args, args.world_size).rows_per_rank
    num_bytes = trunk_states_bytes(shape, rows * row_tokens, base.dtype.itemsize)
    place = choose_place(args.trunk_cache, num_bytes, args.device)
    saving = reuse_saving(shape, trunk.cut, args.num_ppo_epochs, args.max_completion_length / row_tokens)
    where = f"on {args.device}" if place == "device" else "in this machine's memory"
    report = (
        f"{lower} and run once per rollout: {saving:.0%} less work in scoring and update, for at most"
        f" {num_bytes / 2**20:,.1f} MiB of states {where}{', computed while sampling' if captures else ''}"
        f"{reward}"
    )
    reads_last = args.truncated_completions == "bootstrap" or (branch is not None and branch.from_states)
    sampled: KeptStates = "all" if reads_last else "all but last"
    return TrunkPlan(TrunkCache(place), report, sampled if captures else None)


def _captures_states(trunk: TrunkModel, args: PPOConfig, samples_here: bool, plays: bool) -> bool:
    obstacles = {
        "no layer is frozen: set adapter_layers to top-k": not trunk.cut,
        "trunk_cache is off": args.trunk_cache == "off",
        "the rollout backend is not the trunk itself": not samples_here,
        "contexts are compacted (max_context_length)": args.max_context_length is not None,
    }
    obstacle = next((reason for reason, holds in obstacles.items() if holds), None)
    if args.capture_trunk_states and obstacle:
        raise ValueError(f"capture_trunk_states is not possible: {obstacle}; leave it out")
    if args.capture_trunk_states is not None:
        return args.capture_trunk_states
    # In half precision a token alone is rounded differently than within a row, far more than in float32. In episodes
    # rounding would depend on when answers come, or all rows would wait for the slowest.
    is_float32 = trunk.get_base_model().dtype == torch.float32 and not (args.bf16 or args.fp16)
    return is_float32 and obstacle is None and not plays


def check_launch(args: PPOConfig) -> None:
    """Check the type of the settings, the output folder, the GPUs of a process, sharding and the batch arithmetic."""
    if not isinstance(args, PPOConfig):
        raise TypeError(f"args is a {type(args).__name__}; PPOTrainer takes a PPOConfig (onetrunk.PPOConfig)")
    if args.should_save:
        require_output_dir(args.output_dir)
    if args.n_gpu > 1:
        raise ValueError(
            f"{args.n_gpu} GPUs are visible to one process; start one process per GPU: onetrunk ppo --num_processes"
            f" {args.n_gpu} ..., or set CUDA_VISIBLE_DEVICES=0"
        )
    if launch_layout() is not None and args.activation_offloading:
        raise ValueError(
            "activation_offloading is not supported with a sharded or divided base: it would move the gathered weights"
            " too; set activation_checkpointing"
        )
    check_pipeline(args)
    join_stages(args)
    plan_batches(args, args.world_size)


def join_stages(args: PPOConfig) -> None:
    """Let the processes of a launch count as pipelines from now on, if they train as their stages."""
    is_pipeline = args.pipeline_training and args.world_size > 1
    train_in_stages((args.pipeline_stages or args.world_size) if is_pipeline else 1)


def check_pipeline(args: PPOConfig) -> None:
    """Check that the processes of a launch form pipelines, if the config asks for them."""
    what, otherwise = "pipeline_training", "leave pipeline_training out"
    if args.rollout_backend == "pipelined":
        what, otherwise = "rollout_backend 'pipelined'", "set rollout_backend to 'local'"
        reject_tensor_parallelism(what, f"which divides every layer; {otherwise}, or launch with fsdp2.yaml")
    elif not args.pipeline_training:
        return
    check_stage_launch(what, args.pipeline_stages, args.world_size, otherwise)
    if args.pipeline_training:
        check_stage_layout("pipeline_training", "leave pipeline_training out")


def own_backend(args: PPOConfig, given: RolloutBackend | None) -> RolloutBackend | None:
    """Return the user's sampler, as it was passed or as the setting names it; None: one of ours samples."""
    named = None if args.rollout_backend in BACKENDS else args.rollout_backend
    if given is None and named is None:
        return None
    if given is not None and (args.use_vllm or args.rollout_backend != "local"):
        setting = "use_vllm is set" if args.use_vllm else f"rollout_backend is {args.rollout_backend!r} in the config"
        raise ValueError(f"{setting} and rollout_backend is a {type(given).__name__}; give one of them")
    backend = named_backend(named) if given is None else given
    if not isinstance(backend, RolloutBackend):
        raise TypeError(
            f"rollout_backend is a {type(backend).__name__}, which lacks generate(prompt_ids, params, keys) or"
            " sync(model, version); see onetrunk.rollouts.base.RolloutBackend"
        )
    return backend


def named_backend(spec: str) -> Any:
    """Return what the class or function makes that `spec` names; ValueError if it needs arguments."""
    factory = find_object(spec, "rollout backend", ", nor local, nor pipelined")
    if not callable(factory):
        raise ValueError(f"rollout_backend {spec!r} is a {type(factory).__name__}; name a class or a function")
    try:
        inspect.signature(factory).bind()
    except TypeError as error:
        raise ValueError(
            f"rollout_backend {spec!r}: {error}; name a function without arguments that makes it"
        ) from None
    return factory()


def check_parts(args: PPOConfig, eval_dataset: Any) -> None:
    """Check what would fail late: evaluation without rows, names of evaluation sets."""
    if (eval_dataset is None or eval_dataset == {}) and args.eval_strategy != "no":
        raise ValueError(f"eval_strategy {args.eval_strategy.value!r} needs eval_dataset: held-out rows of prompts")
    names = list(eval_dataset) if isinstance(eval_dataset, dict) else []
    for name in names:
        require_name(name, "the name of an evaluation set")
    if args.metric_for_best_model:
        args.metric_for_best_model = named_metric(args.metric_for_best_model.removeprefix("eval_"), names)


def named_metric(metric: str, names: Sequence[str]) -> str:
    """Return our name of a metric of an evaluation, which may be TRL's; ValueError if no evaluation gives it."""
    name = next((name for name in names if metric.startswith(f"{name}_")), None)
    if names and name is None:
        raise ValueError(
            f"metric_for_best_model is {metric!r}, and the evaluation sets are {', '.join(names)}: say which of them"
            f" decides, for example {names[0]}_score/mean"
        )
    prefix = "" if name is None else f"{name}_"
    ours = our_metric(metric.removeprefix(prefix))
    if ours is None:
        raise ValueError(
            f"metric_for_best_model is {metric!r}, which no evaluation gives; it gives score/mean,"
            " score/<function>, kl/ref and completion/length"
        )
    return prefix + ours


def check_best_score(metric: str | None, functions: Sequence[str], gives_rewards: bool) -> None:
    """Raise ValueError for the score of a reward function that there is none of, and no environment either."""
    name = (metric or "").partition("score/")[2]
    if name and not gives_rewards and name not in ("mean", "std", *functions):
        raise ValueError(
            f"metric_for_best_model is {metric!r}, and no reward function is named {name!r}; there is"
            f" {', '.join(functions)}"
        )


def check_stage_training(args: PPOConfig, quantization: Any, scores_on_trunk: bool = False) -> None:
    """Raise ValueError for what training in pipeline stages cannot carry out, before the model loads if that is known.

    Args:
        quantization: how the base is quantised; None: it is not.
    """
    if not args.pipeline_training:
        return
    if quantization is not None:
        raise ValueError(
            "pipeline_training is not supported for a quantised base, which loads on one device as a whole; load it in"
            " bfloat16 (leave load_in_4bit and load_in_8bit out)"
        )
    if scores_on_trunk:
        raise ValueError(
            "pipeline_training is not supported with a reward adapter on the policy's base, which runs on the same"
            " trunk; score with a function, or with a reward model on a server"
        )


def check_schedule(args: PPOConfig, backend: RolloutBackend) -> None:
    """Check that the sampler can work while the policy is updated, if the schedule asks for that."""
    if args.schedule == "sync":
        return
    if not isinstance(backend, VersionedBackend):
        raise ValueError(
            f"schedule {args.schedule!r} samples while the weights change, and {type(backend).__name__} has no weights"
            " of its own; set use_vllm, pass a rollout_backend with generate_as"
            " (onetrunk.rollouts.base.VersionedBackend), or set schedule to 'sync'"
        )
    if getattr(backend, "keep_versions", args.versions_in_use) < args.versions_in_use:
        raise ValueError(
            f"keep_versions is {backend.keep_versions}, and with schedule {args.schedule!r} and the evaluations among"
            f" its rollouts up to {args.versions_in_use} versions are in use; pass VLLMBackend(...,"
            f" keep_versions={args.versions_in_use}), or set use_vllm instead"
        )
    reject_tensor_parallelism(
        f"schedule {args.schedule!r}",
        "whose processes must agree on every completion; set schedule to 'sync', or shard the base with"
        " accelerate_configs/fsdp2.yaml",
    )


def check_model(model: Any, tokenizer: Any, kwargs: dict[str, Any], peft_config: PeftConfig | None = None) -> None:
    """Check the types of model and tokenizer, the model at the name, the keywords for loading it, and the LoRA config.

    Of a model given by name only its config is read.
    """
    check_model_type(model)
    if tokenizer is not None and not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise TypeError(
            f"processing_class is of type {type(tokenizer).__name__}; give the policy's tokenizer"
            " (AutoTokenizer.from_pretrained), or leave it out"
        )
    known = [n for n in inspect.signature(load_base).parameters if n not in ("name_or_path", "quantization_config")]
    unknown = [name for name in kwargs if name not in known]
    if unknown:
        hint = "; torch_dtype is dtype now" if "torch_dtype" in unknown else ""
        raise ValueError(f"model_init_kwargs has {', '.join(unknown)}; it may have {', '.join(known)}{hint}")
    if isinstance(model, str):
        check_decoder(load_config(model, **source_of(kwargs)), model)
    if peft_config is not None:
        check_adapter_config(peft_config)


def check_rows(
    model: str | PreTrainedModel | PeftModel,
    args: PPOConfig,
    datasets: Sequence[Dataset | ShardedRows],
    episodes: Episodes | None,
) -> None:
    """Check that the model and the contexts of episodes have room for prepared rows (`check_lengths`)."""
    check_lengths(model, args, [known_rows(dataset) for dataset in datasets])
    if episodes is not None and args.max_context_length is not None:
        episodes.check_contexts(max(longest_prompt_of(dataset, args) for dataset in datasets), args.max_turn_length)


def check_lengths(model: str | PreTrainedModel | PeftModel, args: PPOConfig, datasets: list[Dataset]) -> None:
    """Check that the model has the tokens of all prompts, and positions for prompt and completion."""
    prompts = [ids for dataset in datasets for ids in dataset["prompt_ids"]]
    longest = max(map(len, prompts))
    most = longest_row(longest, args)
    remedy = f"the longest prompt has {longest} tokens and max_completion_length is {args.max_completion_length}"
    if args.microbatch_tokens is not None and most > args.microbatch_tokens:
        raise ValueError(
            f"{remedy}: a row of {most} tokens does not fit microbatch_tokens {args.microbatch_tokens}; raise it"
        )
    if isinstance(model, str):
        config = load_config(model, **source_of(args.model_init_kwargs or {}))
    else:
        config = (model.get_base_model() if isinstance(model, PeftModel) else model).config.get_text_config()
    largest, vocab_size = max(map(max, prompts)), config.vocab_size
    if largest >= vocab_size:
        raise ValueError(
            f"the tokenizer gives token id {largest} and the model knows {vocab_size} tokens; take the tokenizer that"
            " belongs to the model (processing_class)"
        )
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and most > limit:
        raise ValueError(
            f"{remedy}: together {most}, and the model has {limit} positions; lower max_completion_length, or set"
            " max_prompt_length with overlong_prompts drop or truncate"
        )


def source_of(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the keywords that choose the source of a model."""
    return {key: kwargs[key] for key in ("revision", "trust_remote_code") if key in kwargs}
