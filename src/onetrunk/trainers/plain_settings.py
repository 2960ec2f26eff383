"""What a run of supervised or reward-model training is made of, as far as a checkpoint must know it.

Every setting that is not free, the rows and the base model. PPO has its own (run_settings.py). Knows settings, encoded
rows and a model; no state.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from datasets import Dataset
from peft import PeftModel

from onetrunk.files import read_json
from onetrunk.models.fingerprint import base_fingerprint
from onetrunk.trainers.config_changes import (
    allow_steering,
    is_free,
    keep_optimizer_settings,
    require_base,
    require_same,
)

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
