"""Where a run goes on: the last checkpoint that is whole, or the one that is named, checked file by file.

Knows checkpoint folders and what transformers' Trainer needs of them; loads nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate.logging import get_logger
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainerControl, TrainerState
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.training_args import TrainingArguments

from onetrunk.checkpoints.folders import (
    LEAST_KEPT,
    PREFIX,
    checkpoint_folders,
    checkpoint_problems,
    described,
    last_whole,
)
from onetrunk.checkpoints.manifest import MANIFEST, read_manifest
from onetrunk.checkpoints.mirror import Mirror
from onetrunk.utils.files import read_json


def loop_state_file(rank: int) -> str:
    """Return the name of the file of a process."""
    return f"loop_state_{rank}.json"


def read_loop_state(trainer: Trainer, folder: str | Path) -> dict[str, Any]:
    """Return the loop's state that the trainer wrote into a checkpoint for this process."""
    return read_json(Path(folder) / loop_state_file(trainer.args.process_index))


def restore_early_stopping(trainer: Trainer, state: Mapping[str, Any]) -> None:
    """Set the counters of early stopping to those of a loop's state."""
    for callback, counter in zip(_early_stopping(trainer), state["early_stopping"], strict=False):
        callback.early_stopping_patience_counter = counter


def end_state(trainer: Trainer) -> dict[str, Any]:
    """Return the part of the loop's state that says whether something has ended the run, for `end_of`."""
    return {
        "early_stopping": [cb.early_stopping_patience_counter for cb in _early_stopping(trainer)],
        "ended": next((cb.ended for cb in ending_callbacks(trainer) if cb.ended), None),
    }


def end_of(trainer: Trainer, state: Mapping[str, Any]) -> str | None:
    """Return why a run ended at a checkpoint although more was planned; None: nothing ended it.

    Args:
        trainer: of this run. Early stopping that has more patience now has not ended it.
        state: what `read_loop_state` or `end_state` returned.
    """
    if state.get("ended"):
        return state["ended"]
    for callback, counter in zip(_early_stopping(trainer), state["early_stopping"], strict=False):
        if counter >= callback.early_stopping_patience:
            return f"early stopping: {counter} evaluations in a row were no better than the best one"
    return None


def ending_callbacks(trainer: Trainer) -> list[EndingCallback]:
    """Return the trainer's callbacks that may end a run."""
    return [cb for cb in trainer.callback_handler.callbacks if isinstance(cb, EndingCallback)]


def _early_stopping(trainer: Trainer) -> list[EarlyStoppingCallback]:
    return [cb for cb in trainer.callback_handler.callbacks if isinstance(cb, EarlyStoppingCallback)]


class EndingCallback(TrainerCallback):
    """A callback that may end a run before its plan. Checkpoints keep `ended`: a run that was ended stays ended."""

    # Why it has ended the run, as a phrase.
    ended: str | None = None

    def restore_ended(self, state: TrainerState) -> None:
        """Take back what the checkpoint of a finished run holds; no training follows."""


class LoopEvents(TrainerCallback):
    """Follows the training loop: calls `begin` when it begins; `is_pass_end` says whether a pass has just ended."""

    def __init__(self, begin: Callable[[], None]):
        self.begin = begin
        self.is_pass_end = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.begin()

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.is_pass_end = False

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.is_pass_end = True


logger = get_logger(__name__)

AUTO = "auto"
# What Trainer would go on without, with a fresh optimizer or from step 0.
LOOP_FILES = (TRAINER_STATE_NAME, OPTIMIZER_NAME, SCHEDULER_NAME, loop_state_file(0))


def find_checkpoint(
    given: str | os.PathLike[str] | bool | None,
    output_dir: str | os.PathLike[str],
    needed: Sequence[str] = LOOP_FILES,
    fetch: Callable[[], Path | None] | None = None,
) -> str | None:
    """Return the checkpoint folder to go on from, verified; None: begin anew.

    Args:
        given: a folder; True for the last whole one in `output_dir`; "auto" for that, or a new run where there is
            none at all; nothing to begin anew.
        output_dir: of the run.
        needed: files that it must hold.
        fetch: brings the last checkpoint from elsewhere where `output_dir` has no whole one.

    Raises:
        ValueError: there is no checkpoint, the named one is damaged, or one is no full checkpoint.
        RuntimeError: there are checkpoints, and none is whole.
    """
    if not given:
        return None
    if given is True or given == AUTO:
        folder = _last_or_fetched(output_dir, fetch)
        if folder is None and given == AUTO:
            return None
        if folder is None:
            raise ValueError(
                f"{output_dir} holds no {PREFIX}* folder to resume from; leave resume_from_checkpoint out, or"
                " set it to auto, which begins anew where there is none"
            )
    else:
        folder = Path(given)
        _require_whole(folder)
    _require_full(folder, needed)
    return str(folder)


def _last_or_fetched(output_dir: str | os.PathLike[str], fetch: Callable[[], Path | None] | None) -> Path | None:
    damage = None
    try:
        folder = last_whole(output_dir, tell=logger.warning)
    except RuntimeError as error:
        folder, damage = None, error
    if folder is None and fetch is not None:
        folder = fetch()
    if folder is None and damage is not None:
        raise damage
    return folder


def open_mirror(args: Any) -> Mirror | None:
    """Return the second home of a run's checkpoints, tried out; None where it has none, or another process keeps it.

    Args:
        args: TrainingArguments with `checkpoint_mirror`.

    Raises:
        RuntimeError: it can't be written to or read.
    """
    url = getattr(args, "checkpoint_mirror", None)
    if not url or not args.should_save:
        return None
    limit = args.save_total_limit
    mirror = Mirror(url, max(limit, LEAST_KEPT) if limit else None, logger.warning)
    mirror.check(args.output_dir)
    return mirror


def locate(
    given: str | os.PathLike[str] | bool | None, args: Any, needed: Sequence[str], mirror: Mirror | None
) -> str | None:
    """Return what `find_checkpoint` finds for a run; its first process fetches from the mirror for all.

    Args:
        given: as for `find_checkpoint`.
        args: TrainingArguments.
        needed: as for `find_checkpoint`.
        mirror: where to look when output_dir holds no checkpoint.
    """
    fetch = None if mirror is None else lambda: mirror.pull_last(args.output_dir)
    with args.main_process_first(local=False, desc="looking for a checkpoint"):
        return find_checkpoint(given, args.output_dir, needed, fetch)


def _require_whole(folder: Path) -> None:
    if not folder.is_dir():
        raise ValueError(f"resume_from_checkpoint: there is no folder {folder}")
    found = checkpoint_problems(folder)
    if not found:
        return
    others = [path for path in checkpoint_folders(folder.parent) if path != folder and not checkpoint_problems(path)]
    remedy = f"{others[-1]} is whole" if others else "no other checkpoint beside it is whole"
    if found[0].startswith(f"{MANIFEST}: missing"):
        raise ValueError(
            f"{folder} has no {MANIFEST}: it was not written to its end, or by another program, and can't be resumed"
            f" exactly; {remedy}"
        )
    raise ValueError(f"{folder} is damaged ({described(found)}); {remedy}")


def _require_full(folder: Path, needed: Sequence[str]) -> None:
    manifest = read_manifest(folder)
    lacking = [name for name in needed if name not in manifest["files"]]
    if OPTIMIZER_NAME in lacking:
        raise ValueError(
            f"{folder} holds no {', '.join(lacking)}: it was saved with save_only_model, or is no checkpoint of this"
            " kind of run, so nothing can go on from it exactly; start a new run from its weights instead"
        )
    if lacking:
        raise ValueError(
            f"{folder} lacks {', '.join(lacking)}: it is no checkpoint of this kind of run; pass another of its"
            f" {PREFIX}* folders"
        )
