"""PPOConfig: transformers' TrainingArguments and the few fields that PPO on one trunk needs, validated when created.

The fields and their checks are in `settings.py`, which imports neither torch nor transformers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import TrainingArguments

from onetrunk.ppo.foreign_keys import explain_unknown_keys, in_our_names
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
        # A dataclass that inherits has an __init__ of its own, which knows our names only.
        keys = in_our_names(kwargs) if cls.__init__ is PPOConfig.__init__ else kwargs
        explanation = explain_unknown_keys(cls, keys)
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


def _accepting_trl_names(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def __init__(self: PPOConfig, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **in_our_names(kwargs))

    return __init__


PPOConfig.__init__ = _accepting_trl_names(PPOConfig.__init__)
