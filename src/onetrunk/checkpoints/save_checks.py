"""Checks before a checkpoint is written: room on the disk, and finite weights. And what is not loaded from one."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator
from pathlib import Path

import torch
from accelerate.logging import get_logger
from peft import PeftModel
from safetensors import SafetensorError
from torch import nn
from transformers import Trainer

from onetrunk.checkpoints.folders import LEAST_KEPT, free_bytes

logger = get_logger(__name__)

# Bytes of tokenizer, settings, logs and random states, as an upper bound.
OTHER_BYTES = 8 << 20
# Bytes per trained weight: Adam's two moments in float32.
OPTIMIZER_BYTES = 8


def require_room(trainer: Trainer, extra_bytes: int) -> None:
    """Check that the disk can take the checkpoints that are kept, and one more while it is being written.

    Raises:
        RuntimeError: names the folder, the free bytes and the bytes needed.
    """
    args = trainer.args
    if not args.should_save or args.save_strategy == "no":
        return
    size, free = checkpoint_bytes(trainer, extra_bytes), free_bytes(Path(args.output_dir))
    kept = max(args.save_total_limit or 0, LEAST_KEPT)
    if free < size * (kept + 1):
        raise RuntimeError(
            f"{args.output_dir} has {free:,} bytes free, and {kept + 1} checkpoints of about {size:,} bytes take"
            f" {size * (kept + 1):,}; make room, choose another output_dir, or lower save_total_limit (at least"
            f" {LEAST_KEPT} are kept)"
        )
    every = trainer.state.save_steps
    planned = -(-trainer.state.max_steps // int(every)) if every and args.save_strategy == "steps" else LEAST_KEPT
    if not args.save_total_limit and free < size * planned:
        logger.warning(
            f"{args.output_dir} has {free:,} bytes free; {planned} checkpoints of about {size:,} bytes will not fit:"
            " set save_total_limit"
        )


def checkpoint_bytes(trainer: Trainer, extra_bytes: int) -> int:
    """Return about how many bytes a checkpoint takes: weights, optimizer, and `extra_bytes` of the trainer's own."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    trained = [p for p in model.parameters() if p.requires_grad]
    if isinstance(model, PeftModel):
        saved = [p for name, p in model.named_parameters() if ".lora_" in name or p.requires_grad]
    else:
        saved = list(model.parameters())
    weight_bytes = sum(p.numel() * p.element_size() for p in saved)
    return weight_bytes + OPTIMIZER_BYTES * sum(p.numel() for p in trained) + OTHER_BYTES + extra_bytes


@torch.no_grad()
def require_finite_weights(model: nn.Module, step: int) -> None:
    """Check that the trained weights are finite, so that a bad checkpoint does not replace a good one.

    Raises:
        RuntimeError: names the first weight that is not finite.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    checks = [p.isfinite().all() for p in trained.values()]
    if not checks or torch.stack([check.to(checks[0].device) for check in checks]).all():
        return
    bad = [name for name, check in zip(trained, checks, strict=True) if not check]
    raise RuntimeError(
        f"{len(bad)} of {len(checks)} weights are not finite after step {step}, the first is {bad[0]}. Nothing was"
        " saved, and older checkpoints are unchanged: resume from one of them with a lower learning_rate"
    )


@contextlib.contextmanager
def reading(folder: str) -> Iterator[None]:
    """Turn the error for a checkpoint file that holds other objects than tensors into one that names the folder.

    Raises:
        ValueError: names the folder.
    """
    try:
        yield
    except (pickle.UnpicklingError, SafetensorError) as error:
        raise ValueError(
            f"{folder} has a file that holds something else than tensors and numbers, so it was not loaded"
            f" ({str(error).splitlines()[0]}); pass a checkpoint that this library wrote"
        ) from error
