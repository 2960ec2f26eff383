"""Checks before anything loads: launches, arguments and settings that cannot work together raise with the fix."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from datasets import Dataset
from peft import PeftConfig, PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from onetrunk.models.base_model import check_attention, check_decoder, load_base
from onetrunk.models.build import check_model_type, check_new_adapter
from onetrunk.models.loading import load_config
from onetrunk.parallel.groups import num_data_processes
from onetrunk.parallel.sharding import check_stage_launch, check_stage_layout, launch_layout, train_in_stages
from onetrunk.ppo.config import PPOConfig
from onetrunk.ppo.settings import REFUSED_OPTIMIZERS
from onetrunk.rollouts.base import RolloutBackend, VersionedBackend
from onetrunk.rollouts.vllm import VLLMBackend
from onetrunk.utils.files import require_name, require_output_dir


@dataclass(frozen=True)
class BatchPlan:
    """How many completions of a process are in a rollout, in an optimizer step, and at most in one forward."""

    rows_per_rank: int
    rows_per_minibatch: int
    rows_per_pack: int


def plan_batches(config: PPOConfig, world_size: int) -> BatchPlan:
    """Return the BatchPlan of a config on `world_size` processes; a group of tensor parallelism counts as one.

    Raises:
        ValueError: a division leaves a remainder; the message names values that divide.
    """
    world_size = num_data_processes(world_size)
    prompts, rest = divmod(config.rollout_batch_size, world_size)
    if rest or not prompts:
        raise ValueError(
            f"rollout_batch_size {config.rollout_batch_size} is not divisible by {world_size} processes; set it to"
            f" {max(1, round(config.rollout_batch_size / world_size)) * world_size}"
        )
    rows = prompts * config.num_generations
    if rows % config.num_minibatches:
        divisors = [d for d in range(1, rows + 1) if rows % d == 0]
        near = sorted(divisors, key=lambda d: abs(d - config.num_minibatches))[:2]
        raise ValueError(
            f"the {rows} completions of a process (rollout_batch_size {config.rollout_batch_size}, {world_size}"
            f" processes, num_generations {config.num_generations}) are not divisible by {config.num_minibatches}"
            f" minibatches; set num_minibatches to {' or '.join(str(d) for d in sorted(near))}"
        )
    rows_per_minibatch = rows // config.num_minibatches
    rows_per_pack = min(config.per_device_train_batch_size, rows_per_minibatch)
    return BatchPlan(rows, rows_per_minibatch, rows_per_pack)


TEXT_COLUMNS = ("prompt", "completion", "messages", "text", "chosen", "rejected")


def check_launch(args: PPOConfig) -> None:
    """Check the type of the settings, the output folder, the GPUs of a process, sharding and the batch arithmetic."""
    if not isinstance(args, PPOConfig):
        raise TypeError(f"args is a {type(args).__name__}; PPOTrainer takes a PPOConfig (onetrunk.PPOConfig)")
    if args.should_save:
        require_output_dir(args.output_dir)
    if args.n_gpu > 1:
        raise ValueError(
            f"{args.n_gpu} GPUs are visible to one process; start one process per GPU: accelerate launch"
            f" --config_file accelerate_configs/ddp.yaml --num_processes {args.n_gpu} scripts/ppo.py ...,"
            " or set CUDA_VISIBLE_DEVICES=0"
        )
    launch_layout()
    check_pipeline(args)
    join_stages(args)
    plan_batches(args, args.world_size)


def join_stages(args: PPOConfig) -> None:
    """Let the processes of a launch count as pipelines from now on, if they train as their stages."""
    is_pipeline = args.pipeline_training and args.world_size > 1
    train_in_stages((args.pipeline_stages or args.world_size) if is_pipeline else 1)


def check_pipeline(args: PPOConfig) -> None:
    """Check that the processes of a launch form pipelines, if the config asks for them."""
    samples = args.rollout_backend == "pipelined"
    if not samples and not args.pipeline_training:
        return
    what, otherwise = "pipeline_training", "leave pipeline_training out"
    if samples:
        what, otherwise = "rollout_backend 'pipelined'", "set rollout_backend to 'local'"
    check_stage_launch(what, args.pipeline_stages, args.world_size, "scripts/ppo.py", otherwise)
    if samples:
        reject_tensor_parallelism(
            what,
            "which divides every layer; set it to 'local', or launch with accelerate_configs/pipelined.yaml or"
            " fsdp2.yaml",
        )
    if args.pipeline_training:
        check_stage_layout()


def check_parts(args: PPOConfig, eval_dataset: Any, rollout_backend: RolloutBackend | None) -> None:
    """Check what would fail late: evaluation without rows, names of evaluation sets, the rollout backend."""
    if (eval_dataset is None or eval_dataset == {}) and args.eval_strategy != "no":
        raise ValueError(f"eval_strategy {args.eval_strategy.value!r} needs eval_dataset: held-out rows of prompts")
    names = list(eval_dataset) if isinstance(eval_dataset, dict) else []
    for name in names:
        require_name(name, "the name of an evaluation set")
    metric = args.metric_for_best_model
    if names and metric and not metric.removeprefix("eval_").startswith(tuple(f"{name}_" for name in names)):
        raise ValueError(
            f"metric_for_best_model is {metric!r}, and the evaluation sets are {', '.join(names)}: say which of them"
            f" decides, for example {names[0]}_score/mean"
        )
    if rollout_backend is not None and not isinstance(rollout_backend, RolloutBackend):
        raise TypeError(
            f"rollout_backend is a {type(rollout_backend).__name__}, which lacks generate(prompt_ids, params, keys) or"
            " sync(model, version); see onetrunk.rollouts.base.RolloutBackend"
        )
    if rollout_backend is not None and args.use_vllm:
        raise ValueError(
            f"use_vllm is set and rollout_backend is a {type(rollout_backend).__name__}; give one of them"
        )
    if rollout_backend is not None and args.rollout_backend != "local":
        raise ValueError(
            f"rollout_backend is {args.rollout_backend!r} in the config and a {type(rollout_backend).__name__} was"
            " passed; give one of them"
        )


def check_stage_training(args: PPOConfig, quantization_config: Any, scores_on_trunk: bool) -> None:
    """Check before the model loads what training in pipeline stages cannot carry out."""
    if not args.pipeline_training:
        return
    if quantization_config is not None:
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
    if isinstance(backend, VLLMBackend) and backend.keep_versions < args.versions_in_use:
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


def reject_tensor_parallelism(setting: str, why: str) -> None:
    """Raise ValueError if the launch divides the layers over its processes; `why` also says what to change."""
    layout = launch_layout()
    if layout is not None and layout.tensor > 1:
        raise ValueError(f"{setting} is not supported with tensor parallelism, {why}")


def check_optimizer(optimizer: Any) -> None:
    """Raise ValueError for a schedule-free optimizer, which does not evaluate and save the weights that it trains."""
    if all(callable(getattr(optimizer, mode, None)) for mode in ("train", "eval")):
        raise ValueError(
            f"the optimizer {type(optimizer).__name__} has modes, train() and eval():"
            f" {REFUSED_OPTIMIZERS['schedule_free']}; use one without, such as torch.optim.AdamW"
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
    check_attention(kwargs.get("attn_implementation"))
    if isinstance(model, str):
        check_decoder(load_config(model, **source_of(kwargs)), model)
    check_new_adapter(peft_config, model, kwargs)


def check_lengths(model: str | PreTrainedModel | PeftModel, args: PPOConfig, datasets: list[Dataset]) -> None:
    """Check that the model has the tokens of all prompts, and positions for prompt and completion."""
    prompts = [ids for dataset in datasets for ids in dataset["prompt_ids"]]
    longest = max(map(len, prompts))
    most = longest + args.max_completion_length
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


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, name: str, rows: Sequence[Dataset], vocab_size: int) -> None:
    """Check that a tokenizer has a chat template if the rows need one, and that the model has its token ids.

    Args:
        tokenizer: of the model.
        name: where it was loaded from.
        rows: with texts and conversations in any of TEXT_COLUMNS.
        vocab_size: entries of the model's embedding.
    """
    columns = [dataset[column] for dataset in rows for column in TEXT_COLUMNS if column in dataset.column_names]
    if any(isinstance(values[0], list) for values in columns) and not tokenizer.chat_template:
        raise ValueError(
            f"the rows are conversations and the tokenizer of {name} has no chat template; take an instruct model's"
            " tokenizer, write a chat_template.jinja into its folder, or give the rows as text"
        )
    special = [i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id) if i is not None]
    largest = max(special, default=0)
    if len(tokenizer) > vocab_size:  # Some models leave out tokens that no text has.
        cells = [[cell] if isinstance(cell, str) else cell for values in columns for cell in values]
        texts = [part if isinstance(part, str) else part["content"] or "" for cell in cells for part in cell]
        largest = max([largest, *(i for ids in tokenizer(texts, verbose=False)["input_ids"] for i in ids)])
    if largest >= vocab_size:
        raise ValueError(
            f"the tokenizer of {name} gives token id {largest} and the model knows {vocab_size} tokens; take the"
            " tokenizer that belongs to the model"
        )


def source_of(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the keywords that choose the source of a model."""
    return {key: kwargs[key] for key in ("revision", "trust_remote_code") if key in kwargs}
