"""What transformers' Trainer forgets of its loop between two logs: a resumed run would log other means.

Loss since the last log, counts, metrics that have not been logged yet, and the patience of early stopping. JSON, a
file per process. Knows the attributes of Trainer and of TRL's trainers; no weights.
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
        "early_stopping": [cb.early_stopping_patience_counter for cb in _early_stopping(trainer)],
        "own": dict(own),
    }
    atomic_write_json(Path(folder) / loop_state_file(trainer.args.process_index), state)


def load_loop_state(trainer: Trainer, folder: str | Path) -> dict[str, Any]:
    """Bring the loop to where it was; return what the trainer's class had added. Call it once training has begun."""
    state = read_json(Path(folder) / loop_state_file(trainer.args.process_index))
    trainer._tr_loss.fill_(state["tr_loss"])
    # The mean loss that training returns is over the steps of this call.
    trainer._total_loss_scalar = -state["tr_loss"]
    trainer._globalstep_last_logged = state["last_logged"]
    for callback, counter in zip(_early_stopping(trainer), state["early_stopping"], strict=False):
        callback.early_stopping_patience_counter = counter
    return state["own"]


def _early_stopping(trainer: Trainer) -> list[EarlyStoppingCallback]:
    return [cb for cb in trainer.callback_handler.callbacks if isinstance(cb, EarlyStoppingCallback)]


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
