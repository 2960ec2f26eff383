"""Names that people bring from TRL and other trainers, and their names here; other keys get the most similar one.

The module imports no library: the command line explains keys before it imports any.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Sequence
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
        "num_ppo_epochs": "ppo_epochs",
        "num_minibatches": "num_mini_batches",
        "max_completion_length": "max_new_tokens generate_max_len response_length",
        "max_prompt_length": "prompt_max_len",
        "max_length": "max_seq_length cutoff_len sequence_len",
        "temperature": "temp",
        "beta": "init_kl_coef kl_coef",
        "epsilon": "clip_range eps_clip cliprange",
        "value_clip": "cliprange_value",
        "value_coef": "vf_coef",
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
REASONS = {
    "stages": "the file is a pipeline, which onetrunk run FILE runs",
    "min_p": _SAMPLER,
    "repetition_penalty": _SAMPLER,
    "warmup_ratio": "here warmup_steps: a number below 1 is a share of all steps",
    "total_episodes": "here num_rollouts (rollouts of rollout_batch_size prompts), or num_train_epochs",
    "ref_model": "the reference is the frozen base, or a copy of the adapter that PPO starts from; leave it out",
    "tokenizer": "the tokenizer is that of model_name_or_path; leave it out",
    "num_processes": "the launch decides: accelerate launch --num_processes N scripts/STAGE.py ...",
    "trust_remote_code": "pass model_init_kwargs: {trust_remote_code: true, revision: <commit>}",
}


# Names of TRL's GRPOConfig, and the settings here that a value means; none: it changes nothing for the reason given.
_TRL_NAMES: dict[str, tuple[Callable[[Any, Any], dict[str, Any]], str]] = {
    "num_iterations": (lambda value, _: {"num_ppo_epochs": value}, ""),
    "delta": (lambda value, _: {"dual_clip": value}, ""),
    "vllm_importance_sampling_cap": (lambda value, _: {"vllm_importance_sampling_clip_max": value}, ""),
    "steps_per_generation": (
        lambda value, settings: {"num_minibatches": _share(value, settings, "gradient_accumulation_steps")},
        "",
    ),
    "generation_batch_size": (
        lambda value, settings: {"rollout_batch_size": _share(value, settings, "num_generations")},
        "",
    ),
    "mask_truncated_completions": (
        lambda value, _: {"truncated_completions": "mask"} if value else {},
        "completions that are cut off count, as truncated_completions says",
    ),
    "importance_sampling_level": (
        lambda value, _: {"ratio_unit": "turn"} if value == "sequence" else {},
        "each token has its ratio (ratio_unit)",
    ),
    "scale_rewards": (
        lambda value, _: {"whiten_advantages": False} if str(value).lower() in ("none", "false") else {},
        "advantages are scaled over the rollout (whiten_advantages)",
    ),
    "loss_type": (lambda value, _: _normalised(value), "the loss is a mean over the tokens of the optimizer step"),
    "vllm_server_host": (lambda _, settings: _server(settings), "use_vllm is not set"),
    "vllm_server_port": (lambda _, settings: _server(settings), "use_vllm is not set"),
}
_TRL_NAMES |= {
    name: (lambda *_: {}, reason)
    for reason, names in {
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
    }.items()
    for name in names.split()
}


def read_trl_names(settings: Any) -> list[str]:
    """Set what settings under TRL's names mean here, clear them, and return a line about each.

    Raises:
        ValueError: another objective, a remainder, or a setting that has another value under our name.
    """
    lines = []
    for name, (meaning, reason) in _TRL_NAMES.items():
        value = getattr(settings, name, None)
        if value is None:
            continue
        ours = meaning(value, settings)
        for key, meant in ours.items():
            present, default = getattr(settings, key), type(settings).__dataclass_fields__[key].default
            if present not in (default, meant):
                raise ValueError(f"{name} {value} is {key} {meant} here, and {key} is {present}; keep one of them")
            setattr(settings, key, meant)
        said = "read as " + ", ".join(f"{key} {meant}" for key, meant in ours.items())
        lines.append(f"{name} {value}: " + (said if ours else f"no effect here, {reason}"))
    vars(settings).update(dict.fromkeys(_TRL_NAMES) if lines else {})
    return lines


def _normalised(loss_type: str) -> dict[str, Any]:
    # These differ in the normalisation of PPO's loss only.
    if loss_type not in ("grpo", "bnpo", "dr_grpo", "dapo"):
        raise ValueError(f"loss_type {loss_type} is another objective than PPO's; override PPOTrainer.compute_loss")
    return {}


def _share(value: int, settings: Any, name: str) -> int:
    parts = getattr(settings, name)
    if value % parts:
        raise ValueError(f"{value} is not divisible by {name} {parts}; choose values that divide")
    return value // parts


def _server(settings: Any) -> dict[str, Any]:
    host, port = settings.vllm_server_host or "127.0.0.1", settings.vllm_server_port or 8000
    return {"vllm_server_base_url": [f"http://{host}:{port}"]} if settings.use_vllm else {}


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
    fields = {f.name: f.default for f in dataclasses.fields(config_class) if f.init}
    known = [name for name in fields if name != "trust_remote_code"]
    unknown = [key for key in keys if key not in known and not (key in fields and keys[key] == fields[key])]
    return "; ".join(explain_key(key, known) for key in unknown) or None
