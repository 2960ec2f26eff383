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
from onetrunk.data.sharded import known_rows
from onetrunk.models.adapters import fit_layers, parse_adapter_layers, policy_config
from onetrunk.models.base_model import check_supported, decoder_layers
from onetrunk.models.loading import load_config
from onetrunk.ppo.config import plan_batches
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
    }
    for title, lines in sections.items():
        print(f"\n{title}")
        print("\n".join(f"  {line}" for line in lines))
    print("\nmemory and time: onetrunk plan")


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
