"""Which checkpoint a run resumes from, and the state of the training loop that Trainer itself does not save.

`locate` finds the checkpoint and checks each of its files against the manifest. The state of the loop is what Trainer
forgets between two logs (the loss since the last log, the patience of early stopping) and what ended the run.
TensorBoard's curves are continued too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from accelerate.logging import get_logger
from transformers import (
    EarlyStoppingCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.integrations import TensorBoardCallback
from transformers.integrations.integration_utils import default_logdir
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_pt_utils import get_length_grouped_indices

from onetrunk.checkpoints.folders import PREFIX, checkpoint_problems, described, last_whole, read_manifest
from onetrunk.utils.files import read_json, reading_content
from onetrunk.utils.randomness import PROMPTS_STREAM, derived_seed

if TYPE_CHECKING:
    from onetrunk.checkpoints.mirror import Mirror

logger = get_logger(__name__)

AUTO = "auto"
Callback = TypeVar("Callback", bound=TrainerCallback)


def loop_state_file(rank: int) -> str:
    """Return the name of the file that holds the loop's state of one process."""
    return f"loop_state_{rank}.json"


# Without the first three, Trainer would start from step 0 or with a new optimizer, and not say so.
LOOP_FILES = (TRAINER_STATE_NAME, OPTIMIZER_NAME, SCHEDULER_NAME, loop_state_file(0))


def open_mirror(args: TrainingArguments) -> Mirror | None:
    """Return the checked mirror of a run; None without `checkpoint_mirror` or if this process saves nothing."""
    url = getattr(args, "checkpoint_mirror", None)
    if not url or not args.should_save:
        return None
    if Path(url).resolve() == Path(args.output_dir).resolve():
        raise ValueError(f"checkpoint_mirror is the output_dir {url}; name another folder, or a store")
    from onetrunk.checkpoints.mirror import Mirror

    mirror = Mirror(url, args.save_total_limit, logger.warning)
    mirror.check()
    return mirror


def locate(
    resume_from: str | os.PathLike[str] | bool | None,
    args: TrainingArguments,
    needed: Sequence[str],
    mirror: Mirror | None,
) -> str | None:
    """Return the checkpoint folder to resume from, verified; None for a new run.

    With several processes the first one looks first, because it may download the checkpoint from the mirror.

    Args:
        resume_from: a folder; True for the last whole checkpoint in output_dir; "auto" for the same, or for a new run
            if there is no checkpoint; None, False or "" for a new run.
        needed: files that the checkpoint must hold.
        mirror: is searched if output_dir has no whole checkpoint.
    """
    with args.main_process_first(local=False, desc="looking for a checkpoint"):
        if not resume_from:
            return None
        if resume_from is True or resume_from == AUTO:
            folder = _last_or_pulled(args.output_dir, mirror)
            if folder is None and resume_from == AUTO:
                return None
            if folder is None:
                raise ValueError(
                    f"{args.output_dir} holds no {PREFIX}* folder to resume from; leave resume_from_checkpoint out, or"
                    " set it to auto, which starts a new run if there is no checkpoint"
                )
        else:
            folder = Path(resume_from)
            _require_whole(folder)
        _require_files(folder, needed)
        return str(folder)


def _last_or_pulled(output_dir: str, mirror: Mirror | None) -> Path | None:
    try:
        folder = last_whole(output_dir, tell=logger.warning)
    except RuntimeError:
        pulled = None if mirror is None else mirror.pull_last(output_dir)
        if pulled is None:
            raise
        return pulled
    return mirror.pull_last(output_dir) if folder is None and mirror is not None else folder


def _require_whole(folder: Path) -> None:
    if not folder.is_dir():
        raise ValueError(f"resume_from_checkpoint: there is no folder {folder}; pass an existing checkpoint")
    problems = checkpoint_problems(folder)
    if problems:
        raise ValueError(
            f"{folder} is damaged ({described(problems)}); pass another checkpoint, or auto for the last whole one"
        )


def _require_files(folder: Path, needed: Sequence[str]) -> None:
    files = read_manifest(folder)["files"]
    missing = [name for name in needed if name not in files]
    if missing:
        raise ValueError(
            f"{folder} lacks {', '.join(missing)}: it was saved with save_only_model, or by another kind of trainer;"
            f" pass a {PREFIX}* folder of this kind of run, or start a new run from its weights"
        )


def read_loop_state(trainer: Trainer, folder: str | Path) -> dict[str, Any]:
    """Return the state of the loop that a checkpoint has for this process.

    If another number of processes wrote the checkpoint, or other groups of them, this is their state merged. The loss
    since the last log is averaged over the processes, so each of them takes the mean.
    """
    written = read_manifest(folder).get("world_size", trainer.args.world_size)
    with reading_content(folder):
        if written == trainer.args.world_size and not trainer.has_other_groups(str(folder)):
            return _loop_state(folder, trainer.args.process_index)
        states = [_loop_state(folder, rank) for rank in range(written)]
        own = trainer.merged_loop_state([state["own"] for state in states])
        return {**states[0], "tr_loss": sum(state["tr_loss"] for state in states) / written, "own": own}


def _loop_state(folder: str | Path, rank: int) -> dict[str, Any]:
    state = read_json(Path(folder) / loop_state_file(rank))
    kinds = {"tr_loss": (int, float), "last_logged": int, "early_stopping": list, "own": dict}
    wrong = [name for name, kind in kinds.items() if not isinstance(state[name], kind)]
    if wrong or not all(type(count) is int for count in state["early_stopping"]):
        raise TypeError(f"{', '.join(wrong) or 'early_stopping'} of another type in {loop_state_file(rank)}")
    return state


def restore_early_stopping(trainer: Trainer, state: Mapping[str, Any]) -> None:
    """Restore the counters of early stopping from a state of the loop."""
    for callback, counter in zip(callbacks_of(trainer, EarlyStoppingCallback), state["early_stopping"], strict=False):
        callback.early_stopping_patience_counter = counter


def end_state(trainer: Trainer) -> dict[str, Any]:
    """Return the part of the loop's state that `end_of` reads."""
    stopping, ending = callbacks_of(trainer, EarlyStoppingCallback), callbacks_of(trainer, EndingCallback)
    return {
        "early_stopping": [callback.early_stopping_patience_counter for callback in stopping],
        "ended": next((callback.ended for callback in ending if callback.ended), None),
    }


def end_of(trainer: Trainer, state: Mapping[str, Any]) -> str | None:
    """Return what ended a run before its planned end, as a phrase; None if nothing did.

    Args:
        trainer: the trainer of this run; if its early stopping has more patience now, that did not end the run.
    """
    if state.get("ended"):
        return state["ended"]
    for callback, counter in zip(callbacks_of(trainer, EarlyStoppingCallback), state["early_stopping"], strict=False):
        if counter >= callback.early_stopping_patience:
            return f"early stopping: {counter} evaluations in a row were no better than the best one"
    return None


def callbacks_of(trainer: Trainer, kind: type[Callback]) -> list[Callback]:
    """Return the trainer's callbacks of a class."""
    return [callback for callback in trainer.callback_handler.callbacks if isinstance(callback, kind)]


class EndingCallback(TrainerCallback):
    """A callback that may end a run early. Checkpoints keep `ended`, so a run that was ended is not resumed."""

    # What ended the run, as a phrase.
    ended: str | None = None

    def restore_ended(self, state: TrainerState) -> None:
        """Restore the callback from the last checkpoint of a finished run, after which no training follows."""


class LoopEvents(TrainerCallback):
    """Follows the training loop: calls `begin` when it begins and `begin_pass` when a pass does; `is_pass_end` says
    whether a pass has just ended."""

    def __init__(self, begin: Callable[[], None], begin_pass: Callable[[], None]):
        self.begin, self.begin_pass = begin, begin_pass
        self.is_pass_end = False

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.begin()

    def on_epoch_begin(self, *args: Any, **kwargs: Any) -> None:
        self.is_pass_end = False
        self.begin_pass()

    def on_epoch_end(self, *args: Any, **kwargs: Any) -> None:
        self.is_pass_end = True


class LengthSampler:
    """A sampler for a DataLoader: rows of similar length together, in an order that each pass `epoch` has of its own.

    That of transformers draws from the global generator, so a resumed run would continue in another order.

    Args:
        batch_size: rows of an optimizer step.
        lengths: tokens of each row.
    """

    def __init__(self, batch_size: int, lengths: Sequence[int], seed: int):
        self.batch_size, self.lengths, self.seed, self.epoch = batch_size, lengths, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the pass."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(derived_seed(self.seed, PROMPTS_STREAM, self.epoch))
        return iter(get_length_grouped_indices(self.lengths, self.batch_size, generator=generator))


class RunTensorBoard(TensorBoardCallback):
    """transformers' callback, which would begin a new run in TensorBoard whenever a training resumes.

    The events of repeated steps are hidden.
    """

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.open(args, state, purge_step=state.global_step + 1 if state.global_step else None)
        super().on_train_begin(args, state, control, **kwargs)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.open(args, state)
        super().on_log(args, state, control, logs=logs, **kwargs)

    def open(self, args: TrainingArguments, state: TrainerState, purge_step: int | None = None) -> None:
        """Open the writer on the first process, in the folder that the run has used before."""
        if self.tb_writer is not None or not state.is_world_process_zero:
            return
        if self.logging_dir is None:
            earlier = (Path(args.output_dir) / "runs").glob("*/events.out.tfevents.*") if state.global_step else ()
            newest = max(earlier, key=lambda path: path.stat().st_mtime_ns, default=None)
            self.logging_dir = str(Path(args.output_dir) / default_logdir() if newest is None else newest.parent)
        from torch.utils.tensorboard import SummaryWriter

        self.tb_writer = SummaryWriter(log_dir=self.logging_dir, purge_step=purge_step)
