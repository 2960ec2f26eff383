"""PPOConfig, the settings of PPO (`settings.py`) with those of TrainingArguments, and their batch arithmetic."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field, fields, make_dataclass
from typing import Any, get_type_hints

import torch
from transformers import TrainingArguments
from trl import GRPOConfig

from onetrunk.parallel.groups import num_data_processes
from onetrunk.ppo.foreign_names import REASONS, explain_unknown_keys
from onetrunk.ppo.settings import PPOSettings
from onetrunk.utils.options import documented
from onetrunk.utils.redaction import SecretFreeArguments

_OURS = PPOSettings.__dataclass_fields__.keys() | TrainingArguments.__dataclass_fields__.keys()
_TRL_TYPES = get_type_hints(GRPOConfig)
# The names that only TRL's GRPOConfig has, and their defaults there. TrlParser sees fields only; None: not given.
TRL_DEFAULTS = {f.name: f.default for f in fields(GRPOConfig) if f.name not in _OURS and f.init}
TRLNames = make_dataclass("TRLNames", [(name, _TRL_TYPES[name] | None, field(default=None)) for name in TRL_DEFAULTS])


@documented
@dataclass(repr=False)
class PPOConfig(PPOSettings, SecretFreeArguments, TRLNames, TrainingArguments):
    """Settings of a PPO run.

    Batch arithmetic: 2 processes, rollout_batch_size 64, num_generations 1, num_minibatches 4, num_ppo_epochs 2 give
    32 completions per process and rollout, 8 per optimizer step and process, and 8 optimizer steps per rollout. A
    forward holds at most per_device_train_batch_size rows and, if set, microbatch_tokens tokens; neither changes the
    gradient.

    Raises:
        ValueError: a value out of range, settings that contradict each other, or a key of another trainer.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> PPOConfig:
        explanation = explain_unknown_keys(cls, kwargs)
        if explanation:
            raise ValueError(f"PPOConfig: {explanation}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if self.fp16 and (self.use_cpu or not torch.cuda.is_available()):
            raise ValueError("fp16 needs a GPU with its gradient scaler; set bf16, or leave both out on a CPU")
        super().__post_init__()
        for name, default in TRL_DEFAULTS.items():
            if getattr(self, name) not in (None, default):
                reason = REASONS.get(name, "PPO here has nothing like it; leave it out")
                raise ValueError(f"{name} is {getattr(self, name)!r}: {reason}")
            setattr(self, name, None)
        self.trust_remote_code = False  # Scripts written for TRL pass it to from_pretrained.

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as JSON values, without TRL's names, which have no value any more."""
        return {name: value for name, value in super().to_dict().items() if name not in TRL_DEFAULTS}


# What a run without held-out prompts prints at startup.
HOLD_OUT = (
    "no prompts are held out, so what is learned shows in the training rollouts alone; set eval_size or"
    " eval_dataset_name (eval_dataset of PPOTrainer) to score the same prompts before and after"
)


@dataclass(frozen=True)
class BatchPlan:
    """How many completions of a process are in a rollout, in an optimizer step, and at most in one forward."""

    rows_per_rank: int
    rows_per_minibatch: int
    rows_per_pack: int


def planned_steps(config: PPOConfig, num_prompts: int) -> int:
    """Return the optimizer steps of a run over `num_prompts` training prompts, rounded as Trainer rounds them."""
    if config.max_steps > 0:
        return config.max_steps
    steps_per_pass = math.ceil(num_prompts / config.rollout_batch_size) * config.steps_per_rollout
    return math.ceil(config.num_train_epochs * steps_per_pass)


def check_pretraining(config: PPOConfig, num_prompts: int) -> None:
    """Raise ValueError for a run whose rollouts are all for the value alone."""
    pretraining = config.value_pretraining_rollouts
    if pretraining * config.steps_per_rollout >= planned_steps(config, num_prompts):
        raise ValueError(
            f"value_pretraining_rollouts {pretraining} takes all rollouts, so the policy would not train; lower it, or"
            " raise num_rollouts"
        )


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


def describe_steps(config: PPOConfig) -> str:
    """Return a line about what the settings mean: how many completions a rollout and an optimizer step have."""
    rows, steps = config.rollout_batch_size * config.num_generations, config.steps_per_rollout
    line = (
        f"rollout: {rows} completions ({config.rollout_batch_size} prompts x {config.num_generations}), then {steps}"
        f" steps of {rows // config.num_minibatches} completions"
    )
    theirs = config.per_device_train_batch_size * config.grpo_accumulation * config.world_size
    is_default = config.rollout_batch_size == PPOConfig.rollout_batch_size
    return f"{line}; in GRPOTrainer the same settings give steps of {theirs}" if is_default else line


def describe_cpu(dtype: torch.dtype, threads: int, load: float, cores: int) -> list[str]:
    """Return what a run on a CPU should know of its speed and metrics, a line each.

    Args:
        dtype: of the base model.
        threads: that torch uses.
        load: mean number of other processes that want to run.
        cores: of the machine.
    """
    lines = []
    if dtype.itemsize < 4:
        name = str(dtype).removeprefix("torch.")
        lines.append(
            f"precision: on a CPU only a float32 base, not a {name} one, samples with the adapter merged into it;"
            " rounding alone makes sampling/logprob_gap_mean up to 0.05"
        )
    if threads > 1 and threads + load > 1.25 * cores:
        lines.append(
            f"threads: torch uses {threads}, and other processes keep {load:.1f} of {cores} cores busy; on a busy"
            " machine OMP_NUM_THREADS=1 can be many times faster"
        )
    return lines


def describe_startup(config: PPOConfig, trunk: str, dtype: torch.dtype, holds_out: bool) -> str:
    """Return the lines that a run prints at startup.

    Args:
        trunk: the line about the frozen layers.
        dtype: of the base model.
        holds_out: whether there are held-out prompts.
    """
    lines = [describe_steps(config), trunk]
    if config.device.type == "cpu":
        # The process itself counts as 1.
        load = max(0.0, os.getloadavg()[0] - 1) if hasattr(os, "getloadavg") else 0.0
        lines += describe_cpu(dtype, torch.get_num_threads(), load, os.cpu_count() or 1)
    return "\n".join(lines if holds_out else [*lines, HOLD_OUT])
