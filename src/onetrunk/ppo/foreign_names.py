"""Names that people bring from TRL and other trainers, and their names here; other keys get the most similar one.

The module imports no library: the command line explains keys before it imports any.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from typing import Any


def by_name(groups: Mapping[str, str]) -> dict[str, str]:
    """Return the key of each name; `groups` has the names of a key in one text."""
    return {name: key for key, names in groups.items() for name in names.split()}


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
        "value_clip": "cliprange_value",
        "lam": "gae_lambda",
        "run_name": "exp_name",
        "vllm_server_base_url": "vllm_server_host vllm_server_port",
        "alarm_limits": "alarm_entropy",
    }
)
_SAMPLER = "sampling here follows the policy itself, or its top_p or top_k; leave it out"
_LAUNCH = "the launch decides, on the command line of sft, reward, distill, ppo and eval only:"
# Keys without a counterpart, or with one of another meaning.
REASONS = {
    "env": "set environment variables before the command: CUDA_VISIBLE_DEVICES=0 onetrunk ...",
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
# Beginnings of further names, TRL's and ours, that an evaluation does not have.
OF_TRAINING = (
    "policy/",
    "value/",
    "time/",
    "alarm/",
    "clip_ratio/",
    "completions/",
    "tools/",
    "frac_reward",
    "sampling/sampling_logp",
)


def our_metric(name: str) -> str | None:
    """Return our name of a metric of TRL's GRPOTrainer, without eval_; any other name is returned unchanged."""
    if name.startswith("rewards/") and name.endswith("/mean"):
        return f"score/{name.removeprefix('rewards/').removesuffix('/mean')}"
    return None if name not in METRICS and name.startswith(OF_TRAINING) else METRICS.get(name, name)


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
        "an evaluation samples num_generations completions": "num_generations_eval",
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
            f"generation_kwargs has {', '.join(unknown)}; it may have {', '.join(_GENERATION)}, and the rest would"
            " sample from another distribution than the policy's; leave it out"
        )
    return {_GENERATION[key]: value for key, value in given.items()}


def _share(value: int, settings: Any, name: str) -> int:
    parts = getattr(settings, name)
    if value % parts:
        raise ValueError(f"{value} is not divisible by {name} {parts}; choose values that divide")
    return value // parts


def read_trl_names(settings: Any) -> list[str]:
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
        return f"{key}: {name} of other commands, which this command does not have"
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    return f"unknown key {key!r}" + (f": did you mean {near[0]!r}?" if near else "")


def explain_unknown_keys(config_class: type, keys: dict[str, Any]) -> str | None:
    """Return an explanation of the keys that `config_class` does not have, None if it has all."""
    known = [f.name for f in dataclasses.fields(config_class) if f.init]
    unknown = [key for key in keys if key not in known]
    return "; ".join(explain_key(key, known) for key in unknown) or None
