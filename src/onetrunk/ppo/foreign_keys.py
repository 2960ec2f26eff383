"""Names that people bring from TRL, axolotl, LLaMA-Factory, other trainers and habit, and their names here.

The module imports no library: the command line explains keys before it imports any.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any

_SAMPLER = "sampling here follows the policy itself, or its top_p or top_k: a reshaped distribution makes PPO wrong"
_BACKEND = "rollouts are sampled in process, or on vLLM servers with use_vllm; leave it out"
_OBJECTIVE = "belongs to GRPO's objectives; override PPOTrainer.compute_loss for an objective of your own"

_OBJECTIVES = ("vespo_", "sapo_", "entropy_coef_", "entropy_target")

FOREIGN_KEYS: dict[str, str] = {
    # TRL's GRPOConfig
    "num_iterations": "here num_ppo_epochs",
    "steps_per_generation": "here num_minibatches (optimizer steps per PPO epoch of a rollout)",
    "generation_batch_size": "here rollout_batch_size (prompts per rollout, all processes together)",
    "delta": "here dual_clip (the bound for negative advantages)",
    "mask_truncated_completions": "here truncated_completions: mask",
    "scale_rewards": "here normalize_scores and whiten_advantages",
    "use_adaptive_entropy": "here entropy_coef, a constant",
    "min_p": f"{_SAMPLER}; leave it out, also at 0.0",
    "repetition_penalty": f"{_SAMPLER}; put a penalty into a reward function",
    "generation_kwargs": f"{_SAMPLER}; pass a rollout_backend of your own",
    "use_transformers_paged": _BACKEND,
    "use_transformers_continuous_batching": _BACKEND,
    "transformers_continuous_batching_config": _BACKEND,
    "vllm_tensor_parallel_size": "vllm_mode colocate uses one GPU; give it to a server (onetrunk serve)",
    "vllm_model_impl": "vLLM's own implementations are used; leave it out",
    "vllm_group_port": "adapters reach the server over HTTP, without a port of their own; leave it out",
    "vllm_structured_outputs_regex": f"{_SAMPLER}; leave it out",
    "loss_type": _OBJECTIVE,
    "importance_sampling_level": _OBJECTIVE,
    "top_entropy_quantile": _OBJECTIVE,
    "use_bias_correction_kl": _OBJECTIVE,
    "off_policy_mask_threshold": _OBJECTIVE,
    "multi_objective_aggregation": "scores are summed with reward_weights",
    "cast_lm_head_to_fp32": "load the model in float32 for a float32 head: model_init_kwargs: {dtype: float32}",
    "disable_dropout": "dropout is always 0 here",
    "log_completions_hub_repo": "the sample tables are in output_dir/completions",
    "trust_remote_code": "pass model_init_kwargs: {trust_remote_code: true, revision: <commit>}",
    # TRL's PPOConfig
    "kl_coef": "here beta",
    "cliprange": "here epsilon",
    "cliprange_value": "here value_clip",
    "vf_coef": "here value_coef",
    "response_length": "here max_completion_length",
    "num_mini_batches": "here num_minibatches",
    "total_episodes": "here num_rollouts (rollouts of rollout_batch_size prompts), or num_train_epochs",
    "local_rollout_forward_batch_size": "packs are scored as they are trained: microbatch_tokens",
    "stop_token": "the tokenizer's and the model's EOS end a completion; here stop_tokens names further ones",
    "stop_token_id": "here stop_tokens (as text)",
    "reward_model_path": "pass reward_funcs (PPOTrainer) or reward_funcs in the recipe",
    "sft_model_path": "here model_name_or_path (an adapter folder works)",
    "model_adapter_name": "the policy's adapter is named default",
    "ref_adapter_name": "the reference adapter is a frozen copy that onetrunk keeps",
    "num_sample_generations": "here log_completions",
    "whiten_rewards_and_advantages": "here whiten_rewards, whiten_advantages",
    "ds3_gather_for_generation": "DeepSpeed is not supported yet",
    "exp_name": "here run_name",
}


# Old names that are read as the new ones, in every stage: their names since transformers 5.23.
RENAMED = {
    "gradient_checkpointing": "activation_checkpointing",
    "gradient_checkpointing_kwargs": "activation_checkpointing_kwargs",
}
# Name here -> names elsewhere. The first name that a stage has counts where a name stands twice.
_ELSEWHERE = {
    "model_name_or_path": "base_model model model_name model_path model_id pretrained_model"
    " pretrained_model_name_or_path policy_model pretrain",
    "model_revision": "revision base_model_revision",
    "dtype": "torch_dtype precision model_dtype",
    "attn_implementation": "flash_attention flash_attn attn attention flash_attn_2 attn_impl",
    "load_in_4bit": "quantization_bit quantization qlora bnb_4bit use_qlora four_bit",
    "use_peft": "use_lora lora peft adapter finetuning_type",
    "lora_r": "r rank lora_rank lora_dim lora_R",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
    "lora_target_modules": "target_modules lora_target lora_modules lora_target_linear target_module",
    "dataset_name": "dataset datasets data data_path dataset_path train_file train_data train_dataset data_files"
    " prompt_data prompts prompt_dataset",
    "dataset_split": "split train_split",
    "dataset_config": "subset dataset_subset config_name dataset_config_name",
    "eval_dataset_name": "eval_dataset eval_data eval_file val_file validation_file test_datasets val_dataset",
    "eval_size": "val_size val_set_size test_size validation_size validation_split eval_ratio",
    "output_dir": "output out out_dir output_path save_path save_dir ckpt_path",
    "overwrite_output_dir": "overwrite force overwrite_output",
    "resume_from_checkpoint": "resume auto_resume_from_checkpoints resume_from resume_path load_checkpoint",
    "reward_funcs": "reward_func reward_fn reward reward_function reward_functions reward_model reward_pretrain"
    " remote_rm_url reward_model_name_or_path",
    "learning_rate": "lr actor_learning_rate policy_lr actor_lr",
    "value_learning_rate": "critic_learning_rate critic_lr value_lr vf_lr",
    "lr_scheduler_type": "lr_scheduler scheduler lr_schedule lr_decay_style",
    "warmup_steps": "warmup lr_warmup_steps num_warmup_steps warmup_iters",
    "optim": "optimizer",
    "weight_decay": "wd l2",
    "max_grad_norm": "grad_clip clip_grad clip_grad_norm gradient_clipping max_norm gradient_clip_val",
    "num_train_epochs": "epochs num_epochs n_epochs max_epochs epoch",
    "max_steps": "steps max_iters num_steps total_steps train_steps max_train_steps",
    "num_rollouts": "num_iters total_rollouts num_updates",
    "rollout_batch_size": "batch_size train_batch_size global_batch_size n_prompts",
    "per_device_train_batch_size": "micro_batch_size micro_train_batch_size per_gpu_train_batch_size bs batch_size"
    " train_batch_size per_device_batch_size batch",
    "per_device_eval_batch_size": "eval_batch_size per_gpu_eval_batch_size",
    "num_generations": "n_samples_per_prompt num_samples num_return_sequences group_size n_samples"
    " num_samples_per_prompt",
    "num_ppo_epochs": "ppo_epochs num_iterations max_ppo_epochs update_epochs",
    "num_minibatches": "minibatches nminibatches n_minibatches",
    "max_completion_length": "max_new_tokens generate_max_len max_response_length completion_length max_tokens"
    " max_gen_length response_length",
    "max_prompt_length": "prompt_max_len max_input_length prompt_length",
    "max_length": "max_seq_length max_seq_len sequence_len cutoff_len seq_length seq_len block_size max_len",
    "temperature": "temp sampling_temperature",
    "stop_tokens": "stop eos_tokens stop_sequences stop_strings",
    "beta": "kl kl_beta kl_penalty init_kl_coef init_kl_coeff kl_coeff kl_coef",
    "kl_target": "target",
    "epsilon": "clip_range clip_ratio eps_clip clip_eps clip_param clip_coef clip cliprange",
    "epsilon_high": "clip_ratio_high eps_clip_high",
    "value_clip": "vf_clip vf_clip_param cliprange_value clip_range_vf",
    "value_coef": "vf_coef value_loss_coef vf_loss_coeff critic_coef",
    "entropy_coef": "ent_coef entropy_coeff entropy_loss_coef",
    "gamma": "discount discount_factor",
    "lam": "gae_lambda lambd lambda_ lambda",
    "packing": "sample_packing",
    "train_sampling_strategy": "group_by_length",
    "eval_strategy": "evaluation_strategy",
    "eval_steps": "evals_per_epoch eval_every eval_freq",
    "save_steps": "saves_per_epoch save_every save_freq checkpoint_every",
    "save_total_limit": "max_checkpoints keep_checkpoints",
    "logging_steps": "log_every log_freq log_interval print_every",
    "report_to": "wandb use_wandb logger log_to trackers log_with",
    "run_name": "wandb_name wandb_run_name name exp_name experiment_name",
    "project": "wandb_project project_name",
    "seed": "random_seed",
    "bf16": "bfloat16 use_bf16",
    "use_cpu": "cpu no_cuda",
    "use_vllm": "vllm",
    "push_to_hub": "push upload",
    "hub_model_id": "hub_id repo_id hub_repo push_to_hub_model_id",
    "judge": "judge_name llm_judge",
    "judge_api_key_env": "api_key openai_api_key",
}
# Settings of others without a counterpart, in every stage.
_REASONS = {
    "warmup_ratio": "here warmup_steps: a number below 1 is a share of all steps",
    "mini_batch_size": "here num_minibatches (how many, not how large)",
    "ppo_mini_batch_size": "here num_minibatches (how many, not how large)",
    "tokenizer": "the tokenizer is that of model_name_or_path; leave it out",
    "tokenizer_name": "the tokenizer is that of model_name_or_path; leave it out",
    "tokenizer_name_or_path": "the tokenizer is that of model_name_or_path; leave it out",
    "ref_model": "the reference is the frozen base, or a copy of the adapter that PPO starts from; leave it out",
    "gpus": "the launch decides: accelerate launch --num_processes N scripts/STAGE.py ...",
    "num_gpus": "the launch decides: accelerate launch --num_processes N scripts/STAGE.py ...",
    "n_gpus": "the launch decides: accelerate launch --num_processes N scripts/STAGE.py ...",
    "num_processes": "the launch decides: accelerate launch --num_processes N scripts/STAGE.py ...",
    "device": "an accelerator is used if there is one; use_cpu: true prevents it",
}


# Keys that PPOConfig accepts in Python under their own names, because they mean what ours mean.
SAME_MEANING: dict[str, str] = {
    "num_iterations": "num_ppo_epochs",
    "steps_per_generation": "num_minibatches",
    "delta": "dual_clip",
    "vllm_importance_sampling_cap": "vllm_importance_sampling_clip_max",
    "kl_coef": "beta",
    "cliprange": "epsilon",
    "cliprange_value": "value_clip",
    "vf_coef": "value_coef",
    "response_length": "max_completion_length",
    "num_mini_batches": "num_minibatches",
    # These are converted.
    "generation_batch_size": "rollout_batch_size",
    "mask_truncated_completions": "truncated_completions",
}

# Keywords of the trainer classes of TRL (PPOTrainer of 1.12, GRPOTrainer) and of older versions of transformers.
FOREIGN_ARGUMENTS: dict[str, str] = {
    "config": "here args, a PPOConfig",
    "tokenizer": "here processing_class",
    "policy": "here model",
    "ref_model": "the frozen base is the reference, and for a policy that continues an adapter a copy of that adapter"
    " is; leave it out",
    "ref_policy": "the frozen base is the reference; leave it out",
    "reward_model": "pass it in reward_funcs (a model, its name or folder)",
    "reward_fn": "here reward_funcs",
    "reward_func": "here reward_funcs",
    "reward_functions": "here reward_funcs",
    "value_model": "the value is a head on the same trunk: value_head in PPOConfig, and value_head_init to start it"
    " from a reward model",
    "dataset": "here train_dataset",
    "data_collator": "rollouts are packed by the trainer; leave it out",
    "formatting_func": "give the rows a column 'prompt', as text or as a conversation",
    "compute_metrics": "a reward function logs its own metrics through its keyword log_metric",
    "model_init": "pass the model, or its name",
    "tools": "completions of several turns are not supported; leave it out",
    "rollout_func": "here rollout_backend, an object with generate and sync",
    "environment_factory": "completions of several turns are not supported; leave it out",
    "max_length": "max_prompt_length and max_completion_length are fields of PPOConfig",
}


def in_our_names(keys: dict[str, Any]) -> dict[str, Any]:
    """Return the keywords of PPOConfig with those of SAME_MEANING under our names.

    Raises:
        ValueError: a setting is given under both names, or completions per rollout do not make whole prompts.
    """
    ours = {key: value for key, value in keys.items() if key not in SAME_MEANING}
    for key in keys.keys() & SAME_MEANING.keys():
        name, value = SAME_MEANING[key], keys[key]
        if key == "mask_truncated_completions":
            if not value:
                continue
            value = "mask"
        elif key == "generation_batch_size":
            if value is None:
                continue
            # Completions there, prompts here.
            value, rest = divmod(value, keys.get("num_generations", 1))
            if rest:
                raise ValueError(
                    f"PPOConfig: generation_batch_size {keys[key]} is not divisible by num_generations"
                    f" {keys['num_generations']}; set rollout_batch_size, the number of prompts"
                )
        if name in ours:
            raise ValueError(f"PPOConfig: {key} and {name} are the same setting, and both are given; keep {name}")
        ours[name] = value
    return ours


def explain_arguments(known: list[str], fields: list[str], names: Iterable[str]) -> str | None:
    """Return an explanation of keywords that a trainer class does not have, None if it has all.

    Args:
        known: keywords of the trainer.
        fields: those of its settings class.
        names: the keywords of a call.
    """
    reasons = []
    for name in names:
        if name in known:
            continue
        if name in FOREIGN_ARGUMENTS:
            reasons.append(f"{name}: {FOREIGN_ARGUMENTS[name]}")
        elif name in fields:
            reasons.append(f"{name}: a setting, so pass args=PPOConfig({name}=...)")
        else:
            reasons.append(explain_key(name, known))
    return "; ".join(reasons) or None


def explain_unknown_keys(config_class: type, keys: dict[str, Any]) -> str | None:
    """Return an explanation of the keys that `config_class` does not have, None if it has all."""
    defaults = {f.name: f.default for f in dataclasses.fields(config_class) if f.init}
    known = [name for name in defaults if name not in FOREIGN_KEYS]
    unknown = [key for key in keys if key not in known and not _is_default(key, keys, defaults)]
    return "; ".join(explain_key(key, known) for key in unknown) or None


def _is_default(key: str, keys: dict[str, Any], defaults: dict[str, Any]) -> bool:
    # A parser passes every field, also at its default; dataclasses.replace an old name with the value of the new.
    if key not in defaults:
        return False
    new = key.replace("gradient_checkpointing", "activation_checkpointing")
    return keys[key] in (defaults[key], keys.get(new, defaults[new]))


def explain_key(key: str, known: list[str]) -> str:
    """Return the replacement of a key that is not among the known ones, or the most similar known key; for PPO."""
    if key in FOREIGN_KEYS:
        return f"{key}: {FOREIGN_KEYS[key]}"
    if key.startswith(_OBJECTIVES):
        return f"{key}: {_OBJECTIVE}"
    return nearest_key(key, known)


def _names_known(text: str, known: list[str]) -> bool:
    """Return whether the option that an explanation names, if it names one, is among the known ones."""
    names = re.findall(r"\bhere (\w+)", text)
    return not names or any(name in known for name in names)


def is_of_ppo(key: str) -> bool:
    """Return whether a key is an option of TRL's trainers of PPO and GRPO that other stages have no use for."""
    return key in FOREIGN_KEYS or key in SAME_MEANING or key.startswith(_OBJECTIVES)


def nearest_key(key: str, known: list[str], owners: Sequence[str] = ()) -> str:
    """Return the name here of a key from elsewhere, or the most similar known key; for every stage.

    Args:
        key: not among the known ones.
        known: the options of the stage.
        owners: other verbs that have an option of that name.
    """
    name = next((name for name, others in _ELSEWHERE.items() if name in known and key in others.split()), None)
    name = SAME_MEANING[key] if name is None and SAME_MEANING.get(key) in known else name
    if name is not None:
        return f"{key}: here {name}"
    if key in _REASONS and _names_known(_REASONS[key], known):
        return f"{key}: {_REASONS[key]}"
    if owners:
        return f"{key}: an option of onetrunk {', '.join(owners)}, which this command does not have"
    if is_of_ppo(key):
        return f"{key}: an option of TRL's PPO or GRPO, which this command does not have"
    elsewhere = next((name for name, others in _ELSEWHERE.items() if key in others.split()), None)
    if elsewhere is not None:
        return f"{key}: {elsewhere} of other commands, which this command does not have"
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    return f"unknown key {key!r}" + (f": did you mean {near[0]!r}?" if near else "")
