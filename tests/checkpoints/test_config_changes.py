"""Every key of PPOConfig changed where a run goes on: refused, refused unless that is meant, or free."""

import dataclasses
import re
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from accelerate import Accelerator
from datasets import Dataset

from onetrunk.checkpoints.resume_settings import is_free
from onetrunk.parallel.groups import RowGroups
from onetrunk.ppo import stream_state as rules
from onetrunk.ppo.config import TRL_DEFAULTS, PPOConfig
from onetrunk.ppo.monitoring.alarm_rules import RULES
from onetrunk.rewards.combine import RewardSet
from tests.ppo.support import even_share, make_config, make_trainer

FIELDS = [f.name for f in dataclasses.fields(PPOConfig) if f.init and f.name not in TRL_DEFAULTS]
BOUND = set(rules.SETTINGS["place"])
KEPT = set(rules.SETTINGS["optimizer"])
STEERING = {
    "temperature", "top_p", "top_k", "beta", "kl_in_loss", "adapter_layers", "max_prompt_length", "overlong_prompts",
    "max_completion_length", "stop_tokens", "chat_template_kwargs", "reward_weights", "missing_eos_penalty",
    "length_penalty", "truncated_completions", "normalize_scores", "score_clip", "kl_estimator", "kl_horizon", "gamma",
    "gae_unit", "lam", "lam_value", "length_adaptive_lam", "whiten_advantages", "whiten_rewards", "epsilon",
    "ratio_unit", "epsilon_high", "dual_clip", "value_steps", "value_learning_rate", "entropy_coef", "target_kl",
    "policy_objective", "dis_epsilon_low", "dis_epsilon_high",
    "value_pretraining_rollouts", "capture_trunk_states", "lr_scheduler_type", "lr_scheduler_kwargs",
    "warmup_steps", "max_grad_norm", "optim", "optim_args", "bf16", "fp16", "tf32", "full_determinism",
    "schedule", "max_staleness", "use_vllm",
    "vllm_importance_sampling_correction", "vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max",
    "vllm_importance_sampling_clip_min", "vllm_mode", "max_turns", "max_turn_length",
    "max_context_length", "max_compactions", "kept_turns", "compaction_prompt",
    "max_observation_characters", "observation_control_tokens",
}  # fmt: skip
# PPO takes only one value of these.
FIXED = set(
    "optim_target_modules gradient_accumulation_steps average_tokens_across_devices label_smoothing_factor deepspeed"
    " bf16_full_eval fp16_full_eval use_liger_kernel liger_kernel_config use_cache neftune_noise_alpha fsdp"
    " fsdp_config auto_find_batch_size include_num_input_tokens_seen prediction_loss_only batch_eval_metrics"
    " ignore_data_skip dataloader_drop_last remove_unused_columns label_names train_sampling_strategy"
    " length_column_name".split()
)


def test_an_alarm_says_which_of_the_settings_that_it_advises_need_a_new_run():
    advised = {name for rule in RULES.values() for name in re.findall(r"\w+", rule.change) if name in FIELDS}
    before = settings_of()
    rejected = {name for name in advised if compare(before, changed(before, name), is_allowed=True) or name in KEPT}
    assert {"rollout_batch_size", "learning_rate"} <= rejected <= rules.NEW_RUN


@cache
def parts() -> tuple[Any, Dataset]:
    trainer = make_trainer(mkdtemp())
    return trainer.model, trainer.train_dataset


@cache
def settings_of(**values: Any) -> dict[str, Any]:
    config, (model, rows) = make_config("out", **values), parts()
    return rules.run_settings(config, rows, RowGroups(Accelerator(cpu=True)), model, RewardSet([even_share]))


def changed(settings: dict[str, Any], name: str) -> dict[str, Any]:
    """Return settings of a run with another value of one, which a free one does not have."""
    if name in settings["steering"]:
        return {**settings, "steering": {**settings["steering"], name: "another"}}
    return {**settings, name: "another"} if name in settings else settings


def compare(before: dict[str, Any], now: dict[str, Any], is_allowed: bool, in_rollout: bool = False) -> str | None:
    """Return what resuming says; None: nothing."""
    try:
        rules.check_settings(Path("checkpoint-4/state.json"), before, now, in_rollout, is_allowed)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", [name for name in FIELDS if name != "output_dir"])
def test_every_key_is_refused_or_free_as_it_is_sorted(name):
    before = settings_of()
    now = changed(before, name)
    plain, meant = compare(before, now, is_allowed=False), compare(before, now, is_allowed=True)
    if name in BOUND:
        assert name in plain and name in meant
    elif name in KEPT:
        assert f"{name} stays" in plain and meant is None
    elif name in STEERING | FIXED:
        assert f"{name}: " in plain and "allow_config_change" in plain and meant is None
    else:
        assert is_free(name) or name in rules.FREE_IN_PPO, f"{name} is not sorted: say what it changes, here and there"
        assert plain is None and meant is None


def test_no_key_is_sorted_twice_and_none_is_unknown():
    for name in BOUND | KEPT | STEERING | FIXED:
        assert name in FIELDS and not is_free(name), name
    assert not BOUND & KEPT and not BOUND & STEERING and not KEPT & STEERING


@pytest.mark.parametrize(("name", "value"), [("temperature", 0.5), ("beta", 0.2)])
def test_in_the_middle_of_a_rollout_what_it_was_sampled_under_is_bound(name, value):
    said = compare(settings_of(), settings_of(**{name: value}), is_allowed=True, in_rollout=True)
    assert f"{name} " in said and "start a new run" in said
