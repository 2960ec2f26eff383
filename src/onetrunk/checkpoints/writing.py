"""Writing and reading what may go wrong there, said in one sentence: a full disk, a file with more in it than numbers.

Knows files and errors; no training.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate.logging import get_logger
from peft import PeftModel
from safetensors import SafetensorError
from torch import nn

from onetrunk.checkpoints.folders import LEAST_KEPT
from onetrunk.checkpoints.manifest import MANIFEST, sync, write_manifest

# How torch says that a disk is full.
TORCH_WRITE_FAILED = re.compile(r"PytorchStreamWriter|unexpected pos|No space left|File too large|Disk quota")


@torch.no_grad()
def require_finite_weights(model: nn.Module, step: int) -> None:
    """Refuse to keep weights that are not finite: the checkpoints before them are what there is to go on from.

    Raises:
        RuntimeError: names the first of them.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    checks = [p.isfinite().all() for p in trained.values()]
    if not checks or torch.stack([check.to(checks[0].device) for check in checks]).all():
        return
    bad = [name for name, check in zip(trained, checks, strict=True) if not check]
    raise RuntimeError(
        f"{len(bad)} of {len(checks)} weights are not finite after step {step}, the first is {bad[0]}: nothing is"
        " saved, and the checkpoints before it are as they were; lower learning_rate, and go on from one of them"
    )


@contextlib.contextmanager
def writing(target: Path) -> Iterator[None]:
    """Say what could not be written in the block, and what there is to go on from.

    Raises:
        RuntimeError: names the folder, the reason and the free bytes.
    """
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not TORCH_WRITE_FAILED.search(str(error)):
            raise
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        free = shutil.disk_usage(existing(target)).free
        raise RuntimeError(
            f"{target} could not be written ({reason}; {free:,} bytes are free there); the checkpoints before it are"
            " as they were: make room, and go on with --resume auto"
        ) from error


@contextlib.contextmanager
def reading(folder: str) -> Iterator[None]:
    """Say that a file in a checkpoint holds something else than tensors and numbers, which is not loaded.

    Raises:
        ValueError: names the folder.
    """
    try:
        yield
    except (pickle.UnpicklingError, SafetensorError) as error:
        raise ValueError(
            f"{folder} holds a file with something else in it than tensors and numbers, which is not loaded"
            f" ({str(error).splitlines()[0]}); it was not written by this library: pass another checkpoint"
        ) from error


def install(staged: Path, target: Path, **about: Any) -> None:
    """Move a finished result into its folder, file by file; the manifest comes last and says that all of it is there.

    Args:
        staged: a folder in the staging folder of `target`, which goes.
        target: the run's folder.
        **about: what the manifest says besides.
    """
    (target / MANIFEST).unlink(missing_ok=True)
    write_manifest(staged, kind="result", **about)
    paths = [path for path in staged.rglob("*") if path.is_file()]
    for path in sorted(paths, key=lambda path: path.name == MANIFEST):
        place = target / path.relative_to(staged)
        place.parent.mkdir(parents=True, exist_ok=True)
        os.replace(path, place)
    sync(target)
    shutil.rmtree(staged.parent)


def existing(path: Path) -> Path:
    """Return a path, or the first of the folders above it that is there."""
    while not path.exists():
        path = path.parent
    return path


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
