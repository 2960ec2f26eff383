"""MemoryCheck runs the largest batch of a PPO run once, when training begins.

It does a forward and backward at full length and discards the gradients: weights, optimizer and random numbers
stay as they are, and an out-of-memory error appears in the first minute. `onetrunk plan` adds what is allocated later.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState

from onetrunk.models.speedups.memory_use import is_out_of_memory, offloaded_activations
from onetrunk.models.trunk import TrunkModel
from onetrunk.ops.packing import PackLimits, largest_rows, make_pack
from onetrunk.ppo.config import PPOConfig, plan_batches
from onetrunk.ppo.monitoring.metrics import peak_gib
from onetrunk.rollouts.base import longest_row
from onetrunk.types import Pack, to_device


def largest_pack(args: PPOConfig, longest_prompt: int) -> Pack:
    """Return the pack with the most tokens that a rollout can have on this process."""
    limits = PackLimits.of(args, plan_batches(args, args.world_size).rows_per_pack)
    rows = largest_rows(longest_prompt, longest_row(longest_prompt, args) - longest_prompt, limits)
    return make_pack([[0] * prompt for prompt, _ in rows], [[0] * completion for _, completion in rows], 0)


def run_largest_pack(model: TrunkModel, pack: Pack, args: PPOConfig) -> None:
    """Score and train on `pack`, and discard the gradients; raises RuntimeError if memory runs out."""
    try:
        model.train()
        if args.pipeline_training:
            from onetrunk.parallel.staged import rehearse_in_stages

            rehearse_in_stages(model, pack, args.temperature, args.entropy_coef > 0)
            return
        with torch.no_grad():
            states = model(pack=pack, roles=("trunk",)).states
            # As `Forward` hands them in: accelerate's wrapper of forward has made them float32.
            states = None if states is None else states.to(model.states_dtype)
            roles = ("policy", "value", "reference", *(() if model.reward_branch is None else ("reward",)))
            model(pack=pack, roles=roles, states=states, temperature=args.temperature)
        with offloaded_activations(model) if args.activation_offloading else contextlib.nullcontext():
            settings = {"temperature": args.temperature, "entropy_grad": args.entropy_coef > 0}
            output = model(pack=pack, roles=("policy",), states=states, **settings)
        # Not `backward`: DDP would count its gradients as those of a step.
        trained = [p for p in model.parameters() if p.requires_grad]
        torch.autograd.grad(output.logprobs.sum(), trained, allow_unused=True)
    except (torch.OutOfMemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        rows, width = pack.input_ids.shape
        raise RuntimeError(
            f"out of memory with the largest pack of this run, {rows} rows x {width} tokens"
            f" ({str(error).splitlines()[0]}); lower per_device_train_batch_size, microbatch_tokens or"
            " max_completion_length, or set activation_checkpointing, or load the base in 4 bit"
        ) from error


class MemoryCheck(TrainerCallback):
    """Runs the largest pack when training begins, and prints its peak."""

    def __init__(self, longest_prompt: int):
        self.longest_prompt = longest_prompt

    def on_train_begin(
        self, args: PPOConfig, state: TrainerState, control: TrainerControl, model: TrunkModel, **kwargs: Any
    ) -> None:
        if not args.check_memory:
            return
        run_largest_pack(model, to_device(largest_pack(args, self.longest_prompt), args.device), args)
        if state.is_world_process_zero and not args.disable_tqdm:
            tqdm.write(f"memory: {peak_gib(args.device):.1f} GiB at the peak of this process so far", file=sys.stderr)
