"""PPOConfig, the settings of PPO (`settings.py`) with those of TrainingArguments, and their batch arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import TrainingArguments

from onetrunk.parallel.groups import num_data_processes
from onetrunk.ppo.foreign_names import explain_unknown_keys
from onetrunk.ppo.settings import PPOSettings
from onetrunk.utils.options import documented
from onetrunk.utils.redaction import SecretFreeArguments


@documented
@dataclass(repr=False)
class PPOConfig(PPOSettings, SecretFreeArguments, TrainingArguments):
    """Settings of a PPO run.

    Batch arithmetic: 2 processes, rollout_batch_size 64, num_generations 1, num_minibatches 4, num_ppo_epochs 2 give
    32 completions per process and rollout, 8 per optimizer step and process, and 8 optimizer steps per rollout. A
    forward holds at most per_device_train_batch_size rows and, if set, microbatch_tokens tokens; neither changes the
    gradient.

    Raises:
        ValueError: a value out of range, settings that contradict each other, or a key of another trainer.
    """

    # Not a field: scripts written for TRL read it. Remote code is asked for in model_init_kwargs, with its commit.
    trust_remote_code = False

    def __new__(cls, *args: Any, **kwargs: Any) -> PPOConfig:
        explanation = explain_unknown_keys(cls, kwargs)
        if explanation:
            raise ValueError(f"PPOConfig: {explanation}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if self.fp16 and (self.use_cpu or not torch.cuda.is_available()):
            raise ValueError("fp16 needs a GPU with its gradient scaler; set bf16, or leave both out on a CPU")
        if self.bf16 is None:
            self.bf16 = bf16_by_default(self)
        super().__post_init__()


def bf16_by_default(args: TrainingArguments) -> bool:
    """Return whether bf16 is on by default: without fp16, on an accelerator that supports it."""
    return not args.fp16 and not args.use_cpu and torch.cuda.is_available() and torch.cuda.is_bf16_supported()


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
