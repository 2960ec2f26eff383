"""`onetrunk ppo --dry_run`: what a run would do, without loading weights, training, or writing anything.

Settings, rows, tokenizer and the model's config are read and checked as in a run.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from onetrunk.checkpoints.folders import require_free
from onetrunk.data.sharded import known_rows
from onetrunk.models.adapters import check_targets, parse_adapter_layers
from onetrunk.models.base_model import check_supported, decoder_layers
from onetrunk.models.loading import load_config
from onetrunk.ppo.config import plan_batches
from onetrunk.ppo.setup import (
    ModelInputs,
    check_lengths,
    join_stages,
    load_episodes,
    longest_prompt_of,
    policy_tokenizer,
    prepare_dataset,
    tokens_of,
)
from onetrunk.stages.arguments import ModelArguments, PPOArguments, PPODataArguments
from onetrunk.stages.rows import check_tokenizer, load_training_rows, prompt_rows


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
    with torch.device("meta"):  # No memory is taken for weights.
        model = AutoModelForCausalLM.from_config(config)
    parse_adapter_layers(args.adapter_layers, len(decoder_layers(model)))
    check_targets(model_args.peft_config(), model)
    rows, held_out = load_training_rows(data, args.seed, partial(prompt_rows, is_open=bool(data.environment)))
    tokenizer = policy_tokenizer(name, None, kwargs)
    check_tokenizer(tokenizer, name, (rows, held_out), config.vocab_size)
    tokens_of(args.stop_tokens or [], tokenizer)
    episodes = load_episodes(ModelInputs(name, None, **data.episode_parts()), args, tokenizer)
    prepared = [prepare_dataset(part, tokenizer, args, episodes) for part in (rows, held_out) if part is not None]
    check_lengths(name, args, [known_rows(part) for part in prepared])
    longest = longest_prompt_of(prepared[0], args)
    print("dry run: nothing is trained or written")
    print(f"rows: {len(prepared[0]):,} prompts, of at most {longest} tokens")
    if episodes is not None:
        turns = f"at most {args.max_turns} turns" if args.max_turns else "max_turns is not set"
        print(f"episodes: {episodes}; {turns}")
    print("\n".join(_batch_lines(args, len(prepared[0]))))
    print("weights, memory and time: onetrunk plan")


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
