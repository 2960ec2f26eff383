"""Every key of PPOConfig changed where a run goes on: refused, refused unless that is meant, or free."""

import dataclasses
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from accelerate import Accelerator
from datasets import Dataset

from onetrunk.checkpoints.resume_settings import is_free
from onetrunk.parallel.groups import DataParallel
from onetrunk.ppo import stream_state as rules
from onetrunk.ppo.config import PPOConfig
from onetrunk.rewards.combine import RewardSet
from tests.ppo.support import even_share, make_config, make_trainer

FIELDS = [f.name for f in dataclasses.fields(PPOConfig) if f.init]
# Another value that is allowed, where turning, doubling or naming one is not enough.
OTHERS: dict[str, Any] = {
    "adapter_layers": "top-1", "adam_beta1": 0.5, "adam_beta2": 0.5, "beta": 0.2, "data_seed": 9, "dual_clip": 3.0,
    "entropy_coef": 0.1, "epsilon_high": 0.4, "gamma": 0.9, "kl_target": 1.0, "lam": 0.5,
    "lam_value": 0.5, "length_adaptive_lam": 0.5, "length_penalty": 0.1, "lr_scheduler_type": "constant",
    "lr_scheduler_kwargs": {}, "max_prompt_length": 30, "microbatch_tokens": 64, "max_rollout_rows": 2,
    "missing_eos_penalty": 1.0, "num_ppo_epochs": 2, "num_minibatches": 2, "num_generations": 2,
    "overlong_prompts": "drop", "optim": "sgd", "reward_weights": [2.0], "score_clip": 1.0, "stop_tokens": ["cat"],
    "target_kl": 0.1, "trunk_cache": "off", "truncated_completions": "mask", "value_head": "adapter",
    "value_learning_rate": 0.1, "warmup_steps": 1, "weight_decay": 0.1, "rollout_batch_size": 8,
    "chat_template_kwargs": {"x": 1}, "capture_trunk_states": False, "save_strategy": "steps", "report_to": ["none"],
    "logging_strategy": "epoch", "max_grad_norm": 0.5, "kl_estimator": "k3",
    "eval_strategy": "epoch", "hub_strategy": "end", "max_unscored_fraction": 0.5, "epsilon": 0.4,
    "alarm_limits": {"kl": 5.0}, "stop_on_alarm": ["kl"],
    "schedule": "one_step", "max_staleness": 2, "vllm_server_base_url": ["http://b"],
    "vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_clip_min": 0.5, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.5,
    "top_p": 0.5, "top_k": 3,
    "rollout_backend": "pipelined", "pipeline_stages": 3, "pipeline_batches": 4,
    "pipeline_split": [1, 1],
}  # fmt: skip
# What a value needs beside it, before and after the change; and what has to change with it.
BESIDE: dict[str, dict[str, Any]] = {
    "overlong_prompts": {"max_prompt_length": 30},
    "kl_estimator": {"kl_in_loss": True, "kl_estimator": "k2"},
    "epsilon_high": {"epsilon": 0.2},
    "max_staleness": {"schedule": "async"},
    "vllm_server_base_url": {"use_vllm": True},
    "vllm_server_timeout": {"use_vllm": True},
    "vllm_request_timeout": {"use_vllm": True},
    "vllm_api_key_env": {"use_vllm": True},
    "vllm_mode": {"use_vllm": True},
    "vllm_gpu_memory_utilization": {"use_vllm": True, "vllm_mode": "colocate"},
    "vllm_enable_sleep_mode": {"use_vllm": True, "vllm_mode": "colocate"},
    "pipeline_stages": {"rollout_backend": "pipelined"},
    "pipeline_batches": {"rollout_backend": "pipelined"},
    "pipeline_split": {"rollout_backend": "pipelined"},
    "pipeline_training": {"rollout_backend": "pipelined"},
}
ALONG: dict[str, dict[str, Any]] = {
    "kl_in_loss": {"kl_estimator": "k2"},
    "load_best_model_at_end": {"eval_strategy": "epoch", "save_strategy": "epoch"},
    "missing_eos_penalty": {"truncated_completions": "penalize"},
}
# Why no run here can have another value.
REFUSED = (
    "has no meaning here", "must stay", "needs a GPU", "requires Ampere", "process group",
    "here activation_checkpointing",
)  # fmt: skip
BOUND = {*rules.SETTINGS["place"], "value_learning_rate", "kl_target"}
KEPT = set(rules.SETTINGS["optimizer"]) - {"value_learning_rate"}
STEERING = {
    "temperature", "top_p", "top_k", "beta", "kl_in_loss", "adapter_layers", "max_prompt_length", "overlong_prompts",
    "max_completion_length", "stop_tokens", "chat_template_kwargs", "reward_weights", "missing_eos_penalty",
    "length_penalty", "truncated_completions", "normalize_scores", "score_clip", "kl_estimator", "kl_horizon", "gamma",
    "lam", "lam_value", "length_adaptive_lam", "whiten_advantages", "whiten_rewards", "epsilon",
    "epsilon_high", "dual_clip", "value_clip", "value_coef", "entropy_coef", "target_kl",
    "value_pretraining_rollouts", "value_head", "capture_trunk_states", "lr_scheduler_type", "lr_scheduler_kwargs",
    "warmup_steps", "max_grad_norm", "optim", "optim_args", "bf16", "fp16", "tf32", "full_determinism",
    "schedule", "max_staleness", "use_vllm",
    "vllm_importance_sampling_correction", "vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max",
    "vllm_importance_sampling_clip_min", "vllm_mode",
}  # fmt: skip


@cache
def parts() -> tuple[Any, Dataset]:
    trainer = make_trainer(mkdtemp())
    return trainer.model, trainer.train_dataset


def settings_of(**changed: Any) -> dict[str, Any]:
    config, (model, rows) = make_config("out", **changed), parts()
    return rules.run_settings(config, rows, DataParallel(Accelerator(cpu=True)), model, RewardSet([even_share]))


def other_value(name: str) -> Any:
    if name in OTHERS:
        return OTHERS[name]
    value = getattr(make_config("out"), name)
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value * 2 + 1
    return "other" if value is None or isinstance(value, str) else None


def compare(before: dict[str, Any], now: dict[str, Any], is_allowed: bool, in_rollout: bool = False) -> str | None:
    """Return what resuming says; None: nothing."""
    try:
        rules.check_settings(Path("checkpoint-4/state.json"), before, now, in_rollout, is_allowed)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", [name for name in FIELDS if name != "output_dir"])
def test_every_key_is_refused_or_free_as_it_is_sorted(name):
    beside = BESIDE.get(name, {})
    before = settings_of(**beside)
    try:
        now = settings_of(**{**beside, **ALONG.get(name, {}), name: other_value(name)})
    except (ValueError, TypeError, ImportError) as error:
        assert any(reason in str(error) for reason in REFUSED), f"{name}: {error}"
        return
    plain, meant = compare(before, now, is_allowed=False), compare(before, now, is_allowed=True)
    if name in BOUND:
        assert name in plain and name in meant
    elif name in KEPT:
        assert f"{name} stays" in plain and meant is None
    elif name in STEERING:
        assert f"{name}: " in plain and "allow_config_change" in plain and meant is None
    else:
        assert is_free(name) or name in rules.FREE_IN_PPO, f"{name} is not sorted: say what it changes, here and there"
        assert plain is None and meant is None


def test_no_key_is_sorted_twice_and_none_is_unknown():
    for name in BOUND | KEPT | STEERING:
        assert name in FIELDS and not is_free(name), name
    assert not BOUND & KEPT and not BOUND & STEERING and not KEPT & STEERING


@pytest.mark.parametrize("name", ["temperature", "beta"])
def test_in_the_middle_of_a_rollout_what_it_was_sampled_under_is_bound(name):
    said = compare(settings_of(), settings_of(**{name: other_value(name)}), is_allowed=True, in_rollout=True)
    assert f"{name} " in said and "start a new run" in said
