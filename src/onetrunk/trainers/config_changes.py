"""What may change where a run goes on: every setting is free, steering, or bound to the place in the run.

Free settings say where results go, how long and on what the run computes; nobody is asked. Steering ones change what
it learns from here on: they are listed and refused, unless `allow_config_change` says that it is meant. Bound ones
would make another run of it, and are always refused. Knows names and values; no run.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from accelerate.logging import get_logger

logger = get_logger(__name__)

FREE_SETTINGS = frozenset(
    "output_dir run_name project report_to num_rollouts max_steps num_train_epochs resume_from_checkpoint"
    " push_to_hub disable_tqdm num_completions_to_print per_device_eval_batch_size overwrite_output_dir"
    " allow_config_change continue_ended_run checkpoint_mirror use_cpu accelerator_config do_train do_eval"
    " do_predict load_best_model_at_end metric_for_best_model greater_is_better model_init_kwargs debug tpu_num_cores"
    " activation_checkpointing gradient_checkpointing gradient_checkpointing_kwargs enable_jit_checkpoint"
    " restore_callback_states_from_checkpoint skip_memory_metrics max_unscored_fraction max_skipped_steps"
    " value_head_init local_rank torch_empty_cache_steps activation_checkpointing_kwargs parallelism_config"
    " activation_offloading check_memory include_for_metrics dataset_num_proc eos_token pad_token"
    " trust_remote_code".split()
)
FREE_PREFIXES = (
    "logging_", "log_", "save_", "eval_", "hub_", "dataloader_", "trackio_", "ddp_", "torch_compile", "alarm_",
    "stop_on_",
)  # fmt: skip
# Beside the prefixes above: which rows come, and in what groups.
NOT_FREE = frozenset(("dataloader_drop_last",))


def is_free(name: str) -> bool:
    """Return whether nothing that a run learns depends on a setting."""
    return name not in NOT_FREE and (name in FREE_SETTINGS or name.startswith(FREE_PREFIXES))


def require_same(path: Path, written: dict[str, Any], own: dict[str, Any], names: Iterable[str]) -> None:
    """Refuse settings that are bound to the place in a run.

    Args:
        path: the file that `written` comes from.
        written: settings when the checkpoint was written.
        own: settings now.
        names: those that must be as they were.

    Raises:
        ValueError: names every one that is not.
    """
    changed = [name for name in names if written.get(name) != own.get(name)]
    if changed:
        pairs = ", ".join(f"{name} {written.get(name)} (here {own.get(name)})" for name in changed)
        raise ValueError(f"{path} was written with {pairs}; resume with the settings of that run, or start a new run")


def require_base(path: Path, written: dict[str, Any], own: dict[str, Any]) -> None:
    """Refuse another base model, or the same one in another precision.

    Raises:
        ValueError: names both.
    """
    if written.get("base") != own["base"]:
        raise ValueError(
            f"{path} was written on the base model {written.get('base_name')} ({written.get('base')}), and this run"
            f" has {own['base_name']} ({own['base']}), another one or in another precision; resume on the base of that"
            " run, or start a new run"
        )


def allow_steering(path: Path, before: dict[str, Any], now: dict[str, Any], is_allowed: bool) -> None:
    """List the steering settings that have changed, and refuse them unless that is meant.

    Args:
        path: the file that `before` comes from.
        before: steering settings when the checkpoint was written; one that only one version of onetrunk has is no
            change.
        now: those of this run.
        is_allowed: `allow_config_change`.

    Raises:
        ValueError: names every one that has changed.
    """
    changed = [name for name in now if name in before and before[name] != now[name]]
    if not changed:
        return
    pairs = ", ".join(f"{name}: {before[name]} -> {now[name]}" for name in changed)
    if not is_allowed:
        raise ValueError(
            f"this run would go on from {path.parent} with settings that have changed since: {pairs}; set them back,"
            " or set allow_config_change to true to go on with them"
        )
    logger.warning(f"this run goes on from {path.parent} with settings that have changed since: {pairs}")


def keep_optimizer_settings(
    path: Path, written: dict[str, Any], own: dict[str, Any], names: Iterable[str], is_allowed: bool
) -> None:
    """Refuse, or say, that settings of the optimizer stay those of the checkpoint, which holds its state.

    Raises:
        ValueError: one has changed, and `is_allowed` is False.
    """
    kept = [name for name in names if written.get(name) != own[name]]
    if not kept:
        return
    pairs = ", ".join(f"{name} stays {written.get(name)} (here {own[name]})" for name in kept)
    sentence = f"{pairs}: optimizer and schedule are those of the checkpoint {path.parent}"
    if not is_allowed:
        raise ValueError(
            f"{sentence}; set them back, start a new run to change them, or set allow_config_change to true to go on"
            " as before"
        )
    logger.warning(f"{sentence}; start a new run to change them")
