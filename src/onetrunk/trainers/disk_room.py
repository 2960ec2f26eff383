"""Is there room on the disk for a run's checkpoints? Asked before the first step. Knows sizes; writes nothing."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from accelerate.logging import get_logger
from peft import PeftModel

from onetrunk.checkpoints.folders import LEAST_KEPT
from onetrunk.trainers.writing import existing

logger = get_logger(__name__)

# Tokenizer, settings, logs and states of generators.
OTHER_BYTES = 8 << 20
# Adam's two moments, in float32.
OPTIMIZER_BYTES = 8


def checkpoint_bytes(trainer: Any) -> int:
    """Return about how many bytes a checkpoint of a trainer takes: what it saves of the model, and the optimizer."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    trained = [p for p in model.parameters() if p.requires_grad]
    saved = [p for n, p in model.named_parameters() if ".lora_" in n or p.requires_grad]
    if not isinstance(model, PeftModel):
        saved = list(model.parameters())
    bytes_saved = sum(p.numel() * p.element_size() for p in saved)
    return bytes_saved + OPTIMIZER_BYTES * sum(p.numel() for p in trained) + OTHER_BYTES + trainer.own_state_bytes()


def require_room(trainer: Any) -> None:
    """Refuse a disk that can't take the checkpoints which stay, and the one that is made beside them.

    Raises:
        RuntimeError: names the folder, the bytes that are free and those that it takes.
    """
    args = trainer.args
    if not args.should_save or str(getattr(args.save_strategy, "value", args.save_strategy)) == "no":
        return
    size, free = checkpoint_bytes(trainer), shutil.disk_usage(existing(Path(args.output_dir))).free
    kept = max(args.save_total_limit, LEAST_KEPT) if args.save_total_limit else LEAST_KEPT
    if free < size * (kept + 1):
        raise RuntimeError(
            f"{args.output_dir} has {free:,} bytes free, and {kept + 1} checkpoints of about {size:,} bytes take"
            f" {size * (kept + 1):,}; make room, name another output_dir, or lower save_total_limit (at least"
            f" {LEAST_KEPT} are kept)"
        )
    planned = _planned_saves(trainer)
    if not args.save_total_limit and free < size * planned:
        logger.warning(
            f"{args.output_dir} has {free:,} bytes free; {planned} checkpoints of about {size:,} bytes will not fit:"
            " set save_total_limit"
        )


def _planned_saves(trainer: Any) -> int:
    every = trainer.state.save_steps
    if not every or str(getattr(trainer.args.save_strategy, "value", "")) != "steps":
        return LEAST_KEPT
    return -(-trainer.state.max_steps // int(every))
