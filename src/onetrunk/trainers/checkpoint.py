"""What a checkpoint of PPOTrainer holds beside transformers' own files, and the check before a run goes on from one.

Knows files and the trunk's branches; no objective.
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

from accelerate.logging import get_logger
from torch import nn
from transformers import Trainer, TrainerState
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import TrainOutput, get_last_checkpoint

from onetrunk.models.adapters import POLICY, VALUE_HEAD_FILE
from onetrunk.trainers.stream_state import STATE_FILE

logger = get_logger(__name__)

# Without the first three Trainer goes on all the same, with a fresh optimizer or from step 0.
FILES = (TRAINER_STATE_NAME, OPTIMIZER_NAME, SCHEDULER_NAME, STATE_FILE, VALUE_HEAD_FILE)


def find_checkpoint(given: str | Path | bool | None, output_dir: str) -> str | None:
    """Return the checkpoint folder to go on from, its files checked to be there; None: start anew.

    Args:
        given: a folder, True for the last one in `output_dir`, or nothing.
        output_dir: of the run.

    Raises:
        ValueError: there is no checkpoint, or one of its files is missing.
    """
    if not given:
        return None
    folder = given
    if given is True:
        folder = get_last_checkpoint(output_dir) if Path(output_dir).is_dir() else None
        if folder is None:
            raise ValueError(
                f"{output_dir} holds no checkpoint-* folder to resume from; leave resume_from_checkpoint out"
            )
    if not Path(folder).is_dir():
        raise ValueError(f"resume_from_checkpoint: there is no folder {folder}")
    missing = [name for name in FILES if not (Path(folder) / name).is_file()]
    if missing:
        raise ValueError(
            f"{folder} lacks {', '.join(missing)}: it is no complete checkpoint of PPOTrainer; pass another of its"
            " checkpoint-* folders"
        )
    return str(folder)


class BranchCheckpoints(Trainer):
    """The part of PPOTrainer that saves, loads and pushes all branches of the trunk and the experience stream."""

    def train(self, resume_from_checkpoint: str | None = None, **kwargs: Any) -> TrainOutput:
        """Train; from a checkpoint at the planned end of the run or past it only its weights and state are taken.

        Trainer itself would train one step more than planned.
        """
        if resume_from_checkpoint is None:
            return super().train(**kwargs)
        state = TrainerState.load_from_json(str(Path(resume_from_checkpoint) / TRAINER_STATE_NAME))
        args, planned = self.args, self.args.max_steps
        if planned <= 0:
            planned = math.ceil(args.num_train_epochs * len(self.get_train_dataloader()))
        if state.global_step < planned:
            return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)
        self.get_train_dataloader()  # Refuses a checkpoint of another run.
        self._load_from_checkpoint(resume_from_checkpoint)
        state.is_world_process_zero, state.is_local_process_zero = (
            args.process_index == 0,
            args.local_process_index == 0,
        )
        self.state = state
        longer = "num_rollouts" if args.num_rollouts else "max_steps" if args.max_steps > 0 else "num_train_epochs"
        logger.warning(
            f"nothing is left to train: {resume_from_checkpoint} is at step {state.global_step} of {planned} planned;"
            f" raise {longer} to train on"
        )
        return TrainOutput(state.global_step, 0.0, {})

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        self._stream.save(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        self.model.load_branches(resume_from_checkpoint)

    def _load_best_model(self) -> None:
        self.model.load_branches(self.state.best_model_checkpoint)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self.is_world_process_zero():
            # Trainer copies what it knows: the files of the policy's adapter.
            for name in (VALUE_HEAD_FILE, *(a for a in self.model.peft_config if a != POLICY)):
                source, target = Path(checkpoint_folder) / name, Path(self.args.output_dir) / name
                if source.is_dir():
                    shutil.copytree(source, target, dirs_exist_ok=True)
                elif source.is_file():
                    shutil.copy(source, target)
        super()._push_from_checkpoint(checkpoint_folder)
