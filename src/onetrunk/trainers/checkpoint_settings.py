"""Settings of checkpoints that every training stage has, and the checks of those that TrainingArguments lets pass."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(repr=False)
class CheckpointSettings:
    """The part of a settings class that speaks of checkpoints; it stands before TrainingArguments."""

    allow_config_change: bool = field(
        default=False,
        metadata={"help": "Go on from a checkpoint although settings that steer what is learnt have changed."},
    )
    continue_ended_run: bool = field(
        default=False,
        metadata={
            "help": "Train on from a checkpoint at which an alarm, the monitor or early stopping ended the run; false:"
            " such a run is finished, whatever is planned."
        },
    )
    checkpoint_mirror: str | None = field(
        default=None,
        metadata={
            "help": "A second home of checkpoints and result: a folder, s3://, gs:// or hf://; --resume auto looks"
            " there where output_dir has none."
        },
    )

    def __post_init__(self) -> None:
        check_intervals(self)
        super().__post_init__()


def check_intervals(args: Any) -> None:
    """Refuse intervals at which nothing can happen, and a best model that no evaluation chooses.

    Raises:
        ValueError: names the setting, its value and what it may be.
    """
    for strategy, steps in (
        ("save_strategy", "save_steps"),
        ("eval_strategy", "eval_steps"),
        ("logging_strategy", "logging_steps"),
    ):
        value = getattr(args, steps)
        is_unset = value is None and steps == "eval_steps"  # It is logging_steps then.
        if _word(getattr(args, strategy)) == "steps" and not is_unset and not (_is_number(value) and value > 0):
            raise ValueError(
                f"{steps} is {value!r}, and {strategy} is 'steps'; set a whole number above 0 or a share of all steps"
                f" between 0 and 1, or set {strategy} to 'no'"
            )
    needs = "load_best_model_at_end" if args.load_best_model_at_end else "save_strategy 'best'"
    chooses_best = args.load_best_model_at_end or _word(args.save_strategy) == "best"
    if chooses_best and _word(args.eval_strategy) == "no":
        raise ValueError(
            f"{needs} needs evaluations to choose by, and eval_strategy is 'no'; set eval_strategy to 'steps' or"
            " 'epoch', with held-out rows, or leave it out"
        )


def _word(strategy: Any) -> str:
    return str(getattr(strategy, "value", strategy))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
