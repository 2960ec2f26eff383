"""What every training stage can be told of its checkpoints. Knows names and help texts."""

from __future__ import annotations

from dataclasses import dataclass, field


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
