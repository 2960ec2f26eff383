"""The settings that every training has: checkpoints, and bfloat16. Imports no trainer; see `utils/options.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from onetrunk.utils.options import option, reject_deepspeed, replace_none

if TYPE_CHECKING:
    from transformers import TrainingArguments


# Words of report_to that are not the name of a package.
WITHOUT_PACKAGE = ("all", "none", "", "azure_ml", "dagshub", "flyte", "kubeflow")


@dataclass(repr=False)
class CheckpointConfig:
    """The settings that every training has. List it before TrainingArguments among the bases.

    bfloat16 autocast is the default only where an accelerator supports it.
    """

    allow_config_change: bool = option(
        False, "Resume from a checkpoint although settings that steer what is learned have changed."
    )
    continue_ended_run: bool = option(
        False,
        "Continue from a checkpoint at which an alarm, the monitor or early stopping ended the run; false: such a run"
        " is finished, even if more steps are planned.",
    )
    checkpoint_mirror: str | None = option(
        None,
        "A second place for checkpoints and result: a folder, s3://, gs:// or hf://; --resume auto looks there if"
        " output_dir has no checkpoint.",
    )
    overwrite_output_dir: bool = option(
        False, "Start over in an output_dir that holds a run: its checkpoints are deleted when training begins."
    )

    def __post_init__(self) -> None:
        replace_none(self)
        reject_deepspeed()  # TrainingArguments would ask for its package first.
        _check_intervals(self)
        if self.bf16 is None:  # TRL would set it on a CPU too.
            self.bf16 = _bf16_by_default(self)
        super().__post_init__()
        if not (self.num_train_epochs > 0 or self.max_steps > 0 or getattr(self, "num_rollouts", None) is not None):
            raise ValueError(f"num_train_epochs is {self.num_train_epochs}: no step would be trained; set it above 0")
        _check_trackers(self.report_to)


def _bf16_by_default(args: TrainingArguments) -> bool:
    """Return whether bf16 is on by default: without fp16, on an accelerator that supports it."""
    import torch  # Here: settings are checked before torch is imported.

    return not args.fp16 and not args.use_cpu and torch.cuda.is_available() and torch.cuda.is_bf16_supported()


def _check_trackers(report_to: Sequence[str] | str | None) -> None:
    """Raise ValueError if `report_to` names a tracker whose package is missing."""
    for name in [report_to] if isinstance(report_to, str) else report_to or ():
        if name not in WITHOUT_PACKAGE and find_spec(name) is None:
            raise ValueError(f"report_to names {name}, which is not installed; pip install {name}, or set tensorboard")


def _check_intervals(args: TrainingArguments) -> None:
    for kind in ("save", "eval", "logging"):
        value, is_used = getattr(args, f"{kind}_steps"), getattr(args, f"{kind}_strategy") == "steps"
        # Without eval_steps, logging_steps counts.
        if is_used and value is not None and not value > 0:
            raise ValueError(
                f"{kind}_steps is {value!r}, and {kind}_strategy is 'steps'; set a whole number above 0 or a share of"
                f" all steps between 0 and 1, or set {kind}_strategy to 'no'"
            )
    if (args.load_best_model_at_end or args.save_strategy == "best") and args.eval_strategy == "no":
        setting = "load_best_model_at_end" if args.load_best_model_at_end else "save_strategy 'best'"
        raise ValueError(
            f"{setting} needs evaluations to choose by, and eval_strategy is 'no'; set eval_strategy to 'steps' or"
            " 'epoch', with held-out rows, or leave it out"
        )
