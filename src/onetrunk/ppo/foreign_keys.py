"""Names that users of TRL's GRPOConfig and PPOConfig, or of TrainingArguments, bring along and that mean nothing here.

Each maps to the sentence that says what to use instead, or why there is nothing to use.
"""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

_SAMPLER = "sampling here follows the policy itself: a truncated or reshaped distribution makes the PPO ratio wrong"
_VLLM = "rollouts are sampled in process; pass your own rollout_backend to PPOTrainer for a server, and leave it out"
_GRPO_LOSS = "belongs to GRPO's objectives; override PPOTrainer.compute_loss for an objective of your own"

FOREIGN_KEYS: dict[str, str] = {
    # TRL's GRPOConfig
    "num_iterations": "here num_ppo_epochs",
    "steps_per_generation": "here num_minibatches (optimizer steps per PPO epoch of a rollout)",
    "generation_batch_size": "here rollout_batch_size (prompts per rollout, all processes together)",
    "num_generations_eval": "evaluation samples one completion per prompt",
    "delta": "here dual_clip (the bound for negative advantages)",
    "mask_truncated_completions": "here truncated_completions: mask",
    "scale_rewards": "here normalize_scores and whiten_advantages",
    "loss_type": _GRPO_LOSS,
    "importance_sampling_level": _GRPO_LOSS,
    "multi_objective_aggregation": "scores are summed with reward_weights",
    "top_p": _SAMPLER + "; leave it out, also at 1.0",
    "top_k": _SAMPLER + "; leave it out, also at 0",
    "min_p": _SAMPLER + "; leave it out, also at 0.0",
    "repetition_penalty": _SAMPLER + "; put a penalty into a reward function",
    "generation_kwargs": _SAMPLER + "; pass a rollout_backend of your own",
    "group_by_length": "packs are sorted by length already",
    "cast_lm_head_to_fp32": "the head multiplies in the model's dtype, in sampling and in training, and only the"
    " softmax is in float32; for a float32 head load the model in float32: model_init_kwargs: {dtype: float32}",
    "cache_implementation": "the rollout backend keeps its own cache",
    "disable_dropout": "dropout is always 0 here",
    "padding_free": "rows of a pack stay apart, padded; sorted by length they waste little of it, and feed-forward"
    " blocks leave the padding out",
    "use_vllm": _VLLM + ", also at false",
    "sync_ref_model": "the reference is the trunk itself, or the frozen adapter that the policy started from",
    "ref_model_mixup_alpha": "the reference does not move",
    "ref_model_sync_steps": "the reference does not move",
    "top_entropy_quantile": _GRPO_LOSS,
    "use_adaptive_entropy": "here entropy_coef, a constant",
    "use_bias_correction_kl": _GRPO_LOSS,
    "off_policy_mask_threshold": _GRPO_LOSS,
    "log_unique_prompts": "every prompt of the sample table is shown as it came",
    "log_multimodal": "text models only",
    "log_completions_hub_repo": "the sample tables lie in output_dir/completions",
    "max_tool_calling_iterations": "tool calls are not supported",
    "router_aux_loss_coef": "routers are frozen with the trunk",
    "pad_to_multiple_of": "packs are as wide as their longest row",
    "use_transformers_continuous_batching": _VLLM,
    "use_transformers_paged": _VLLM,
    "transformers_continuous_batching_config": _VLLM,
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
    # TrainingArguments under older names
    "gradient_checkpointing": "here activation_checkpointing (its name since transformers 5.23)",
    "gradient_checkpointing_kwargs": "here activation_checkpointing_kwargs (its name since transformers 5.23)",
}

INHERITED_WITHOUT_MEANING: dict[str, str] = {
    "auto_find_batch_size": "set microbatch_tokens: it bounds a forward without changing the gradient",
    "neftune_noise_alpha": "noise on embeddings makes the first PPO ratio differ from 1",
    "use_liger_kernel": "the fused logprobs of onetrunk take its place",
    "liger_kernel_config": "the fused logprobs of onetrunk take its place",
    "use_cache": "rollouts keep a cache and training forwards need none",
    "average_tokens_across_devices": "a loss is always divided by the tokens of all processes",
    "length_column_name": "packs are sorted by length already",
    "ddp_static_graph": "what runs in a step changes with the roles that it trains",
    "label_smoothing_factor": "PPO has no labels",
    "enable_jit_checkpoint": "it acts per process; use save_steps",
    "include_num_input_tokens_seen": "see completion/length and throughput/completion_tokens_per_s",
    "save_only_model": "a checkpoint without optimizer and stream state can't be resumed; use save_strategy: 'no'",
    "dataloader_drop_last": "rollouts are filled up with prompts from the start of the pass",
    "dataloader_num_workers": "the stream samples in the main process",
    "dataloader_persistent_workers": "the stream samples in the main process",
    "dataloader_prefetch_factor": "a rollout sampled ahead of its update would be off-policy",
    "dataloader_multiprocessing_context": "the stream samples in the main process",
    "dataloader_pin_memory": "the stream samples in the main process",
    "dataloader_in_order": "the stream samples in the main process",
    "train_sampling_strategy": "shuffle_dataset says how prompts are drawn, and packs are sorted by length already",
    "torch_compile": "not tested with adapter switching yet",
    "torch_compile_backend": "not tested with adapter switching yet",
    "torch_compile_mode": "not tested with adapter switching yet",
    "torch_empty_cache_steps": "it would act on Trainer's own training step only",
    "fp16_full_eval": "evaluation runs as training does",
    "bf16_full_eval": "evaluation runs as training does",
    "batch_eval_metrics": "evaluation samples and scores",
    "eval_accumulation_steps": "evaluation samples and scores",
    "eval_use_gather_object": "evaluation samples and scores",
    "eval_do_concat_batches": "evaluation samples and scores",
    "include_for_metrics": "evaluation samples and scores; a reward function sees every column",
    "prediction_loss_only": "evaluation samples and scores",
    "label_names": "PPO has no labels",
    "parallelism_config": "not supported yet; use accelerate_configs/ddp.yaml",
    "fsdp": "not supported yet; use accelerate_configs/ddp.yaml",
    "deepspeed": "not supported yet; use accelerate_configs/ddp.yaml",
}


FIXED = {
    "ignore_data_skip": True,
    "remove_unused_columns": False,
    "logging_nan_inf_filter": False,
    "ddp_find_unused_parameters": True,
    "ddp_broadcast_buffers": False,
}
WHY_FIXED = {
    "ignore_data_skip": "the experience stream restores its own place",
    "remove_unused_columns": "reward functions receive every column",
    "logging_nan_inf_filter": "a step that is not finite is skipped and counted, not averaged away",
    "ddp_find_unused_parameters": "a step that trains the value alone leaves the policy without gradient",
    "ddp_broadcast_buffers": "processes make unequal numbers of forwards",
}

REFUSED_OPTIMIZERS = {
    "lomo": "it updates weights inside the backward, which here runs once a pack",
    "layerwise": "it updates weights inside the backward, which here runs once a pack",
    "schedule_free": "its weights in training are not those that it evaluates and saves",
}


def explain_unknown_keys(config_class: type, keys: dict[str, Any] | list[str]) -> str | None:
    """Return one sentence about the keys that `config_class` does not know, None if it knows all."""
    defaults = {f.name: f.default for f in dataclasses.fields(config_class) if f.init}
    known = [name for name in defaults if name not in FOREIGN_KEYS]
    unknown = [key for key in keys if key not in known and not _says_nothing(key, keys, defaults)]
    if not unknown:
        return None
    return "; ".join(explain_key(key, known) for key in unknown)


def _says_nothing(key: str, keys: dict[str, Any] | list[str], defaults: dict[str, Any]) -> bool:
    # A parser hands over every field, also at its default; dataclasses.replace an old name with the value of the new.
    if key not in defaults or not isinstance(keys, dict):
        return False
    new = key.replace("gradient_checkpointing", "activation_checkpointing")
    return keys[key] in (defaults[key], keys.get(new, defaults[new]))


def explain_key(key: str, known: list[str]) -> str:
    """Return what to say of a key that is not among the known ones: its name here, the reason, or its neighbour."""
    if key in FOREIGN_KEYS:
        return f"{key}: {FOREIGN_KEYS[key]}"
    if key.startswith("vllm_"):
        return f"{key}: {_VLLM}"
    if key.startswith(("vespo_", "sapo_", "entropy_coef_", "entropy_target")):
        return f"{key}: {_GRPO_LOSS}"
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    return f"unknown key {key!r}" + (f": did you mean {near[0]!r}?" if near else "")
