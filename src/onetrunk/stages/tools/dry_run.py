"""`onetrunk ppo --dry_run`: what a run would do, without loading weights, training, or writing anything.

Settings, rows, tokenizer and the model's config are read and checked as in a run. Sizes come from the config: the
model is built without memory for its weights, to count what trains.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedConfig

from onetrunk.checkpoints.folders import require_free
from onetrunk.costs import ModelShape, host_memory_bytes, kept_activations_bytes, trunk_states_bytes
from onetrunk.data.sharded import known_rows
from onetrunk.models.adapters import fit_layers, parse_adapter_layers, policy_config
from onetrunk.models.base_model import check_supported, decoder_layers
from onetrunk.models.loading import load_config
from onetrunk.ppo.config import plan_batches
from onetrunk.ppo.memory_check import GIB, sampled_bytes
from onetrunk.ppo.setup import (
    check_lengths,
    join_stages,
    longest_prompt_of,
    policy_tokenizer,
    prepare_dataset,
    tokens_of,
)
from onetrunk.stages.arguments import ModelArguments, PPOArguments, PPODataArguments
from onetrunk.stages.rows import check_tokenizer, load_training_rows, prompt_rows

# A trained float32 weight, its gradient, and two numbers of Adam.
TRAINED_BYTES, TRAINED_BYTES_8BIT = 16, 10


@dataclass(frozen=True)
class ModelSize:
    """Numbers of a policy: layers, the first adapted one, weights of the base and those that train."""

    num_layers: int
    first_layer: int
    base: int
    trained: int


def dry_run(data: PPODataArguments, args: PPOArguments, model_args: ModelArguments, *judges: Any) -> None:
    """Print what a run with these settings would do; `judges` are the settings of judges, which are not loaded."""
    name = model_args.model_name_or_path
    if args.resume_from_checkpoint is None:
        require_free(args.output_dir, args.overwrite_output_dir)
    join_stages(args)
    kwargs = {**model_args.init_kwargs(), **(args.model_init_kwargs or {})}
    source = {key: kwargs[key] for key in ("revision", "trust_remote_code") if key in kwargs}
    config = load_config(name, **source)
    check_supported(config)
    size = model_size(config, model_args.peft_config(), args)
    rows, held_out = load_training_rows(data, args.seed, prompt_rows)
    tokenizer = policy_tokenizer(name, None, kwargs)
    known = [known_rows(part) for part in (rows, held_out) if part is not None]
    check_tokenizer(tokenizer, name, known, config.vocab_size)
    tokens_of(args.stop_tokens or [], tokenizer)
    prepared = [prepare_dataset(part, tokenizer, args) for part in (rows, held_out) if part is not None]
    check_lengths(name, args, [known_rows(part) for part in prepared])
    longest = longest_prompt_of(prepared[0], args)
    print("dry run: nothing is trained or written")
    sections = {
        "rows and weights": _size_lines(prepared[0], longest, size),
        "batches and steps": _batch_lines(args, len(prepared[0])),
        "memory": memory_lines(config, size, args, model_args, longest),
    }
    for title, lines in sections.items():
        print(f"\n{title}")
        print("\n".join(f"  {line}" for line in lines))


def model_size(config: PreTrainedConfig, peft_config: LoraConfig, args: PPOArguments) -> ModelSize:
    """Return the numbers of a policy, from its config; no memory is taken for weights."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        layers = decoder_layers(model)
        first = parse_adapter_layers(args.adapter_layers, len(layers))
        lora = policy_config(peft_config, first, len(layers))
        fit_layers(lora, layers)
        base = sum(weight.numel() for weight in model.parameters())
        policy = get_peft_model(model, lora)
    adapter = sum(weight.numel() for weight in policy.parameters() if weight.requires_grad)
    head = config.get_text_config().hidden_size + 1
    return ModelSize(len(layers), first, base, adapter * (2 if args.value_head == "adapter" else 1) + head)


def _size_lines(rows: Any, longest: int, size: ModelSize) -> list[str]:
    adapted = f"layers {size.first_layer} to {size.num_layers - 1}" if size.first_layer else "all layers"
    return [
        f"{len(rows):,} prompts, of at most {longest} tokens",
        f"{size.base:,} frozen weights; {size.trained:,} that train, in {adapted}",
    ]


def _batch_lines(args: PPOArguments, num_prompts: int) -> list[str]:
    plan = plan_batches(args, args.world_size)
    per_pass = math.ceil(num_prompts / args.rollout_batch_size)
    steps = (
        args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * per_pass * args.slots_per_rollout)
    )
    rollouts = math.ceil(steps / args.slots_per_rollout)
    completions = rollouts * args.rollout_batch_size * args.num_generations
    return [
        f"rollout: {args.rollout_batch_size} prompts x {args.num_generations} completions on {args.world_size}"
        f" process(es): {plan.rows_per_rank} completions each",
        f"update: {args.num_ppo_epochs} epochs x {args.num_minibatches} minibatches of {plan.rows_per_minibatch}"
        f" completions per process = {args.slots_per_rollout} optimizer steps per rollout",
        f"forward: at most {plan.rows_per_pack} rows"
        + (f" and {args.microbatch_tokens} tokens" if args.microbatch_tokens else ""),
        f"run: {rollouts} rollouts = {steps} optimizer steps, {completions:,} completions of at most"
        f" {args.max_completion_length} tokens, {rollouts / per_pass:.2f} passes over the prompts",
    ]


def memory_lines(
    config: PreTrainedConfig, size: ModelSize, args: PPOArguments, model: ModelArguments, longest: int
) -> list[str]:
    """Return the estimated bytes of a process, one line each. A run measures them at its start (check_memory)."""
    if args.pipeline_training:
        return ["not estimated for training stages; `onetrunk plan` does"]
    shape, plan = ModelShape.from_config(config.get_text_config()), plan_batches(args, args.world_size)
    itemsize = _weight_bytes(config, model)
    compute = 2 if args.bf16 or args.fp16 else max(2, math.ceil(itemsize))
    width = longest + args.max_completion_length
    decoding = min(plan.rows_per_rank, args.max_rollout_rows or plan.rows_per_rank)
    tokens = plan.rows_per_pack * width
    tokens = min(tokens, args.microbatch_tokens or tokens)
    trained_layers = size.num_layers - size.first_layer
    kept_for_backward = kept_activations_bytes(shape, tokens, trained_layers, compute, args.activation_checkpointing)
    sampling = sampled_bytes(args, shape, decoding, width, compute)
    parts = {
        "weights of the base": int(size.base * itemsize),
        "adapters, gradients, optimizer": size.trained
        * (TRAINED_BYTES_8BIT if "8bit" in str(args.optim) else TRAINED_BYTES),
        "states of the frozen layers": (
            trunk_states_bytes(shape, plan.rows_per_rank * width, compute)
            if size.first_layer and args.trunk_cache in ("auto", "device")
            else 0
        ),
        f"while sampling {decoding} rows": 0 if args.use_vllm else sampling,
        f"in the largest forward, {tokens} tokens": kept_for_backward,
    }
    *kept, sampled, updated = parts.values()
    peak = sum(kept) + max(sampled, updated)
    on_cuda = args.device.type == "cuda"
    total = torch.cuda.get_device_properties(args.device).total_memory if on_cuda else host_memory_bytes()
    lines = [f"{value / GIB:9.3f} GiB {what}" for what, value in parts.items() if value]
    where = f"{total / GIB:.1f} GiB of {args.device}"
    lines.append(f"{peak / GIB:9.3f} GiB estimated peak of {where}; the run measures it before the first rollout")
    if peak > total:
        lines.append(
            "too much: lower per_device_train_batch_size, microbatch_tokens, max_rollout_rows or"
            " max_completion_length, set activation_checkpointing, or load_in_4bit"
        )
    return lines


def _weight_bytes(config: PreTrainedConfig, model: ModelArguments) -> float:
    if model.load_in_4bit:
        return 0.55  # With the constants of its blocks.
    if model.load_in_8bit:
        return 1.0
    dtype = model.dtype if model.dtype not in (None, "auto") else str(config.dtype or "float32")
    return 4.0 if str(dtype).endswith("float32") else 2.0
