"""What checkpoints of PPOTrainer hold beside those of every trainer: all branches of the trunk, and the stream.

Knows files and the trunk's branches; no objective.
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

from accelerate.logging import get_logger
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from torch import nn
from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import TrainOutput

from onetrunk.models.adapters import POLICY, VALUE_HEAD_FILE
from onetrunk.trainers.checkpoint import SafeCheckpoints
from onetrunk.trainers.resume_point import LOOP_FILES
from onetrunk.trainers.stream_state import STATE_FILE

logger = get_logger(__name__)


class BranchCheckpoints(SafeCheckpoints):
    """The part of PPOTrainer that saves, loads and pushes all branches of the trunk and the experience stream."""

    needed_files = (*LOOP_FILES, STATE_FILE, VALUE_HEAD_FILE, SAFETENSORS_WEIGHTS_NAME)

    def _train_until_stopped(self, **kwargs: Any) -> TrainOutput:
        """Train; from a checkpoint at the planned end of the run or past it only its weights and state are taken.

        Trainer itself would train one step more than planned.
        """
        if self._resume_from is None:
            return super()._train_until_stopped(**kwargs)
        state = TrainerState.load_from_json(str(Path(self._resume_from) / TRAINER_STATE_NAME))
        args, planned = self.args, self.args.max_steps
        if planned <= 0:
            planned = math.ceil(args.num_train_epochs * len(self.get_train_dataloader()))
        if state.global_step < planned:
            return super()._train_until_stopped(**kwargs)
        self.get_train_dataloader()  # Refuses a checkpoint of another run.
        self._load_from_checkpoint(self._resume_from)
        state.is_world_process_zero, state.is_local_process_zero = (
            args.process_index == 0,
            args.local_process_index == 0,
        )
        self.state = state
        longer = "num_rollouts" if args.num_rollouts else "max_steps" if args.max_steps > 0 else "num_train_epochs"
        logger.warning(
            f"nothing is left to train: {self._resume_from} is at step {state.global_step} of {planned} planned;"
            f" raise {longer} to train on"
        )
        return TrainOutput(state.global_step, 0.0, {})

    def own_loop_state(self) -> dict[str, Any]:
        """Return the metrics since the last log."""
        return self.metric_log.state_dict()

    def load_own_loop_state(self, state: dict[str, Any]) -> None:
        """Take the metrics back."""
        self.metric_log.load_state_dict(state)

    def may_save(self) -> bool:
        """Return whether the last gradient was finite."""
        return not self.guard.is_bad

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        self._stream.save(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        self.model.load_branches(resume_from_checkpoint)

    def _load_best_model(self) -> None:
        self.model.load_branches(self.state.best_model_checkpoint)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self.is_world_process_zero() and not self._is_staging:
            # Trainer copies what it knows: the files of the policy's adapter.
            for name in (VALUE_HEAD_FILE, *(a for a in self.model.peft_config if a != POLICY)):
                source, target = Path(checkpoint_folder) / name, Path(self.args.output_dir) / name
                if source.is_dir():
                    shutil.copytree(source, target, dirs_exist_ok=True)
                elif source.is_file():
                    shutil.copy(source, target)
        super()._push_from_checkpoint(checkpoint_folder)
