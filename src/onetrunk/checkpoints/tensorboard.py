"""TensorBoard for every training: a resumed run continues its own curves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter
from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import TensorBoardCallback
from transformers.integrations.integration_utils import default_logdir

# Where transformers puts the folders of TensorBoard, in the output folder.
RUNS = "runs"


class RunTensorBoard(TensorBoardCallback):
    """transformers' callback, which would begin a new run in TensorBoard whenever a training resumes.

    The events of steps that are made again are hidden.
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
            earlier = last_tensorboard_run(args.output_dir) if state.global_step else None
            self.logging_dir = str(earlier or Path(args.output_dir) / default_logdir())
        self.tb_writer = SummaryWriter(log_dir=self.logging_dir, purge_step=purge_step)


def last_tensorboard_run(output_dir: str | Path) -> Path | None:
    """Return the folder of the newest events in an output folder; None without any."""
    files = list((Path(output_dir) / RUNS).glob("*/events.out.tfevents.*"))
    return max(files, key=lambda path: path.stat().st_mtime_ns).parent if files else None
