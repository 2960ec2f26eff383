"""What transformers' Trainer forgets of its loop between two logs, and why a run has ended before its plan.

Loss since the last log, counts, metrics that have not been logged yet, and the patience of early stopping: without
them a resumed run would log other means. JSON, a file per process.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainerControl, TrainerState
from transformers.training_args import TrainingArguments

from onetrunk.files import atomic_write_json, read_json


def loop_state_file(rank: int) -> str:
    """Return the name of the file of a process."""
    return f"loop_state_{rank}.json"


def save_loop_state(trainer: Trainer, folder: str | Path, own: Mapping[str, Any]) -> None:
    """Write the loop's state of this process.

    Args:
        trainer: in training.
        folder: a checkpoint.
        own: what the trainer's class adds, in terms of JSON.
    """
    state = {
        "tr_loss": trainer._tr_loss.item(),
        "last_logged": trainer._globalstep_last_logged,
        **end_state(trainer),
        "own": dict(own),
    }
    atomic_write_json(Path(folder) / loop_state_file(trainer.args.process_index), state)


def load_loop_state(trainer: Trainer, folder: str | Path) -> dict[str, Any]:
    """Bring the loop to where it was; return what the trainer's class had added. Call it once training has begun."""
    state = read_loop_state(trainer, folder)
    trainer._tr_loss.fill_(state["tr_loss"])
    # The mean loss that training returns is over the steps of this call.
    trainer._total_loss_scalar = -state["tr_loss"]
    trainer._globalstep_last_logged = state["last_logged"]
    for callback, counter in zip(_early_stopping(trainer), state["early_stopping"], strict=False):
        callback.early_stopping_patience_counter = counter
    return state["own"]


def read_loop_state(trainer: Trainer, folder: str | Path) -> dict[str, Any]:
    """Return what `save_loop_state` wrote for this process."""
    return read_json(Path(folder) / loop_state_file(trainer.args.process_index))


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
    """Tells the trainer where its loop stands: begun, at the end of a pass.

    Args:
        trainer: has `begin_loop` and `is_pass_end`.
    """

    def __init__(self, trainer: Any):
        self.trainer = trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.trainer.begin_loop()

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.trainer.is_pass_end = False

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.trainer.is_pass_end = True
