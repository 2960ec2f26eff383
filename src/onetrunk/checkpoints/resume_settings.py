"""The settings that concern checkpoints, and which settings may change when a run is resumed.

| kind | when a run is resumed | settings here |
|---|---|---|
| bound | must be the same: they decide which rows make up which step | BOUND_SETTINGS, base model, adapter, rows |
| kept | the optimizer's state holds them, so the checkpoint's values stay in use | KEPT_SETTINGS |
| free | may change: where results go, how long the run is, what hardware it uses | FREE_SETTINGS, FREE_PREFIXES |
| steering | may change with `allow_config_change`: what the run learns from now on | all others |

A changed kept setting also needs `allow_config_change`. PPO (`ppo/stream_state.py`) binds and keeps others, and shares
the free ones; `tests/checkpoints/test_config_changes.py` checks that each of its settings has a kind.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate.logging import get_logger
from datasets import Dataset
from peft import PeftModel

from onetrunk.data.sharded import ShardedRows
from onetrunk.models.loading import base_fingerprint
from onetrunk.parallel.groups import RowGroups
from onetrunk.utils.files import read_json

if TYPE_CHECKING:
    from transformers import Trainer, TrainingArguments

logger = get_logger(__name__)

SETTINGS_FILE = "run_settings.json"

BOUND_SETTINGS = tuple(
    "per_device_train_batch_size gradient_accumulation_steps num_processes rows adapter seed data_seed optim"
    " dataloader_drop_last train_sampling_strategy auto_find_batch_size tensor_parallel".split()
)
KEPT_SETTINGS = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")
FREE_SETTINGS = frozenset(
    "output_dir run_name project report_to num_rollouts max_steps num_train_epochs resume_from_checkpoint"
    " push_to_hub disable_tqdm per_device_eval_batch_size overwrite_output_dir"
    " allow_config_change continue_ended_run checkpoint_mirror use_cpu accelerator_config do_train do_eval"
    " do_predict load_best_model_at_end metric_for_best_model greater_is_better model_init_kwargs debug tpu_num_cores"
    " activation_checkpointing gradient_checkpointing gradient_checkpointing_kwargs enable_jit_checkpoint"
    " restore_callback_states_from_checkpoint skip_memory_metrics max_unscored_fraction"
    " local_rank torch_empty_cache_steps activation_checkpointing_kwargs parallelism_config"
    " activation_offloading check_memory include_for_metrics dataset_num_proc eos_token pad_token"
    " trust_remote_code trace_rollouts vllm_server_base_url"
    " write_report vllm_server_timeout vllm_request_timeout vllm_api_key_env vllm_gpu_memory_utilization"
    " vllm_enable_sleep_mode"
    " tool_timeout max_failed_episodes_fraction max_tool_calling_iterations".split()
)
FREE_PREFIXES = (
    "logging_", "log_", "save_", "eval_", "hub_", "dataloader_", "trackio_", "ddp_", "torch_compile", "alarm_",
    "stop_on_", "pipeline_",
)  # fmt: skip
# Has one of the prefixes, but decides which rows a step gets.
NOT_FREE = ("dataloader_drop_last",)
# The fields of an adapter's config that are compared.
ADAPTER_SETTINGS = ("r", "lora_alpha", "use_rslora", "use_dora", "target_modules", "layers_to_transform")


def is_free(name: str) -> bool:
    """Return whether a setting may change without affecting what the run learns."""
    return name not in NOT_FREE and (name in FREE_SETTINGS or name.startswith(FREE_PREFIXES))


def require_same(path: Path, saved: dict[str, Any], current: dict[str, Any], names: Iterable[str]) -> None:
    """Check that the base model, its precision and the settings `names` are the same as in the checkpoint."""
    if saved.get("base") != current["base"]:
        raise ValueError(
            f"{path} was written on the base model {saved.get('base_name')} ({saved.get('base')}), and this run uses"
            f" {current['base_name']} ({current['base']}), another model or another precision; resume with the base"
            " model of that run, or start a new run"
        )
    changed = [name for name in names if saved.get(name) != current.get(name)]
    if changed:
        pairs = ", ".join(f"{name} {saved.get(name)} (here {current.get(name)})" for name in changed)
        raise ValueError(f"{path} was written with {pairs}; resume with the settings of that run, or start a new run")


def allow_steering(path: Path, saved: dict[str, Any], current: dict[str, Any], is_allowed: bool) -> None:
    """Warn about changed steering settings, or reject them with ValueError unless `is_allowed`.

    Some settings belong to a reward; those that only one of the two runs has are not compared.
    """
    changed = [name for name in current if name in saved and saved[name] != current[name]]
    if not changed:
        return
    pairs = ", ".join(f"{name}: {saved[name]} -> {current[name]}" for name in changed)
    if not is_allowed:
        raise ValueError(
            f"cannot resume from {path.parent}, because settings have changed since: {pairs}; set them back, or set"
            " allow_config_change to true to resume with the new values"
        )
    logger.warning(f"resuming from {path.parent} with settings that have changed since: {pairs}")


def keep_optimizer_settings(
    path: Path, saved: dict[str, Any], current: dict[str, Any], names: Iterable[str], is_allowed: bool
) -> None:
    """Warn that changed settings of the optimizer have no effect, or reject them with ValueError unless `is_allowed`.

    The optimizer's state holds these settings and is loaded from the checkpoint.
    """
    changed = [name for name in names if saved.get(name) != current[name]]
    if not changed:
        return
    pairs = ", ".join(f"{name} stays {saved.get(name)} (here {current[name]})" for name in changed)
    message = f"{pairs}: optimizer and schedule are restored from {path.parent}"
    if not is_allowed:
        raise ValueError(
            f"{message}; set them back, start a new run to change them, or set allow_config_change to true to resume"
            " with the values of the checkpoint"
        )
    logger.warning(f"{message}; start a new run to change them")


def plain_settings(trainer: Trainer) -> dict[str, Any]:
    """Return the settings that `check_plain_settings` compares, as JSON values. Call it before training."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    has_adapter = isinstance(model, PeftModel)
    base = model.get_base_model() if has_adapter else model
    settings = {name: value for name, value in trainer.args.to_dict().items() if not is_free(name)}
    settings["rows"] = rows_digest(trainer.train_dataset)
    if isinstance(trainer.train_dataset, ShardedRows):
        settings["row_contents"] = trainer.train_dataset.contents
    ranks = RowGroups(trainer.accelerator)
    settings |= {"num_processes": ranks.num_processes, "tensor_parallel": ranks.group_size}
    settings["adapter"] = _adapter_settings(model) if has_adapter else None
    settings["base"], settings["base_name"] = base_fingerprint(base), base.config.name_or_path
    # Tuples become lists, as in settings that are read from a file.
    return json.loads(json.dumps(settings, default=str))


def check_plain_settings(folder: str | Path, current: dict[str, Any], is_allowed: bool) -> None:
    """Check whether a run with the `plain_settings` `current` may be resumed from a checkpoint."""
    path = Path(folder) / SETTINGS_FILE
    saved = read_json(path)
    require_same(path, saved, current, BOUND_SETTINGS)
    keep_optimizer_settings(path, saved, current, KEPT_SETTINGS, is_allowed)
    others = {"base", "base_name", *BOUND_SETTINGS, *KEPT_SETTINGS}
    steering = {name: value for name, value in current.items() if name not in others}
    allow_steering(path, saved, steering, is_allowed)


def rows_digest(rows: Any) -> str:
    """Return the number of encoded rows and a digest: of their contents, or of the files and blocks of sharded rows.

    Of another dataset only the type's name.
    """
    if isinstance(rows, ShardedRows):
        return rows.digest
    if not isinstance(rows, Dataset):
        return type(rows).__name__
    digest = hashlib.sha256()
    for batch in rows.with_format(None).iter(batch_size=1000):
        digest.update(json.dumps(batch, sort_keys=True, default=str).encode())
    return f"{len(rows)} rows, sha256 {digest.hexdigest()[:16]}"


def check_streaming(args: TrainingArguments, reads_alone: bool = False) -> None:
    """Raise ValueError for settings under which streamed rows cannot have an exact order.

    Args:
        reads_alone: True if a model reads the rows too, which a worker of the DataLoader does not have.
    """
    faults = {
        "packing": "joins rows, so which rows a step has depends on the lengths of all rows before it",
        "shuffle_dataset": "shuffles through a buffer, whose rows a resumed run would lose; shuffle_window shuffles",
        "train_sampling_strategy": "needs the lengths of all rows, which are not read before training",
        "dataloader_num_workers": "reads rows in other processes, and the teacher labels them in this process",
    }
    allowed = {"train_sampling_strategy": ("random", "sequential"), "dataloader_num_workers": (0,)}
    for name, reason in faults.items():
        value = getattr(args, name, None)
        is_checked = name != "dataloader_num_workers" or reads_alone
        if is_checked and value not in allowed.get(name, (False, None)):
            raise ValueError(f"{name} is {value}, and with streaming that {reason}; leave {name} out, or streaming")


def check_group_settings(args: TrainingArguments) -> None:
    """Raise ValueError for settings of SFT, reward or distillation that tensor parallelism cannot carry out."""
    names = ("use_liger_kernel", "neftune_noise_alpha", "eval_use_gather_object", "activation_offloading")
    used = [name for name in names if getattr(args, name, None)]
    dealing = ("dispatch_batches", "split_batches")
    used += [f"accelerator_config.{name}" for name in dealing if getattr(args.accelerator_config, name)]
    if used:
        raise ValueError(
            f"{used[0]} is not supported with tensor parallelism; leave it out, or launch with"
            " accelerate_configs/fsdp2.yaml"
        )


def _adapter_settings(model: PeftModel) -> dict[str, Any]:
    config = model.peft_config[model.active_adapter]
    values = {name: getattr(config, name, None) for name in ADAPTER_SETTINGS}
    return {name: sorted(value) if isinstance(value, set) else value for name, value in values.items()}
