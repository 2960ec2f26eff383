"""Which group of the help text an option belongs to, and which options are explained first."""

from __future__ import annotations

# The groups in their order, with what they are about.
GROUPS = {
    "model": "the base model and the LoRA adapter",
    "data": "rows for training and evaluation",
    "rollout": "prompts, completions, and the servers that sample them",
    "reward": "what happens to scores",
    "advantage": "KL, advantages and returns",
    "loss": "the PPO update",
    "trunk": "value head, adapted layers, kept states",
    "judges": "who judges, and the monitor of the reward",
    "pairs": "how completions become rows",
    "student": "the student, its teacher, and what it learns",
    "comparison": "what is measured, and against whom",
    "sequences": "how rows become training sequences",
    "optimizer": "learning rate, schedule, length of the run, seeds",
    "checkpoints": "output folder, checkpoints, resuming",
    "evaluation": "held-out rows during training",
    "logging": "logs, trackers, samples",
    "alarms": "limits whose breach is reported",
    "hardware": "precision, memory, several processes",
    "hub": "the Hugging Face Hub",
    "server": "the vLLM server",
}
# Classes whose fields all belong to one group.
OF_CLASS = {
    "DatasetArguments": "data",
    "TrainingDataArguments": "data",
    "SamplingArguments": "rollout",
    "PPODataArguments": "reward",
    "JudgeConfig": "judges",
    "CostConfig": "judges",
    "JudgeArguments": "comparison",
    "PPOJudgeArguments": "judges",
    "ModelConfig": "model",
    "ModelArguments": "model",
    "OptionalModelArguments": "model",
    "StudentArguments": "student",
    "DistillDataArguments": "student",
    "RewardDistillationConfig": "student",
    "RewardTrainingArguments": "model",
    "RewardModelConfig": "loss",
    "StageTrainingConfig": "hardware",
    "AlarmConfig": "alarms",
    "CheckpointConfig": "checkpoints",
    "StageTrainingArguments": "checkpoints",
    "VLLMConfig": "rollout",
    "VLLMServerConfig": "rollout",
    "PrefsArguments": "pairs",
    "EvalArguments": "comparison",
    "ServeArguments": "server",
    "MergeArguments": "model",
    "SFTConfig": "sequences",
    "RewardConfig": "sequences",
}
# Single names, which come before the classes; a * at the end stands for any ending.
_OF_NAME = {
    "rollout": "rollout_batch_size num_generations num_rollouts max_prompt_length overlong_prompts"
    " max_completion_length temperature top_p top_k stop_tokens max_rollout_rows compile_decoding rollout_backend"
    " pipeline_* chat_template_kwargs shuffle_dataset schedule max_staleness",
    "reward": "reward_funcs reward_weights missing_eos_penalty length_penalty truncated_completions normalize_scores"
    " score_clip max_unscored_fraction",
    "advantage": "beta kl_* gamma lam lam_* length_adaptive_lam whiten_*",
    "loss": "num_ppo_epochs num_minibatches microbatch_tokens padding_free epsilon epsilon_high dual_clip value_clip"
    " value_coef entropy_coef target_kl value_pretraining_rollouts value_learning_rate",
    "trunk": "value_head value_head_init trunk_cache capture_trunk_states",
    "model": "adapter_layers model_init_kwargs trust_remote_code",
    "sequences": "max_length packing* pad_* eos_token chat_template_path dataset_text_field dataset_kwargs"
    " dataset_num_proc completion_only_loss assistant_only_loss truncation_mode padding_free eval_packing",
    "judges": "judge_report",
    "checkpoints": "output_dir overwrite_output_dir save_* load_best_model_at_end metric_for_best_model"
    " greater_is_better resume_from_checkpoint restore_callback_states_from_checkpoint enable_jit_checkpoint",
    "evaluation": "eval_* do_* per_device_eval_batch_size prediction_loss_only batch_eval_metrics include_for_metrics",
    "hub": "push_to_hub hub_*",
    "optimizer": "learning_rate lr_* warmup_* optim optim_* weight_decay adam_* max_grad_norm num_train_epochs"
    " max_steps max_skipped_steps seed data_seed per_device_train_batch_size gradient_accumulation_steps label_*"
    " neftune_noise_alpha train_sampling_strategy length_column_name full_determinism",
    "logging": "logging_* log_* write_report report_to run_name project trackio_* disable_tqdm"
    " num_completions_to_print"
    " num_samples_to_print trace_rollouts skip_memory_metrics include_num_input_tokens_seen straggler_factor debug",
    "hardware": "bf16* fp16* tf32 use_cpu check_memory activation_* gradient_checkpointing* torch_* dataloader_* ddp_*"
    " fsdp* deepspeed accelerator_config parallelism_config local_rank use_liger_kernel liger_kernel_config use_cache"
    " auto_find_batch_size average_tokens_across_devices ignore_data_skip remove_unused_columns tpu_* jit_mode_eval"
    " include_tokens_per_second",
}
_EXACT = {name: group for group, names in _OF_NAME.items() for name in names.split() if not name.endswith("*")}
_PREFIXES = {name[:-1]: group for group, names in _OF_NAME.items() for name in names.split() if name.endswith("*")}
# Classes whose names decide before _OF_NAME does: there, the class is the better answer.
_CLASS_FIRST = (
    "StageTrainingConfig",
    "DatasetArguments",
    "TrainingDataArguments",
    "JudgeConfig",
    "PPOJudgeArguments",
    "AlarmConfig",
)

_TRAINING = "model_name_or_path dtype dataset_name eval_size"
_RUN = "learning_rate num_train_epochs max_steps per_device_train_batch_size seed output_dir overwrite_output_dir"
_RUN += " save_steps eval_strategy report_to logging_steps bf16"
# Verb -> the options that matter most.
FIRST = {
    "ppo": "model_name_or_path lora_r dataset_name eval_size rollout_batch_size num_rollouts max_completion_length"
    " use_vllm reward_funcs missing_eos_penalty beta num_ppo_epochs num_minibatches value_head"
    " learning_rate per_device_train_batch_size output_dir overwrite_output_dir report_to judge",
    "sft": f"{_TRAINING} {_RUN} use_peft lora_r max_length packing",
    "reward": f"{_TRAINING} {_RUN} use_peft lora_r adapter_layers max_length",
    "distill": f"{_TRAINING} {_RUN} teacher student_config student_tokenizer",
    "judge": "dataset_name dataset_columns dataset_split dataset_config output_dir judge constitution rubric"
    " judge_model judge_api_key_env judge_max_concurrency judge_batch_size judge_prices judge_budget_usd"
    " max_failed_fraction fewest_rows num_samples_to_print",
    "prefs": "model_name_or_path dtype dataset_name dataset_columns dataset_split output_dir overwrite_output_dir"
    " max_completion_length temperature seed judge constitution judge_model mode num_generations pairing completions"
    " engine shard preview",
    "eval": "model_name_or_path dtype dataset_name dataset_columns dataset_split output_dir max_prompt_length"
    " max_completion_length temperature seed judge constitution judge_model reward_funcs reward_weights opponent"
    " tie_margin checks num_completions_to_print bf16",
    "serve": "model host port dtype max_lora_rank max_loras max_model_len tensor_parallel_size gpu_memory_utilization"
    " device api_key_env python command print revision",
    "merge": "adapter output_dir overwrite_output_dir revision dtype push_to_hub hub_model_id hub_private_repo"
    " hub_revision",
}


def group_of(name: str, owner: str) -> str | None:
    """Return the group of a field of the class `owner`; None if no rule names it."""
    if owner in _CLASS_FIRST:
        return OF_CLASS[owner]
    if name in _EXACT:
        return _EXACT[name]
    by_prefix = next((group for prefix, group in _PREFIXES.items() if name.startswith(prefix)), None)
    return OF_CLASS.get(owner) or by_prefix
