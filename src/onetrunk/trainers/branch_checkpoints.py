"""What checkpoints of PPOTrainer hold beside those of every trainer: all branches of the trunk, and the stream.

Knows files and the trunk's branches; no objective.
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

from peft.utils import SAFETENSORS_WEIGHTS_NAME
from torch import nn

from onetrunk.models.adapters import POLICY, VALUE_HEAD_FILE
from onetrunk.trainers.checkpoint import SafeCheckpoints
from onetrunk.trainers.resume_point import LOOP_FILES
from onetrunk.trainers.stream_state import STATE_FILE


class BranchCheckpoints(SafeCheckpoints):
    """The part of PPOTrainer that saves, loads and pushes all branches of the trunk and the experience stream."""

    needed_files = (*LOOP_FILES, STATE_FILE, VALUE_HEAD_FILE, SAFETENSORS_WEIGHTS_NAME)

    def planned_steps(self) -> int:
        """Return how many optimizer steps the run is to have in all; nothing is read from a checkpoint."""
        args = self.args
        if args.max_steps > 0:
            return args.max_steps
        rollouts_per_pass = math.ceil(len(self.train_dataset) / args.rollout_batch_size)
        return math.ceil(args.num_train_epochs * rollouts_per_pass * args.slots_per_rollout)

    def own_state_bytes(self) -> int:
        """Return the bytes of a rollout in use: rows at their longest, and their states where sampling made them."""
        args = self.args
        longest = max(map(len, self.train_dataset["prompt_ids"]))
        rows, width = args.rollout_batch_size * args.num_generations, longest + args.max_completion_length
        # Ids and mask of the row and of its completion are int64; seven figures of a token are float32.
        per_row = 2 * 8 * width + (2 * 8 + 7 * 4) * args.max_completion_length
        if self.trunk_plan.captures_states:
            hidden_size = self.model.get_base_model().config.get_text_config().hidden_size
            per_row += 4 * width * hidden_size
        return rows * per_row

    def own_loop_state(self) -> dict[str, Any]:
        """Return the metrics since the last log, where the alarms stand, and the last evaluation."""
        own = {"alarms": self.alarms.state_dict(), "last_evaluation": self._last_evaluation}
        return {**self.metric_log.state_dict(), **own}

    def load_own_loop_state(self, state: dict[str, Any]) -> None:
        """Take them back."""
        self.metric_log.load_state_dict(state)
        if "alarms" in state:
            self.alarms.load_state_dict(state["alarms"], self.args)
        self._last_evaluation = state.get("last_evaluation")

    def may_save(self) -> bool:
        """Return whether the last gradient was finite."""
        return not self.guard.is_bad

    def needed_checkpoints(self) -> set[Path]:
        """Return the last checkpoints from before what the alarms count."""
        return self.alarms.needed_checkpoints(self.state.global_step, self.args)

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
