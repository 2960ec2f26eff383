"""Names that people bring from TRL and other trainers, and their names here; other keys get the most similar one.

The module imports no library: the command line explains keys before it imports any.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

# Names that every stage reads as those of the installed transformers: 5.23 has new ones.
RENAMED = {
    "gradient_checkpointing": "activation_checkpointing",
    "gradient_checkpointing_kwargs": "activation_checkpointing_kwargs",
}
if [int(number) for number in version("transformers").split(".")[:2]] < [5, 23]:
    RENAMED = {new: old for old, new in RENAMED.items()}
# Keys of other trainers, and what to write here.
_RENAMES = {
    theirs: ours
    for ours, names in {
        "model_name_or_path": "base_model model model_name sft_model_path pretrain",
        "dtype": "torch_dtype",
        "lora_r": "r lora_rank",
        "lora_target_modules": "target_modules",
        "dataset_name": "dataset data_path",
        "resume_from_checkpoint": "resume",
        "reward_funcs": "reward_model reward_model_path reward_pretrain reward_fn",
        "learning_rate": "lr",
        "value_learning_rate": "critic_learning_rate",
        "per_device_train_batch_size": "micro_train_batch_size micro_batch_size",
        "num_generations": "n_samples_per_prompt",
        "num_ppo_epochs": "ppo_epochs num_iterations",
        "num_minibatches": "steps_per_generation num_mini_batches",
        "max_completion_length": "max_new_tokens generate_max_len response_length",
        "max_prompt_length": "prompt_max_len",
        "max_length": "max_seq_length cutoff_len sequence_len",
        "temperature": "temp",
        "beta": "init_kl_coef kl_coef",
        "epsilon": "clip_range eps_clip cliprange",
        "dual_clip": "delta",
        "value_clip": "cliprange_value",
        "value_coef": "vf_coef",
        "vllm_importance_sampling_clip_max": "vllm_importance_sampling_cap",
        "entropy_coef": "ent_coef",
        "lam": "gae_lambda lambd",
        "eval_strategy": "evaluation_strategy",
        "run_name": "exp_name",
        "vllm_server_base_url": "vllm_server_host vllm_server_port",
        "alarm_limits": "alarm_kl alarm_entropy",
    }.items()
    for theirs in names.split()
}
_SAMPLER = "sampling here follows the policy itself, or its top_p or top_k; leave it out"
# Keys without a counterpart, or with one of another meaning.
_REASONS = {
    "generation_batch_size": "here rollout_batch_size, which counts prompts and not completions",
    "mask_truncated_completions": "here truncated_completions: mask",
    "scale_rewards": "here normalize_scores and whiten_advantages",
    "loss_type": "belongs to GRPO's objectives; override PPOTrainer.compute_loss for an objective of your own",
    "min_p": _SAMPLER,
    "repetition_penalty": _SAMPLER,
    "warmup_ratio": "here warmup_steps: a number below 1 is a share of all steps",
    "total_episodes": "here num_rollouts (rollouts of rollout_batch_size prompts), or num_train_epochs",
    "ref_model": "the reference is the frozen base, or a copy of the adapter that PPO starts from; leave it out",
    "tokenizer": "the tokenizer is that of model_name_or_path; leave it out",
    "num_processes": "the launch decides: accelerate launch --num_processes N scripts/STAGE.py ...",
    "trust_remote_code": "pass model_init_kwargs: {trust_remote_code: true, revision: <commit>}",
}


def explain_key(key: str, known: Sequence[str], owners: Sequence[str] = ()) -> str:
    """Return the name here of a key from elsewhere, a reason why there is none, or the most similar known key."""
    name = _RENAMES.get(key)
    if name in known:
        return f"{key}: here {name}"
    if owners:
        return f"{key}: an option of onetrunk {', '.join(owners)}, which this command does not have"
    reason = _REASONS.get(key, "")
    if reason and (not reason.startswith("here ") or reason.split()[1].rstrip(",:") in known):
        return f"{key}: {reason}"
    if name:
        return f"{key}: {name} of other commands, which this command does not have"
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    return f"unknown key {key!r}" + (f": did you mean {near[0]!r}?" if near else "")


def explain_unknown_keys(config_class: type, keys: dict[str, Any]) -> str | None:
    """Return an explanation of the keys that `config_class` does not have, None if it has all."""
    fields = {f.name: f.default for f in dataclasses.fields(config_class) if f.init}
    known = [name for name in fields if name != "trust_remote_code"]
    unknown = [key for key in keys if key not in known and not (key in fields and keys[key] == fields[key])]
    return "; ".join(explain_key(key, known) for key in unknown) or None
