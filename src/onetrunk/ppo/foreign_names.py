"""Settings that come from elsewhere: TrainingArguments', TRL's and other trainers', and what each means here.

A field that our settings classes inherit is read as it is, or stands in one of the tables below, which say why its
value is rejected, fixed or without effect. A key that they do not have gets its name here or the most similar one.
The module imports no library: the command line explains keys before it imports any.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from onetrunk.utils.versions import RENAMED


def by_name(groups: Mapping[str, str]) -> dict[str, str]:
    """Return the key of each name; `groups` has the names of a key in one text."""
    return {name: key for key, names in groups.items() for name in names.split()}


# Fields of TrainingArguments and of TRL's ModelConfig that must keep their default, by the reason.
_WITHOUT_MEANING = {
    "noise on embeddings makes the first PPO ratio differ from 1": "neftune_noise_alpha",
    "it acts per process; use save_steps": "enable_jit_checkpoint",
    "a checkpoint without optimizer and stream state can't be resumed; use save_strategy: 'no'": "save_only_model",
    "the accelerate config of the launch decides (accelerate_configs/README.md)": "parallelism_config fsdp deepspeed"
    " fsdp_config",
    "the launcher sets it": "local_rank",
    "GaLore projects whole weight matrices, and adapters have a low rank already": "optim_target_modules",
    "set the environment variables of trackio": "trackio_bucket_id trackio_static_space_id",
}
INHERITED_WITHOUT_MEANING = by_name(_WITHOUT_MEANING)
# Fields with which the result is the same at every value, by the reason: a line says so.
_WITHOUT_EFFECT = {
    "an optimizer step is a minibatch (rollout_batch_size, num_minibatches), cut into forwards by microbatch_tokens or"
    " per_device_train_batch_size": "gradient_accumulation_steps",
    "the stream samples in the main process": "dataloader_num_workers dataloader_persistent_workers"
    " dataloader_multiprocessing_context dataloader_pin_memory dataloader_in_order dataloader_prefetch_factor",
    "rollouts are filled up with prompts from the start of the pass": "dataloader_drop_last",
    "the experience stream is not dealt out by accelerate": "accelerator_config",
    "shuffle_dataset says how prompts are drawn, and packs are sorted by length already": "train_sampling_strategy"
    " length_column_name",
    "set microbatch_tokens: it bounds a forward without changing the gradient": "auto_find_batch_size",
    "the fused logprobs of onetrunk take its place": "use_liger_kernel liger_kernel_config",
    "rollouts keep a cache and training forwards need none": "use_cache",
    "a loss is always divided by the tokens of all processes": "average_tokens_across_devices",
    "steps run different numbers of forwards, some none": "ddp_static_graph",
    "see completion/length and throughput/completion_tokens_per_s": "include_num_input_tokens_seen",
    "see memory/peak_gib": "skip_memory_metrics",
    "not tested with adapter switching yet": "torch_compile torch_compile_backend torch_compile_mode",
    "it would act on Trainer's own training step only": "torch_empty_cache_steps",
    "evaluation runs as training does": "fp16_full_eval bf16_full_eval",
    "evaluation samples and scores; a reward function sees every column": "batch_eval_metrics eval_accumulation_steps"
    " eval_use_gather_object eval_do_concat_batches prediction_loss_only include_for_metrics",
    "PPO has no labels": "label_names label_smoothing_factor",
    "training and evaluation depend on max_steps and eval_strategy": "do_train do_eval do_predict",
    "a step that is not finite is skipped and counted, and the run says so": "debug",
    "one process writes logs, checkpoints and results": "log_on_each_node save_on_each_node log_level_replica",
}
WITHOUT_EFFECT = by_name(_WITHOUT_EFFECT)
# Fields of TrainingArguments with one possible value, and why.
FIXED = {
    "ignore_data_skip": (True, "the experience stream restores its own position"),
    "remove_unused_columns": (False, "reward functions receive every column"),
    "logging_nan_inf_filter": (False, "a step that is not finite is skipped and counted, not averaged away"),
    "ddp_find_unused_parameters": (True, "an expert that gets no token leaves its adapter without gradient"),
    "ddp_broadcast_buffers": (False, "processes make unequal numbers of forwards"),
}
REFUSED_OPTIMIZERS = {
    "lomo": "it updates weights inside the backward, which runs once per pack here",
    "layerwise": "it updates weights inside the backward, which runs once per pack here",
    "schedule_free": "its weights in training are not those that it evaluates and saves",
}
# Fields of TRL's ModelConfig that every command rejects, and why.
OF_MODEL_CONFIG = {
    "lora_modules_to_save": "the base stays frozen, and the value head is saved next to the adapter",
    "lora_target_parameters": "commands adapt linear layers (lora_target_modules); PPOTrainer takes it in peft_config",
    "lora_task_type": "it is always CAUSAL_LM",
    "bnb_4bit_quant_storage": "it is for sharded training, which is not supported yet",
}
# TrainingArguments accepts its class or None; a launch's accelerate config decides instead.
_OF_LAUNCH = {"parallelism_config": "the accelerate config of the launch decides"}
# Options of a model or a training that mean nothing in PPO.
_NOT_IN_PPO = {
    "use_peft": "ppo always trains a LoRA adapter",
    "lora_dropout": "dropout makes the first PPO ratio differ from 1",
    "hub_token": "a secret is not a setting: set HF_TOKEN, or run hf auth login",
}
# What a command does not show among its options, and why: of all commands, and further of ppo.
REJECTED = {**OF_MODEL_CONFIG, **_OF_LAUNCH} | {
    old: f"an old name of {new}, which is read as that" for old, new in RENAMED.items()
}
REJECTED_BY_PPO = {**INHERITED_WITHOUT_MEANING, **WITHOUT_EFFECT, **_NOT_IN_PPO} | {
    name: reason for name, (_, reason) in FIXED.items()
}

# Keys of other trainers, and what to write here.
_RENAMES = by_name(
    {
        "model_name_or_path": "base_model model pretrain",
        "lora_r": "r",
        "dataset_name": "dataset data_path",
        "resume_from_checkpoint": "resume",
        "reward_funcs": "reward_model reward_model_path reward_pretrain",
        "learning_rate": "lr",
        "value_learning_rate": "critic_learning_rate",
        "per_device_train_batch_size": "micro_batch_size",
        "num_generations": "n_samples_per_prompt",
        "max_completion_length": "max_new_tokens generate_max_len response_length",
        "max_length": "max_seq_length cutoff_len sequence_len",
        "temperature": "temp",
        "beta": "init_kl_coef kl_coef",
        "epsilon": "clip_range eps_clip cliprange",
        "lam": "gae_lambda",
        "run_name": "exp_name",
        "vllm_server_base_url": "vllm_server_host vllm_server_port",
        "alarm_limits": "alarm_entropy",
    }
)
_SAMPLER = "completions are drawn from the policy itself, at most with top_p or top_k; leave it out"
_VALUE = (
    "the PPO loss has no value term: the value head is fitted after each rollout (value_steps, value_learning_rate);"
    " leave it out"
)
_LAUNCH = "set it on the command line of sft, reward, distill, ppo or eval only:"
# Keys without a counterpart, or with one of another meaning.
REASONS = {
    "env": "set environment variables before the command: CUDA_VISIBLE_DEVICES=0 onetrunk ...",
    "value_head": "removed with the value adapter: the value is a small head on the policy's last hidden states; leave"
    " it out",
    "value_clip": _VALUE,
    "value_coef": _VALUE,
    "cliprange_value": _VALUE,
    "vf_coef": _VALUE,
    "rollout_func": "give environment_factory or tools for episodes, or rollout_backend for another sampler",
    "datasets": "one dataset_name, or a file with the rows of all of them; mixtures are made by the datasets library",
    "stages": "the file is a pipeline, which onetrunk run FILE runs",
    "min_p": _SAMPLER,
    "repetition_penalty": _SAMPLER,
    "warmup_ratio": "here warmup_steps: a number below 1 is a share of all steps",
    "total_episodes": "here num_rollouts (rollouts of rollout_batch_size prompts), or num_train_epochs",
    "ref_model": "the reference is the frozen base, or a copy of the adapter that PPO starts from; leave it out",
    "tokenizer": "the tokenizer is that of model_name_or_path; leave it out",
    "num_processes": f"{_LAUNCH} --num_processes 8",
    "accelerate_config": f"{_LAUNCH} --accelerate_config fsdp2",
    "trust_remote_code": "pass model_init_kwargs: {trust_remote_code: true, revision: <commit>}",
}


# TRL's metrics, and ours; None: an evaluation does not have it.
METRICS = {
    "reward": "score/mean",
    "reward_std": "score/std",
    "kl": "kl/ref",
    "completions/mean_length": "completion/length",
    "loss": None,
    "entropy": None,
    "clip_ratio": None,
}
# Beginnings of the names that an evaluation gives.
OF_EVALUATION = ("score/", "reward/", "kl/ref", "completion/", "sampling/logprob_gap", "episode/", "runtime")


def our_metric(name: str) -> str | None:
    """Return our name of a metric of an evaluation, without eval_, which may be TRL's; None if it is not one."""
    if name.startswith("rewards/") and name.endswith("/mean"):
        return f"score/{name.removeprefix('rewards/').removesuffix('/mean')}"
    ours = METRICS.get(name, name)
    return ours if ours is not None and ours.startswith(OF_EVALUATION) else None


# Names of TRL's GRPOConfig that are read, and why a value changes nothing here, where it may be so.
_TRL_NAMES = by_name(
    {
        "": "num_iterations delta vllm_importance_sampling_cap steps_per_generation generation_batch_size",
        "completions that are cut off count, as truncated_completions says": "mask_truncated_completions",
        "each token has its ratio (ratio_unit)": "importance_sampling_level",
        "advantages are scaled over the rollout (whiten_advantages)": "scale_rewards",
        "use_vllm is not set": "vllm_server_host vllm_server_port",
        "the loss is a mean over the tokens of the optimizer step": "loss_type",
        "dropout is off": "disable_dropout",
        "the sampler has a cache of its own and drops rows that have ended": "use_transformers_continuous_batching"
        " transformers_continuous_batching_config use_transformers_paged cache_implementation",
        "the trunk is frozen, and layers are gathered one by one": "ds3_gather_for_generation",
        "packs are padded to their longest row": "pad_to_multiple_of",
        "the server or the engine of vLLM decides": "vllm_model_impl vllm_group_port vllm_max_model_length"
        " vllm_tensor_parallel_size",
        "log_completions shows and keeps a fixed table": "num_completions_to_print log_unique_prompts log_multimodal"
        " log_completions_hub_repo",
        "an evaluation samples one completion of a prompt": "num_generations_eval",
        "with kl_in_loss a token always counts by its ratio": "use_bias_correction_kl",
        "it changes no setting": "generation_kwargs",
    }
)
# Keys of `generation_kwargs` that are settings here.
_GENERATION = {name: name for name in ("temperature", "top_p", "top_k")} | {"max_new_tokens": "max_completion_length"}


def _meaning(name: str, value: Any, settings: Any) -> dict[str, Any]:
    """Return the settings here that a value under a name of TRL's means; none: it changes nothing."""
    match name:
        case "num_iterations":
            return {"num_ppo_epochs": value}
        case "delta":
            return {"dual_clip": value}
        case "vllm_importance_sampling_cap":
            return {"vllm_importance_sampling_clip_max": value}
        case "steps_per_generation":
            # Rollouts of fewer steps than an optimizer step are samples of one policy: together one rollout.
            per_step = settings.gradient_accumulation_steps
            is_part = value > 0 and per_step % value == 0
            return {"num_minibatches": 1 if is_part else _share(value, settings, "gradient_accumulation_steps")}
        case "generation_kwargs":
            return _generation_settings(value)
        case "generation_batch_size":
            return {"rollout_batch_size": _share(value, settings, "num_generations")}
        case "mask_truncated_completions" if value:
            return {"truncated_completions": "mask"}
        case "importance_sampling_level" if value != "token":
            return {"ratio_unit": {"sequence": "turn"}.get(value, value)}
        case "scale_rewards" if str(value).lower() in ("none", "false"):
            return {"whiten_advantages": False}
        case "vllm_server_host" | "vllm_server_port" if settings.use_vllm:
            host, port = settings.vllm_server_host or "127.0.0.1", settings.vllm_server_port or 8000
            return {"vllm_server_base_url": [f"http://{host}:{port}"]}
        case "loss_type" if value not in ("grpo", "bnpo", "dr_grpo", "dapo"):  # These differ in normalisation only.
            raise ValueError(f"loss_type {value} is another objective than PPO's; override PPOTrainer.compute_loss")
    return {}


def _generation_settings(keywords: Any) -> dict[str, Any]:
    if not isinstance(keywords, Mapping):
        raise ValueError(f"generation_kwargs is {keywords!r}; it must be a dict, such as {{top_p: 0.9}}")
    # None is generate's own default, and sampling is always on here.
    given = {k: v for k, v in keywords.items() if v is not None and (k, v) != ("do_sample", True)}
    unknown = [str(key) for key in given if key not in _GENERATION]
    if unknown:
        raise ValueError(
            f"generation_kwargs has {', '.join(unknown)}; it may have {', '.join(_GENERATION)}, and others would"
            " sample from another distribution than the policy's; leave them out"
        )
    return {_GENERATION[key]: value for key, value in given.items()}


def _share(value: int, settings: Any, name: str) -> int:
    parts = getattr(settings, name)
    if value % parts:
        raise ValueError(f"{value} is not divisible by {name} {parts}; choose values that divide")
    return value // parts


def _read_trl_names(settings: Any) -> list[str]:
    """Set what settings under TRL's names mean here, clear them, and return a line about each.

    Raises:
        ValueError: another objective, a remainder, or a setting that has another value under our name.
    """
    lines = []
    for name, reason in _TRL_NAMES.items():
        value = getattr(settings, name, None)
        if value is None:
            continue
        ours = _meaning(name, value, settings)
        for key, meant in ours.items():
            present, default = getattr(settings, key), type(settings).__dataclass_fields__[key].default
            if present not in (default, meant):
                raise ValueError(f"{name} {value} is {key} {meant} here, and {key} is {present}; keep one of them")
            setattr(settings, key, meant)
        said = "read as " + ", ".join(f"{key} {meant}" for key, meant in ours.items())
        lines.append(f"{name} {value}: " + (said if ours else f"no effect here, {reason}"))
    vars(settings).update(dict.fromkeys(_TRL_NAMES) if lines else {})
    return lines


def read_inherited(settings: Any, defaults: Mapping[str, Any]) -> list[str]:
    """Give inherited and TRL's settings the values that they have here, and return lines for the user.

    Args:
        defaults: of every field of the settings.

    Raises:
        ValueError: a value has no meaning here.
    """
    lines = _read_trl_names(settings)
    for name, default in defaults.items():
        value = getattr(settings, name)
        if value == default or not (value or default is True) or _is_set_by_trainer(settings, name):
            continue
        if name in INHERITED_WITHOUT_MEANING:
            raise ValueError(f"{name}={value!r} has no meaning here: {INHERITED_WITHOUT_MEANING[name]}")
        if name in WITHOUT_EFFECT:
            lines.append(f"{name} {value} has no effect here: {WITHOUT_EFFECT[name]}")
            setattr(settings, name, default)
    for name, (required, reason) in FIXED.items():
        if getattr(settings, name) not in (None, required):
            lines.append(f"{name} stays {required}: {reason}")
        setattr(settings, name, required)
    return lines


def check_optimizer(settings: Any) -> None:
    """Raise ValueError for an optimizer or a schedule that PPO cannot use."""
    optim, scheduler = word(settings.optim), word(settings.lr_scheduler_type)
    for part, reason in REFUSED_OPTIMIZERS.items():
        if part in optim:
            raise ValueError(f"optim {optim!r} is not supported: {reason}; set adamw_torch, adamw_bnb_8bit, ...")
    if scheduler in ("reduce_lr_on_plateau", "greedy"):
        raise ValueError(
            f"lr_scheduler_type {scheduler!r} follows a loss on labels, which PPO does not have; choose another"
        )


def word(value: Any) -> str:
    """Return the word of a setting that may be an enumeration."""
    return str(getattr(value, "value", value))


def _is_set_by_trainer(settings: Any, name: str) -> bool:
    """Return whether TrainingArguments itself may have changed a field; a copy of the settings has that value."""
    if name == "dataloader_pin_memory":
        return bool(settings.use_cpu)
    if name == "do_eval":
        return word(settings.eval_strategy) != "no"
    return name == "accelerator_config" and type(settings.accelerator_config).__name__ == "AcceleratorConfig"


def explain_key(key: str, known: Sequence[str], owners: Sequence[str] = ()) -> str:
    """Return the name here of a key from elsewhere, a reason why there is none, or the most similar known key."""
    name = _RENAMES.get(key)
    if name in known:
        return f"{key}: here {name}"
    if owners:
        return f"{key}: an option of onetrunk {', '.join(owners)}, which this command does not have"
    reason = REASONS.get(key, "")
    if reason and (not reason.startswith("here ") or reason.split()[1].rstrip(",:") in known):
        return f"{key}: {reason}"
    if name:
        return f"{key}: {name} in other commands; this command does not have it"
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    return f"unknown key {key!r}" + (f": did you mean {near[0]!r}?" if near else "")


def explain_unknown_keys(config_class: type, keys: dict[str, Any]) -> str | None:
    """Return an explanation of the keys that `config_class` does not have, None if it has all."""
    known = [f.name for f in dataclasses.fields(config_class) if f.init]
    unknown = [key for key in keys if key not in known]
    return "; ".join(explain_key(key, known) for key in unknown) or None
