"""What may change where a run goes on: every setting is free, steering, or bound to the place in the run.

Free settings say where results go, how long and on what the run computes; nobody is asked. Steering ones change what
it learns from here on: they are listed and refused, unless `allow_config_change` says that it is meant. Bound ones
would make another run of it, and are always refused. Knows names and values; no run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate.logging import get_logger
from datasets import Dataset
from peft import PeftModel

from onetrunk.models.sources import base_fingerprint
from onetrunk.utils.files import read_json

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


SETTINGS_FILE = "run_settings.json"
# Which rows make up which step; another step count would resume elsewhere in the rows.
BOUND_SETTINGS = tuple(
    "per_device_train_batch_size gradient_accumulation_steps num_processes rows adapter seed data_seed optim"
    " dataloader_drop_last train_sampling_strategy auto_find_batch_size".split()
)
# The optimizer's own state holds them.
KEPT_SETTINGS = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")
ADAPTER_SETTINGS = ("r", "lora_alpha", "use_rslora", "use_dora", "target_modules", "layers_to_transform")


def plain_settings(trainer: Any) -> dict[str, Any]:
    """Return what `check_plain_settings` compares, in terms of JSON; call it before the trainer has trained.

    Args:
        trainer: a Trainer with its model and its encoded rows.
    """
    model = trainer.accelerator.unwrap_model(trainer.model)
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    settings = {name: value for name, value in trainer.args.to_dict().items() if not is_free(name)}
    settings["rows"] = rows_digest(trainer.train_dataset)
    settings["num_processes"] = trainer.accelerator.num_processes
    settings["adapter"] = _adapter(model) if isinstance(model, PeftModel) else None
    settings["base"], settings["base_name"] = base_fingerprint(base), base.config.name_or_path
    # As it comes back from the file: tuples are lists there.
    return json.loads(json.dumps(settings, default=str))


def check_plain_settings(folder: str | Path, own: dict[str, Any], is_allowed: bool) -> None:
    """Refuse to go on from a checkpoint of another run, and changed settings unless that is meant.

    Args:
        folder: the checkpoint.
        own: `plain_settings` of this run.
        is_allowed: `allow_config_change`.

    Raises:
        ValueError: names what has changed.
    """
    path = Path(folder) / SETTINGS_FILE
    written = read_json(path)
    if not isinstance(written, dict):
        raise ValueError(f"{path} holds no settings of a run; pass another checkpoint")
    require_base(path, written, own)
    require_same(path, written, own, BOUND_SETTINGS)
    keep_optimizer_settings(path, written, own, KEPT_SETTINGS, is_allowed)
    apart = {"base", "base_name", *BOUND_SETTINGS, *KEPT_SETTINGS}
    allow_steering(path, written, {n: v for n, v in own.items() if n not in apart}, is_allowed)


def settings_digest(settings: dict[str, Any] | None) -> str | None:
    """Return a digest of the settings of a run, in terms of JSON."""
    if settings is None:
        return None
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def rows_digest(rows: Any) -> str:
    """Return how many encoded rows there are and a digest of all that is in them."""
    if not isinstance(rows, Dataset):
        return type(rows).__name__
    digest = hashlib.sha256()
    for batch in rows.with_format(None).iter(batch_size=1000):
        digest.update(json.dumps(batch, sort_keys=True, default=str).encode())
    return f"{len(rows)} rows, sha256 {digest.hexdigest()[:16]}"


def _adapter(model: PeftModel) -> dict[str, Any]:
    config = model.peft_config[model.active_adapter]
    found = {name: getattr(config, name, None) for name in ADAPTER_SETTINGS}
    return {name: sorted(value) if isinstance(value, set) else value for name, value in found.items()}


@dataclass(repr=False)
class CheckpointSettings:
    """The part of a settings class that speaks of checkpoints; it stands before TrainingArguments."""

    allow_config_change: bool = field(
        default=False,
        metadata={"help": "Go on from a checkpoint although settings that steer what is learnt have changed."},
    )
    continue_ended_run: bool = field(
        default=False,
        metadata={
            "help": "Train on from a checkpoint at which an alarm, the monitor or early stopping ended the run; false:"
            " such a run is finished, whatever is planned."
        },
    )
    checkpoint_mirror: str | None = field(
        default=None,
        metadata={
            "help": "A second home of checkpoints and result: a folder, s3://, gs:// or hf://; --resume auto looks"
            " there where output_dir has none."
        },
    )

    def __post_init__(self) -> None:
        check_intervals(self)
        super().__post_init__()


def check_intervals(args: Any) -> None:
    """Refuse intervals at which nothing can happen, and a best model that no evaluation chooses.

    Raises:
        ValueError: names the setting, its value and what it may be.
    """
    for strategy, steps in (
        ("save_strategy", "save_steps"),
        ("eval_strategy", "eval_steps"),
        ("logging_strategy", "logging_steps"),
    ):
        value = getattr(args, steps)
        is_unset = value is None and steps == "eval_steps"  # It is logging_steps then.
        if _word(getattr(args, strategy)) == "steps" and not is_unset and not (_is_number(value) and value > 0):
            raise ValueError(
                f"{steps} is {value!r}, and {strategy} is 'steps'; set a whole number above 0 or a share of all steps"
                f" between 0 and 1, or set {strategy} to 'no'"
            )
    needs = "load_best_model_at_end" if args.load_best_model_at_end else "save_strategy 'best'"
    chooses_best = args.load_best_model_at_end or _word(args.save_strategy) == "best"
    if chooses_best and _word(args.eval_strategy) == "no":
        raise ValueError(
            f"{needs} needs evaluations to choose by, and eval_strategy is 'no'; set eval_strategy to 'steps' or"
            " 'epoch', with held-out rows, or leave it out"
        )


def _word(strategy: Any) -> str:
    return str(getattr(strategy, "value", strategy))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
